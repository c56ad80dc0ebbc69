"""Export through optimum-onnx (TorchScript underneath). Needs an environment of its own: transformers < 4.58."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ghostexport.exporters.graph_file import OnnxGraphFile
from ghostexport.recipe import Execution


def export(model: Any, output: Path, opset: int, execution: Execution) -> OnnxGraphFile:
    raise NotImplementedError
