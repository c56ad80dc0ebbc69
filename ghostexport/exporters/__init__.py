"""From a PyTorch decoder to one ONNX graph with KV cache: one producer a file, named as in :data:`EXPORTERS`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghostexport.errors import ExportError, RuntimeUnavailableError
from ghostexport.execution import Execution

if TYPE_CHECKING:
    from ghostexport.exporters.graph_file import OnnxGraphFile

__all__ = ["EXPORTERS", "available", "check", "choose_exporter", "export_model", "require_exportable"]

#: Exporter -> the module it needs, and how that is installed.
EXPORTERS = {
    "transformers": (
        "transformers.exporters.exporter_onnx",
        "pip install 'transformers>=5.23' (in an environment without optimum-onnx).",
    ),
    "optimum": (
        "optimum.exporters.onnx",
        "pip install 'ghostexport[optimum]' (in an environment of its own: it needs transformers < 4.58).",
    ),
}


def available(name: str) -> bool:
    """Whether the packages of exporter ``name`` are installed."""
    try:
        return importlib.util.find_spec(EXPORTERS[name][0]) is not None
    except ModuleNotFoundError:  # a parent package is absent
        return False


def choose_exporter(name: str = "auto") -> tuple[str, str]:
    """Resolves ``auto`` and says why.

    Returns:
        the exporter's name and a one-line reason.

    Raises:
        RecipeError: there is no exporter of this name.
        RuntimeUnavailableError: it is not installed, or with ``auto`` none is; the message names the ``pip install``.
    """
    from ghostexport.validation import require_name

    if name != "auto":
        require_name(name, EXPORTERS, "exporter")
        if not available(name):
            raise RuntimeUnavailableError(f"The exporter {name!r} is not installed here.", EXPORTERS[name][1])
        return name, "as asked"
    version = importlib.metadata.version("transformers")
    if available("transformers"):
        return "transformers", f"transformers {version} has its own ONNX exporter"
    if available("optimum"):
        return "optimum", f"transformers {version} has no ONNX exporter, optimum-onnx is installed"
    raise RuntimeUnavailableError(
        f"transformers {version} has no ONNX exporter and optimum-onnx is not installed.",
        "\nOr: ".join(install for _, install in EXPORTERS.values()),
    )


def check(model: Any, exporter: str = "auto") -> str | None:
    """Why a model cannot be exported; None where nothing speaks against it. Takes short steps of the model.

    Args:
        model: a Hugging Face causal LM, on any device.
        exporter: a key of :data:`EXPORTERS`, or ``auto``.

    Raises:
        RuntimeUnavailableError: the exporter is not installed.
    """
    from ghostexport.models.exportable import export_fault

    choose_exporter(exporter)
    return export_fault(model)


def require_exportable(model: Any, exporter: str = "auto", runtimes: Sequence[str] = ()) -> None:
    """Raises ExportError, saying what works instead, where :func:`check` gives a reason or a runtime would refuse."""
    from ghostexport.models.exportable import splits_by_data

    if any(name.startswith("tensorrt") for name in runtimes) and splits_by_data(model):
        raise ExportError(
            f"{type(model).__name__} splits its tokens among experts by sizes that they give, which TensorRT cannot.",
            "Use --runtime onnxruntime.",
        )
    if reason := check(model, exporter):
        raise ExportError(
            f"{type(model).__name__} cannot be exported: {reason}.",
            "Blocks can be selected, removed and repaired all the same: take the checkpoint (--to checkpoint).",
        )


def export_model(
    model: Any, output: Path, *, exporter: str = "auto", opset: int = 20, execution: Execution | None = None
) -> OnnxGraphFile:
    """Exports a causal LM with its KV cache as ``output`` and ``output.data``.

    The graph takes ``input_ids [batch, tokens]``, ``attention_mask [batch, past + tokens]``, ``position_ids [batch,
    tokens]`` (where the model has positions) and keys and values ``[batch, heads, past, head_dim]`` of every block, in
    the model's dtype; it gives ``logits [batch, tokens, V]`` and the longer keys and values. ``past`` may be 0. States
    of recurrent and convolutional blocks are inputs and outputs of fixed size; zeros stand for no past.

    Args:
        model: a Hugging Face causal LM; exported on the CPU in its own dtype, unchanged afterwards.
        output: path of the graph; written together with its data file or not at all.
        exporter: a key of :data:`EXPORTERS`, or ``auto``.
        opset: ONNX operator set.
        execution: how; its ``progress`` is called.

    Raises:
        ExportError: :func:`check` gives a reason, the exporter failed (its error is chained) or made something else
            than a decoder with KV cache.
        RuntimeUnavailableError: the exporter is not installed.
        RunFolderError: the files cannot be written.
    """
    name, _ = choose_exporter(exporter)
    producer = importlib.import_module(f"ghostexport.exporters.{name}")
    written: OnnxGraphFile = producer.export(model, output, opset, execution or Execution())
    return written
