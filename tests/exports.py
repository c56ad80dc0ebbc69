"""Exports of tiny models, made once per test run by the real exporter and shared by all its processes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from ghostexport.execution import Execution
from ghostexport.exporters import export_model
from ghostexport.exporters import transformers as exporter
from ghostexport.exporters.graph_file import OnnxGraphFile
from tests.tiny import tiny

#: Names the folder of the run; set in the first process, inherited by its workers.
FOLDER = "GHOSTEXPORT_TEST_EXPORTS"


@dataclass(frozen=True)
class ExportedTiny:
    """A tiny model and its export."""

    model: Any
    file: OnnxGraphFile

    @property
    def path(self) -> Path:
        return self.file.path


def make_folder() -> Path | None:
    """Makes the folder of the run; None when this process is a worker of one that has it."""
    if FOLDER in os.environ:
        return None
    folder = Path(tempfile.mkdtemp(prefix="ghostexport-exports-"))
    os.environ[FOLDER] = str(folder)
    return folder


def remove_folder(folder: Path) -> None:
    """Removes the folder that :func:`make_folder` made in this process."""
    del os.environ[FOLDER]
    shutil.rmtree(folder, ignore_errors=True)


def exported(name: str, dtype: str = "float32", opset: int = 20, **overrides: Any) -> ExportedTiny:
    """The tiny model ``name`` and its dense graph. The file is shared: write elsewhere, change a copy of the model."""
    return _exported(name, dtype, opset, json.dumps(overrides, sort_keys=True))


@cache
def _exported(name: str, dtype: str, opset: int, overrides: str) -> ExportedTiny:
    model = tiny(name, **json.loads(overrides)).to(getattr(torch, dtype))
    key = f"{name}-{dtype}-{opset}-{sha256(overrides.encode()).hexdigest()[:8]}"
    folder = Path(os.environ[FOLDER]) / key
    record = folder / "file.pickle"
    with FileLock(f"{folder}.lock"):
        if not record.exists():
            folder.mkdir(exist_ok=True)
            made = export_model(model, folder / "dense.onnx", exporter="transformers", opset=opset)
            record.write_bytes(pickle.dumps(made))
    return ExportedTiny(model, pickle.loads(record.read_bytes()))


_export = exporter.export


def shared(model: Any, output: Path, opset: int, execution: Execution) -> OnnxGraphFile:
    """``ghostexport.exporters.transformers.export``, which makes the files of equal models once per test run."""
    if any(parameter.is_meta for parameter in model.parameters()):  # parts of it are on disk
        return _export(model, output, opset, execution)
    folder = Path(os.environ[FOLDER]) / f"equal-{_fingerprint(model, opset)}-{output.name}"
    record = folder / "file.pickle"
    with FileLock(f"{folder}.lock"):
        if not record.exists():
            folder.mkdir(exist_ok=True)
            record.write_bytes(pickle.dumps(_export(model, folder / output.name, opset, execution)))
    made: OnnxGraphFile = pickle.loads(record.read_bytes())
    output.parent.mkdir(parents=True, exist_ok=True)
    for file in (made.path, made.data_path):
        shutil.copyfile(file, output.with_name(file.name))
    return replace(made, path=output)


def _fingerprint(model: Any, opset: int) -> str:
    """Of everything that a graph is made from."""
    config = model.config
    ways = [vars(config).get(key) for key in ("_attn_implementation_internal", "_experts_implementation_internal")]
    digest = sha256(f"{type(model)} {config.to_json_string(use_diff=False)} {ways} {opset}".encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
