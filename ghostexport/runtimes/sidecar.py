"""The sidecar: one JSON beside every engine, holding exactly the fields of :class:`EngineFile`. Written last."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from ghostexport.errors import RunFolderError
from ghostexport.runfolder import sha256_file, write_json
from ghostexport.runtimes.base import EngineFile, Tensor

SCHEMA = "ghostexport.engine/1"


def sidecar_path(engine: Path) -> Path:
    """``dense.json`` of ``dense.engine``, ``dense.prefill.engine`` or ``dense.onnx``."""
    stem = engine.name.removesuffix(engine.suffix)
    return engine.with_name(stem.removesuffix(".prefill").removesuffix(".decode") + ".json")


def write_sidecar(engine: EngineFile) -> Path:
    """Writes the sidecar of ``engine`` beside it, atomically; returns its path."""
    data = dataclasses.asdict(engine) | {"path": engine.path.name}
    path = sidecar_path(engine.path)
    write_json(path, {"schema": SCHEMA} | data)
    return path


def read_sidecar(path: Path) -> EngineFile:
    """Reads an engine's sidecar; the one validation gate of the format.

    Args:
        path: the sidecar, or an engine file beside it.

    Raises:
        RunFolderError: it is missing, not of this schema, or names files that are missing.
    """
    path = path if path.suffix == ".json" else sidecar_path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(f"Engine sidecar {path} is missing.", _REBUILD) from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"Engine sidecar {path} is not readable: {error}", _REBUILD) from error
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        raise RunFolderError(f"{path} is not an engine sidecar of schema {SCHEMA}.", _REBUILD)
    try:
        for key in ("inputs", "outputs"):
            data[key] = tuple(Tensor(t["name"], t["dtype"], tuple(t["dims"])) for t in data[key])
        engine = EngineFile(**data | {"path": path.parent / data["path"]})
    except (KeyError, TypeError) as error:
        raise RunFolderError(f"{path} lacks or has unknown fields: {error}", _REBUILD) from error
    for name in engine.files:
        if not (path.parent / name).exists():
            raise RunFolderError(f"{path.parent / name}, a file of the engine, is missing.", _REBUILD)
    return engine


def require_intact(engine: EngineFile) -> None:
    """Raises RunFolderError when a file of the engine is not the one its sidecar describes."""
    for name, sha256 in engine.files.items():
        if sha256_file(engine.path.parent / name) != sha256:
            raise RunFolderError(f"{engine.path.parent / name} was truncated or edited (its hash differs).", _REBUILD)


_REBUILD = "Build the engine again with: ghostexport build engine"
