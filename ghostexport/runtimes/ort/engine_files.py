"""Data files of ONNX Runtime engines: share the untouched weights with the graph, and swap operators in place."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ghostexport.errors import BuildError
from ghostexport.files import atomic_path, require_space, write_bytes
from ghostexport.operators import OperatorSet
from ghostexport.runtimes.base import EngineFile
from ghostexport.runtimes.interface import external, load_graph, operator_weights
from ghostexport.runtimes.sidecar import file_sha256, write_sidecar

_CHUNK = 1 << 24


def write_sharing(optimised: Path, graph: Path, engine: Path) -> list[Path]:
    """Writes ``optimised`` as ``engine``; returns all files of the engine, ``engine`` first.

    An initializer that optimisation left alone refers to a copy of the graph's own data file beside the engine, which
    all engines of the folder share; only new ones are written, to ``<engine>.constants``. So the engines of seven
    variants hold the model's weights once.
    """
    model = load_graph(optimised)
    source = {i.name: i for i in load_graph(graph).graph.initializer}
    shared: dict[str, Path] = {}
    new: list[Any] = []
    for initializer in model.graph.initializer:
        where = external(initializer)
        twin = source.get(initializer.name)
        if where and twin is not None and external(twin) and _same(initializer, optimised, twin, graph):
            location = external(twin)["location"]
            shared[location] = graph.parent / location
            _refer(initializer, location, int(external(twin).get("offset", 0)), int(where["length"]))
        elif where:
            new.append(initializer)
    for location, path in shared.items():
        _share(path, engine.parent / location)
    files = [engine, *(engine.parent / location for location in shared)]
    constants = engine.with_name(f"{engine.name}.constants")
    if new:
        with atomic_path(constants) as temporary, temporary.open("wb") as file:
            for initializer in new:
                offset = file.tell()
                for chunk in _chunks(initializer, optimised):
                    file.write(chunk)
                _refer(initializer, constants.name, offset, file.tell() - offset)
        files.append(constants)
    write_bytes(engine, model.SerializeToString(deterministic=True))
    return files


def swap(engine: EngineFile, operators: OperatorSet, target: Path) -> EngineFile:
    """Writes ``target.onnx``: ``engine`` with the initializers ``ghost.{b}.*`` replaced; all other weights shared.

    Raises:
        BuildError: the operators do not fit the engine.
    """
    import onnx

    model = load_graph(engine.path)
    spliced = {i.name: i for i in model.graph.initializer if i.name.startswith("ghost.")}
    shapes = {name: (tuple(i.dims), i.data_type) for name, i in spliced.items()}
    arrays = operator_weights({name: shape for name, (shape, _) in shapes.items()}, operators, engine.path)
    new = target.with_name(f"{target.name}.onnx")
    data = new.with_name(f"{new.name}.operators")
    content = bytearray()
    for name, array in arrays.items():
        values = array.astype(onnx.helper.tensor_dtype_to_np_dtype(shapes[name][1])).tobytes()
        spliced[name].ClearField("raw_data")
        _refer(spliced[name], data.name, len(content), len(values))
        content += values
    write_bytes(data, bytes(content))
    used = {external(i)["location"] for i in model.graph.initializer if external(i)} - {data.name}
    for name in sorted(used):
        _share(engine.path.parent / name, new.parent / name)
    write_bytes(new, model.SerializeToString(deterministic=True))
    files = [new, *(new.parent / name for name in sorted(used)), data]
    result = dataclasses.replace(
        engine,
        path=new,
        variant=operators.name,
        plan_bytes=engine_bytes(new),
        plan_sha256=file_sha256(new),
        sha256={file.name: file_sha256(file) for file in files},
        extra={**engine.extra, "swapped_from": engine.path.name, "operators_sha256": operators.sha256},
    )
    write_sidecar(result)
    return result


def engine_bytes(engine: Path) -> int:
    """Bytes of the graph file and of the weights it refers to, not of others in a shared data file."""
    initializers = load_graph(engine).graph.initializer
    return engine.stat().st_size + sum(int(external(i)["length"]) for i in initializers if external(i))


def _same(a: Any, a_model: Path, b: Any, b_model: Path) -> bool:
    if a.data_type != b.data_type or list(a.dims) != list(b.dims):
        return False
    return external(a)["length"] == external(b).get("length") and all(
        x == y for x, y in zip(_chunks(a, a_model), _chunks(b, b_model), strict=True)
    )


def _chunks(initializer: Any, model: Path) -> Iterator[bytes]:
    where = external(initializer)
    left = int(where["length"])
    with (model.parent / where["location"]).open("rb") as file:
        file.seek(int(where.get("offset", 0)))
        while left:
            chunk = file.read(min(_CHUNK, left))
            if not chunk:
                raise BuildError(f"{file.name} ends inside initializer {initializer.name}.", "Export again.")
            left -= len(chunk)
            yield chunk


def _refer(initializer: Any, location: str, offset: int, length: int) -> None:
    del initializer.external_data[:]
    initializer.data_location = 1
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        entry = initializer.external_data.add()
        entry.key, entry.value = key, str(value)


def _share(source: Path, target: Path) -> None:
    """Copies a data file unless the same one is there. Not a link: ``onnx.load`` refuses linked data files."""
    if target.exists() and (target.samefile(source) or file_sha256(target) == file_sha256(source)):
        return
    require_space(target.parent, source.stat().st_size, f"the weights {target.name}")
    with atomic_path(target) as temporary:
        shutil.copyfile(source, temporary)
