"""The sidecar: one JSON beside every engine, holding exactly the fields of :class:`EngineFile`. Written last."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ghostexport.errors import RunFolderError
from ghostexport.files import sha256_file, write_json
from ghostexport.operators import OperatorSet
from ghostexport.recipe import BuildSection
from ghostexport.runtimes.base import EngineFile, Tensor
from ghostexport.runtimes.interface import Interface

SCHEMA = "ghostexport.engine/1"


def record_build(
    graph: Path,
    interface: Interface,
    settings: BuildSection,
    files: Sequence[Path],
    extra: Mapping[str, Any],
    **facts: Any,
) -> EngineFile:
    """Describes a finished build in its sidecar.

    Args:
        graph, interface: what it was built from.
        files: all files of the engine, the engine first.
        extra: what only this runtime has.
        facts: the other fields of :class:`EngineFile`.
    """
    engine = EngineFile(
        path=files[0],
        flags=build_flags(settings),
        weight_bytes=interface.weight_bytes,
        graph_sha256=sha256_file(graph),
        plan_sha256=sha256_file(files[0]),
        sha256={file.name: sha256_file(file) for file in files},
        graph_data_sha256={file.name: sha256_file(file) for file in interface.data_files},
        inputs=interface.inputs,
        outputs=interface.outputs,
        extra=dict(extra)
        | {
            "graph": os.path.relpath(graph, files[0].parent),
            "opset": interface.opset,
            "graph_metadata": interface.metadata,
        },
        **facts,
    )
    return _write(engine)


def record_swap(engine: EngineFile, operators: OperatorSet, files: Sequence[Path], plan_bytes: int) -> EngineFile:
    """Describes ``files``, which are ``engine`` with other operators, in a sidecar of their own."""
    swapped = dataclasses.replace(
        engine,
        path=files[0],
        variant=operators.name,
        plan_bytes=plan_bytes,
        plan_sha256=sha256_file(files[0]),
        sha256={file.name: sha256_file(file) for file in files},
        extra={**engine.extra, "swapped_from": engine.path.name, "operators_sha256": operators.sha256},
    )
    return _write(swapped)


def _write(engine: EngineFile) -> EngineFile:
    write_json(engine.sidecar, {"schema": SCHEMA} | dataclasses.asdict(engine) | {"path": engine.path.name})
    return engine


def read_sidecar(path: Path) -> EngineFile:
    """Reads an engine's sidecar; the one validation gate of the format.

    Args:
        path: the sidecar, or the engine file beside it.

    Raises:
        RunFolderError: it is missing, not of this schema, or names files that are missing.
    """
    if path.suffix != ".json":
        stem = path.name.removesuffix(path.suffix)
        path = path.with_name(stem.removesuffix(".prefill").removesuffix(".decode") + ".json")
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
    for file in engine.files:
        if not file.exists():
            raise RunFolderError(f"{file}, a file of the engine, is missing.", _REBUILD)
    return engine


def require_intact(engine: EngineFile) -> None:
    """Raises RunFolderError when a file of the engine is not the one its sidecar describes."""
    for name, sha256 in engine.sha256.items():
        if sha256_file(engine.path.parent / name) != sha256:
            raise RunFolderError(f"{engine.path.parent / name} was truncated or edited (its hash differs).", _REBUILD)


def is_current(engine: EngineFile, version: str, graph: Path, data: Iterable[Path], settings: BuildSection) -> bool:
    """Whether building ``graph`` with ``settings`` and this runtime version would make this very engine again."""
    return (
        engine.version == version
        and engine.flags == build_flags(settings)
        and engine.graph_sha256 == sha256_file(graph)
        and engine.graph_data_sha256 == {file.name: sha256_file(file) for file in data}
    )


def remove_leftovers(target: Path) -> None:
    """Removes the temporary files that a killed build of ``target`` left (the caller holds the lock)."""
    for path in target.parent.glob(f".{target.name}.*"):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.suffix == ".tmp":
            path.unlink()


def build_flags(settings: BuildSection) -> dict[str, Any]:
    """The settings that shape one engine, as the sidecar stores them."""
    return settings.model_dump(mode="json", exclude={"runtimes"})


_REBUILD = "Build the engine again with: ghostexport build engine"
