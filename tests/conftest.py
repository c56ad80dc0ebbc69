"""Fixtures of all tests.

``exported(name, dtype="float32", opset=20, **overrides)`` returns the :class:`ExportedTiny` of a tiny model: the
PyTorch model and its dense graph on disk, made by the real exporter. Every combination is exported once per test run
(5 to 15 seconds), so ask for one that another test asks for: ``llama``, ``qwen3`` and ``gemma3`` in float32 with the
default six blocks are always there. Files and models are shared: write elsewhere, and change a copy of the model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class ExportedTiny:
    """A tiny model and its export."""

    model: Any
    file: Any

    @property
    def path(self) -> Path:
        return self.file.path


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    import torch

    from ghostexport.exporters import export_model
    from tests.tiny import tiny

    made: dict[str, ExportedTiny] = {}

    def export(name: str, dtype: str = "float32", opset: int = 20, **overrides: Any) -> ExportedTiny:
        key = json.dumps([name, dtype, opset, overrides], sort_keys=True)
        if key not in made:
            model = tiny(name, **overrides).to(getattr(torch, dtype))
            folder = tmp_path_factory.mktemp(f"{name}-{dtype}-{opset}")
            made[key] = ExportedTiny(
                model, export_model(model, folder / "dense.onnx", exporter="transformers", opset=opset)
            )
        return made[key]

    return export
