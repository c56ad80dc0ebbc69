"""Target ``genai``: ONNX Runtime GenAI runs the verified graph as it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ghostexport.deploy.bundle import Bundle
from ghostexport.deploy.selftest import Answer
from ghostexport.execution import Execution
from ghostexport.files import write_json
from ghostexport.onnxfile.graph_io import load_graph, save_graph

GRAPH = "model.onnx"
#: Provider options of the devices that the folder may run on; the CPU's, none, are the ones written.
PROVIDERS: dict[str, list[dict[str, Any]]] = {
    "cpu": [],
    "cuda": [{"cuda": {}}],
    "rtx": [{"NvTensorRtRtx": {}}],
}
#: While tested: multiply by quantised weights in float32, as the verification did; else inputs are rounded to 8 bits.
EXACT = {"session.qdq_matmulnbits_accuracy_level": "1"}


def refusal(bundle: Bundle) -> str | None:
    """Why the variant does not fit, or None."""
    return "its CPU provider has no bfloat16 kernels" if bundle.interface.dtype == "bfloat16" else None


def write(bundle: Bundle, output: Path, execution: Execution) -> None:
    """Writes the graph with a data file of its own, tokenizer, and ``genai_config.json``."""
    bundle.copy_description(output, config=False)
    write_graph(bundle, output / GRAPH)
    write_json(output / "genai_config.json", genai_config(bundle, []))
    for name, options in PROVIDERS.items():
        if options:
            write_json(output / f"genai_config.{name}.json", genai_config(bundle, options))


def use(bundle: Bundle) -> str:
    """How it is run, in Markdown."""
    several = (
        "`Tokenizer.encode_batch`, which pads on the right; padding on the left is attended to."
        if bundle.window is None
        else f"only of one length. Padding would count among the {bundle.window} tokens that one attends to."
    )
    return (
        "ONNX Runtime GenAI: `onnxruntime_genai.Model(FOLDER)`. `genai_config.cuda.json` and `genai_config.rtx.json` "
        f"are for NVIDIA GPUs: put one in the place of `genai_config.json`. Several prompts at once: {several}"
    )


def write_graph(bundle: Bundle, path: Path) -> None:
    """The variant's graph, with all its weights in one data file beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_graph(load_graph(bundle.graph), path, [], self_contained=True)


def genai_config(bundle: Bundle, provider_options: list[dict[str, Any]]) -> dict[str, Any]:
    """Its configuration: names and sizes are those of the graph."""
    interface, codec, config = bundle.interface, bundle.codec, bundle.config
    past, present = zip(*interface.kv, strict=True)
    shapes = {t.name: t.dims for t in interface.inputs}
    heads, size = shapes[past[0]][1], shapes[past[0]][3]
    inputs = {t.name: t.name for t in interface.inputs if t.name not in past}
    logits = next(t for t in interface.outputs if t.name not in present)
    positions = codec.positions or 2048
    ends = sorted(codec.ends)
    begin = codec.tokenizer.token_to_id(codec.special.get("bos_token") or "")
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": provider_options},
        "filename": GRAPH,
        "head_size": size,
        "hidden_size": config["hidden_size"] if "hidden_size" in config else config["n_embd"],
        "inputs": inputs | _numbered(past, "past_key_names", "past_value_names"),
        "outputs": {"logits": logits.name} | _numbered(present, "present_key_names", "present_value_names"),
        "num_attention_heads": config.get("num_attention_heads") or config.get("n_head"),
        "num_hidden_layers": bundle.kept,
        "num_key_value_heads": heads,
    }
    return {
        "model": {
            "type": "llama",
            "bos_token_id": config.get("bos_token_id") if begin is None else begin,
            "eos_token_id": ends[0] if len(ends) == 1 else ends,
            "pad_token_id": _padding(bundle),
            "context_length": positions,
            "vocab_size": logits.dims[-1] if isinstance(logits.dims[-1], int) else config["vocab_size"],
            "decoder": decoder,
        },
        "search": {"max_length": positions, "past_present_share_buffer": False, "do_sample": False},
    }


def _padding(bundle: Bundle) -> int:
    """The padding token, unless it is an end token: GenAI answers a prompt that ends with it one token too early."""
    own = bundle.config.get("pad_token_id")
    return int(bundle.config["vocab_size"]) - 1 if own is None or own in bundle.codec.ends else int(own)


def _numbered(names: Sequence[str], keys: str, values: str) -> dict[str, str]:
    """The two templates, ``layers.%d.keys``, of names that alternate."""
    return {keys: _template(names[0]), values: _template(names[1])}


def _template(name: str) -> str:
    head, _, tail = name.rpartition("0")
    return f"{head}%d{tail}"


def run(folder: Path, prompts: Sequence[list[int]], count: int) -> list[Answer]:
    """See :data:`selftest.Runner`."""
    import onnxruntime_genai as og

    config = og.Config(str(folder))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": EXACT}}}))
    model = og.Model(config)
    answers: list[Answer] = []
    for ids in prompts:
        parameters = og.GeneratorParams(model)
        # min_length keeps an end token from ending it, and would change its logits: tokens are chosen here
        parameters.set_search_options(max_length=len(ids) + count + 1, do_sample=False)
        generator = og.Generator(model, parameters)
        generator.append_tokens(np.array(ids, np.int32))
        first, tokens = None, []
        for _ in range(count):
            logits = np.asarray(generator.get_logits()).reshape(-1)[-_vocabulary(generator) :]
            first = logits.astype(np.float32) if first is None else first
            tokens.append(int(logits.argmax()))
            generator.append_tokens(np.array([tokens[-1]], np.int32))
        answers.append((first, tokens))
    return answers


def _vocabulary(generator: Any) -> int:
    return int(np.asarray(generator.get_logits()).shape[-1])
