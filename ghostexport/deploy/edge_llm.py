"""Target ``edge-llm``: what TensorRT Edge-LLM builds from, a plain checkpoint or its own export, cut.

Its loader passes over tensors that it does not know, without a word: an operator, or the bias of a fold, would be lost.
In the graph that its exporter wrote every operator has a place.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ghostexport.deploy import plain_checkpoint, remote_code
from ghostexport.deploy.bundle import Bundle
from ghostexport.deploy.selftest import Answer
from ghostexport.errors import RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.files import write_json
from ghostexport.surgery import operate

#: Whose blocks its default model computes (0.11); the others have models of their own there, or none.
TYPES = ("llama", "mistral", "qwen2", "qwen3")
GRAPH, CONFIG = "model.onnx", "config.json"


def refusal(bundle: Bundle) -> str | None:
    """Why the variant does not fit, or None."""
    if bundle.exported is not None:
        blocks = _config(bundle.exported).get("num_hidden_layers")
        if "edgellm_version" not in _config(bundle.exported) or not (bundle.exported / GRAPH).is_file():
            return f"{bundle.exported} holds no {GRAPH} and {CONFIG} of tensorrt-edgellm-export"
        wanted = bundle.plan.num_blocks
        return None if blocks == wanted else f"{bundle.exported} has {blocks} blocks, the whole model {wanted}"
    if (reason := plain_checkpoint.refusal(bundle)) is not None:
        return f"{reason}; in its own export of the whole model it has one (--exported FOLDER)"
    folds = [fold for operator in bundle.operators.operators for fold in operator.folds] if bundle.operators else []
    if any(fold.bias is not None for fold in folds):
        return "it reads no bias of a projection into the stream, and the fold has one"
    kind = str(bundle.config.get("model_type"))
    if kind not in TYPES:
        return f"its default model is known to compute {', '.join(TYPES)}, not {kind}"
    return None if bundle.codec.template is not None else "it wants a chat template, and the model has none"


def write(bundle: Bundle, output: Path, execution: Execution) -> None:
    """Writes the checkpoint; or of the export everything, its graph cut and repaired, its blocks counted anew.

    Raises:
        SurgeryError: the export's graph cannot be cut so.
    """
    if bundle.exported is None:
        plain_checkpoint.write(bundle, output, execution)
        return
    for path in sorted(bundle.exported.iterdir()):
        if path.is_file() and not path.name.startswith((GRAPH, CONFIG)):
            shutil.copyfile(path, output / path.name)
    operate(bundle.exported / GRAPH, bundle.plan, bundle.operators, output / GRAPH, self_contained=True)
    kept, config = bundle.plan.kept, _config(bundle.exported)
    for key, value in config.items():
        if isinstance(value, list) and len(value) == bundle.plan.num_blocks:
            config[key] = [value[block] for block in kept]
    write_json(output / CONFIG, config | {"num_hidden_layers": len(kept)})


def _config(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def use(bundle: Bundle) -> str:
    """How it goes on, in Markdown."""
    export = "tensorrt-edgellm-export FOLDER onnx\n" if bundle.exported is None else ""
    return f"```console\n{export}llm_build --onnxDir {'onnx/llm' if export else 'FOLDER'} --engineDir engine\n```"


def run(folder: Path, prompts: Sequence[list[int]], count: int) -> list[Answer]:
    """See :data:`selftest.Runner`: the checkpoint, in transformers.

    Raises:
        RuntimeUnavailableError: it is a graph, which only its runtime runs.
    """
    if (folder / GRAPH).is_file():
        raise RuntimeUnavailableError("Only Edge-LLM's runtime, on the device, runs its graph.", f"See {folder}.")
    return remote_code.run(folder, prompts, count)
