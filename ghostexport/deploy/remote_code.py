"""Targets ``transformers`` and ``vllm``: a checkpoint with one modeling file, the operators in the model's body."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ghostexport.deploy.bundle import Bundle
from ghostexport.deploy.selftest import Answer
from ghostexport.errors import ModelLayoutError
from ghostexport.execution import Execution
from ghostexport.files import write_bytes, write_json
from ghostexport.operators import OperatorSet

CODE = "modeling_ghost.py"
INSTALL = "pip install transformers==5.24.0 torch==2.13.0"

#: Suffix of an operator's parameter in the model in memory -> that in the folder; matrices are held transposed.
_NAMES = {
    "delta": "linear.weight",
    "factor_u": "down.weight",
    "factor_v": "up.weight",
    "network_w1": "first.weight",
    "network_b1": "first.bias",
    "network_w2": "second.weight",
    "network_b2": "second.bias",
    "diagonal": "diagonal",
}
_BIAS = {"delta": "linear.bias", "factors": "up.bias"}


def write(bundle: Bundle, output: Path, execution: Execution) -> None:
    """Writes config, modeling file, weights, tokenizer and generation config; needs PyTorch and the base model.

    Raises:
        ModelLayoutError: the body of the model is of no class of transformers' own.
    """
    model, tokenizer = patched(bundle, execution)
    write_model(model, tokenizer, bundle.operators, output)


def write_model(model: Any, tokenizer: Any, operators: OperatorSet | None, output: Path) -> None:
    """The same of a model in memory, whose operators are inserted."""
    from ghostexport import models
    from ghostexport.models.checkpoints import save_checkpoint

    if operators is None or not operators.adds_nodes:
        save_checkpoint(model, tokenizer, output)
        return
    blocks = models.find_blocks(model)
    prefix = str(model.base_model_prefix)
    body = getattr(model, prefix)
    inside = next((name for name, module in body.named_modules() if module is blocks), None)
    if inside is None or not type(model).__module__.startswith("transformers."):
        raise ModelLayoutError(f"{type(model).__name__} is no plain class of transformers with a body.", "Use genai.")
    entries, tensors = _operators(operators, model, f"{prefix}.{inside}")
    # under their names in memory: of those of the base's checkpoints nothing is known to a class of another type
    save_checkpoint(model, tokenizer, output, tensors, save_original_format=False)
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    kind = f"ghost_{config['model_type']}"
    classes = {"AutoConfig": "GhostConfig", "AutoModel": "GhostModel", "AutoModelForCausalLM": "GhostForCausalLM"}
    head = {
        "model_type": kind,
        "architectures": ["GhostForCausalLM"],
        "auto_map": {auto: f"{CODE.removesuffix('.py')}.{name}" for auto, name in classes.items()},
        "ghost": entries,
        "hidden_size": 1,
    }
    own = {key: value for key, value in config.items() if key not in ("model_type", "architectures", "auto_map")}
    write_json(output / "config.json", head | {"base": own})
    template = resources.files("ghostexport.deploy").joinpath(f"{CODE}.txt").read_text(encoding="utf-8")
    names = {
        "base": type(model).__name__,
        "model_type": kind,
        "config_module": type(model.config).__module__,
        "config_class": type(model.config).__name__,
        "model_module": type(model).__module__,
        "body_class": type(body).__name__,
        "causal_class": type(model).__name__,
        "blocks": inside,
        "prefix": prefix,
    }
    write_bytes(output / CODE, template.format(**names).encode())


def patched(bundle: Bundle, execution: Execution) -> tuple[Any, Any]:
    """The variant as a PyTorch model, and its tokenizer."""
    from ghostexport import models

    how = bundle.recipe["model"]
    trust = {"trust_remote_code": how.get("trust_remote_code", False)}
    loaded = models.load_model(how["source"], how["dtype"], execution, how.get("revision"), **trust)
    if bundle.variant_source != "dense":
        loaded = models.patch(loaded, bundle.plan, bundle.operators)
    return loaded.model, loaded.tokenizer


def _operators(operators: OperatorSet, model: Any, blocks: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The configuration's entries, and the state of the model with operators under the folder's names."""
    from ghostexport.models import BoundaryModule, find_blocks

    state = dict(model.state_dict())
    dtype = next(model.parameters()).dtype
    count, entries = len(find_blocks(model)), []
    for operator in operators.operators:
        if not operator.adds_nodes:
            continue
        position = operator.boundary.position
        site = "mid" if operator.site == "mid" else "before" if position < count else "after"
        at = position if site == "before" else position - 1
        place = f"{blocks}.{at}.{ {'before': 'ghost', 'after': 'ghost_after', 'mid': 'ghost_mid'}[site] }."
        own = {key: state.pop(f"{place}{key}") for key in operator.arrays}
        form = _form(own)
        entry: dict[str, Any] = {"position": position, "site": site, "form": form, "bias": "bias" in own, "sums": {}}
        if (computed := next(iter(own.values())).dtype) != dtype:
            entry["dtype"] = str(computed).removeprefix("torch.")
        if form in ("factors", "network"):
            entry["rank"] = int(own["factor_u" if form == "factors" else "network_w1"].shape[1])
        if site == "mid":
            entry["reads"] = next(
                name
                for name, module in find_blocks(model)[at].named_modules()
                for hook in module._forward_pre_hooks.values()
                if getattr(hook, "__func__", None) is BoundaryModule.read_mid
            )
        for key, values in own.items():
            name = place + (_BIAS.get(form, "bias") if key == "bias" else _NAMES[key])
            state[name] = (values.T if values.ndim == 2 else values).contiguous().clone()
            entry["sums"][name.partition(".")[2]] = float(values.detach().double().abs().sum())
        entries.append(entry)
    return entries, state


def _form(own: Mapping[str, Any]) -> str:
    keys = {"delta": "delta", "factor_u": "factors", "network_w1": "network", "diagonal": "diagonal"}
    return next((form for key, form in keys.items() if key in own), "bias")


def run(folder: Path, prompts: Sequence[list[int]], count: int) -> list[Answer]:
    """See :data:`selftest.Runner`: transformers, with the folder's own code."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    answers: list[Answer] = []
    for ids in prompts:
        given = torch.tensor([ids])
        with torch.no_grad():
            logits = model(given).logits[0, -1].float().numpy()
            how = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
            found = model.generate(given, attention_mask=torch.ones_like(given), eos_token_id=None, **how)
        answers.append((logits, found[0, len(ids) :].tolist()))
    return answers
