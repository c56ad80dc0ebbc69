"""Adapters (LoRA and whatever else ``peft`` merges) become ordinary checkpoints: their base with the changes added."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from ghostexport.errors import ModelLayoutError, RecipeError, RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.files import sha256_file
from ghostexport.models.checkpoints import made_once
from ghostexport.models.silence import hidden_progress_bars, silenced

#: What makes a folder an adapter's.
ADAPTER_CONFIG = "adapter_config.json"

_WEIGHTS = ("*.safetensors", "*.bin")


def read_adapter(folder: Path) -> tuple[str, str, str | None]:
    """Kind (``LORA``), base model and the base's revision of an adapter.

    Raises:
        RecipeError: its base is not named, or weights of a whole model stand beside it: which are meant is not clear.
    """
    try:
        adapter = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except ValueError:
        adapter = {}
    kind, base = adapter.get("peft_type", "PEFT"), adapter.get("base_model_name_or_path")
    beside = [p.name for pattern in _WEIGHTS for p in folder.glob(pattern) if p.stem != "adapter_model"]
    if not base or ((folder / "config.json").exists() and beside):
        fault = f"and other weights, {beside[0]}" if base else "and names no base model"
        raise RecipeError(
            f"model.source: {folder} holds a {kind} adapter of {base or 'its base model'} {fault}.",
            "Give it a folder of its own, or merge it first: peft.AutoPeftModelForCausalLM.from_pretrained(FOLDER)"
            ".merge_and_unload().save_pretrained(MERGED); save the base model's tokenizer there, and name MERGED.",
        )
    return str(kind), str(base), adapter.get("revision")


def merge_adapter(folder: Path, base: Path, execution: Execution) -> Path:
    """The plain folder, in the user's cache, of a base model with an adapter merged into its weights.

    Raises:
        RuntimeUnavailableError: peft is not installed.
        ModelLayoutError: peft cannot merge this kind of adapter, or its tensors do not belong to the base.
    """
    kind = read_adapter(folder)[0]
    if importlib.util.find_spec("peft") is None:
        raise RuntimeUnavailableError(
            f"model.source: {folder} holds a {kind} adapter of {base}; merging it needs peft.",
            "pip install 'ghostexport[peft]'",
        )
    weights = [path for pattern in _WEIGHTS for path in sorted(base.glob(pattern))]
    own = [sha256_file(path) for path in sorted(folder.glob("adapter_*"))]
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in weights]
    key = hashlib.sha256(json.dumps([own, str(base.resolve()), stats]).encode()).hexdigest()[:32]
    size, what = sum(size for _, size, _ in stats), f"merging the {kind} adapter {folder.name} into {base.name}"
    return made_once("merged", key, what, size, lambda: _merged(folder, base, kind), execution)


@hidden_progress_bars()
def _merged(folder: Path, base: Path, kind: str) -> tuple[Any, Any]:
    import peft

    try:
        with silenced("transformers", "peft"):
            model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
            weights = peft.load_peft_weights(str(folder), device="cpu")
            wrapped = peft.get_peft_model(model, peft.PeftConfig.from_pretrained(str(folder)))
            expected = set(peft.get_peft_model_state_dict(wrapped))
            peft.set_peft_model_state_dict(wrapped, weights)
            merged = wrapped.merge_and_unload()
    except (ValueError, OSError, KeyError, RuntimeError, AttributeError, NotImplementedError, TypeError) as error:
        raise ModelLayoutError(
            f"The {kind} adapter {folder} cannot be merged into {base}: {error}",
            "Use the base model that its adapter_config.json names, or merge it with the program that trained it.",
        ) from error
    if astray := sorted(expected ^ set(weights)):
        raise ModelLayoutError(
            f"The {kind} adapter {folder} and {base} do not belong together: {astray[0]} is in one only.",
            "Use the base model that its adapter_config.json names.",
        )
    with_tokenizer = folder if (folder / "tokenizer_config.json").exists() else base
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(with_tokenizer)
    except (ValueError, OSError, KeyError):
        tokenizer = None
    return merged.to(next(p.dtype for p in model.parameters() if p.dtype != torch.float64)).eval(), tokenizer
