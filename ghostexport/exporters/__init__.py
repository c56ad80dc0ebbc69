"""From a PyTorch decoder to one ONNX graph with KV cache. One file per producer."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ghostexport.errors import RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.exporters import optimum, transformers
from ghostexport.exporters.graph_file import OnnxGraphFile, data_path
from ghostexport.recipe import require_name

__all__ = ["EXPORTERS", "OnnxGraphFile", "available", "choose_exporter", "data_path", "export_model"]

Exporter = Callable[[Any, Path, int, Execution], OnnxGraphFile]

EXPORTERS: dict[str, Exporter] = {
    "transformers": transformers.export,
    "optimum": optimum.export,
}

_INSTALL = {
    "transformers": "pip install 'transformers>=5.14' (in an environment without optimum-onnx).",
    "optimum": "pip install 'ghostexport[optimum]' (in an environment of its own: it needs transformers < 4.58).",
}


def available(name: str) -> bool:
    """Whether the packages of exporter ``name`` are installed."""
    if name == "optimum":
        return _installed("optimum.exporters.onnx")
    return _installed("transformers.exporters.exporter_onnx")


def choose_exporter(name: str = "auto") -> tuple[str, str]:
    """Resolves ``auto`` and says why.

    Returns:
        the exporter's name and a one-line reason.

    Raises:
        RecipeError: there is no exporter of this name.
        RuntimeUnavailableError: it is not installed, or with ``auto`` none is; the message names the ``pip install``.
    """
    if name != "auto":
        require_name(name, EXPORTERS, "exporter")
        if not available(name):
            raise RuntimeUnavailableError(f"The exporter {name!r} is not installed here.", _INSTALL[name])
        return name, "as asked"
    version = importlib.metadata.version("transformers")
    if available("transformers"):
        return "transformers", f"transformers {version} has its own ONNX exporter"
    if available("optimum"):
        return "optimum", f"transformers {version} has no ONNX exporter, optimum-onnx is installed"
    raise RuntimeUnavailableError(
        f"transformers {version} has no ONNX exporter and optimum-onnx is not installed.",
        f"{_INSTALL['transformers']}\nOr: {_INSTALL['optimum']}",
    )


def export_model(
    model: Any, output: Path, *, exporter: str = "auto", opset: int = 20, execution: Execution | None = None
) -> OnnxGraphFile:
    """Exports a causal LM with its KV cache as ``output`` and ``output.data``.

    The graph takes ``input_ids [batch, tokens]``, ``attention_mask [batch, past + tokens]``, ``position_ids [batch,
    tokens]`` (where the model has positions) and keys and values ``[batch, heads, past, head_dim]`` of every block, in
    the model's dtype; it gives ``logits [batch, tokens, V]`` and the longer keys and values. ``past`` may be 0.

    Args:
        model: a Hugging Face causal LM; exported on the CPU in its own dtype, unchanged afterwards.
        output: path of the graph; written together with its data file or not at all.
        exporter: a key of :data:`EXPORTERS`, or ``auto``.
        opset: ONNX operator set.
        execution: how; its ``progress`` is called.

    Raises:
        ExportError: the exporter failed (its error is chained) or made something else than a decoder with KV cache.
        RuntimeUnavailableError: the exporter is not installed.
        RunFolderError: the files cannot be written.
    """
    name, _ = choose_exporter(exporter)
    return EXPORTERS[name](model, output, opset, execution or Execution())


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is absent
        return False
