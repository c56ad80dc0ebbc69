"""Export through optimum-onnx (TorchScript underneath). Needs an environment of its own: transformers < 4.58."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ghostexport.errors import ExportError
from ghostexport.execution import Execution
from ghostexport.exporters.graph_file import OnnxGraphFile, canonicalise, check_interface, write_graph
from ghostexport.models.silence import silenced

_REMEDY = "optimum-onnx supports opset 14 to 20 and the models it lists; otherwise use --exporter transformers."


def export(model: Any, output: Path, opset: int, execution: Execution) -> OnnxGraphFile:
    """See :func:`ghostexport.exporters.export_model`."""
    from ghostexport.models import find_blocks

    num_blocks = len(find_blocks(model))
    folder = output.with_name(f".{output.name}.optimum")
    execution.progress("export", 0, 2)
    shutil.rmtree(folder, ignore_errors=True)  # what a killed export left
    try:
        exported = canonicalise(_trace(model, folder, opset))
        check_interface(exported.graph, dict.fromkeys(range(num_blocks), 2))
        execution.progress("export", 1, 2)
        hidden_size = int(model.config.get_text_config().hidden_size)
        written = write_graph(exported, output, producer="optimum", hidden_size=hidden_size, num_blocks=num_blocks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    execution.progress("export", 2, 2)
    return written


def _trace(model: Any, folder: Path, opset: int) -> ir.Model:
    """Exports into ``folder``; the weights of the returned graph stay there until they are written."""
    from optimum.exporters.onnx import onnx_export_from_model

    from ghostexport.models.variants import share_weights

    try:
        with silenced("torch.onnx", "transformers", "optimum"):
            onnx_export_from_model(
                share_weights(model).to("cpu"),  # it edits the configuration and generation settings
                folder,
                opset=opset,
                task="text-generation-with-past",
                do_validation=False,
                no_post_process=True,
            )
        return ir.load(folder / "model.onnx")
    except Exception as error:  # whatever torch.onnx or optimum raises
        raise ExportError(
            f"optimum's ONNX exporter failed on {type(model).__name__} at opset {opset}: {error}", _REMEDY
        ) from error
