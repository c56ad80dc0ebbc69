"""Data files of ONNX Runtime engines: share the untouched weights with the graph, and swap operators in place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ghostexport.files import atomic_path, write_bytes
from ghostexport.onnxfile import External, copy_data, external, read_bytes_of, refer
from ghostexport.operators import OperatorSet
from ghostexport.runtimes.base import EngineFile
from ghostexport.runtimes.interface import load_graph, operator_weights
from ghostexport.runtimes.sidecar import record_swap


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
        where, twin = external(initializer), source.get(initializer.name)
        known = None if twin is None else external(twin)
        if where and twin is not None and known and _same(initializer, optimised, twin, graph):
            shared[known.location] = graph.parent / known.location
            refer(initializer, known)
        elif where:
            new.append(initializer)
    for location, path in shared.items():
        copy_data(path, engine.parent / location, replace=True)
    files = [engine, *(engine.parent / location for location in shared)]
    constants = engine.with_name(f"{engine.name}.constants")
    if new:
        with atomic_path(constants) as temporary, temporary.open("wb") as file:
            for initializer in new:
                offset = file.tell()
                file.writelines(_chunks(initializer, optimised))
                refer(initializer, External(constants.name, offset, file.tell() - offset))
        files.append(constants)
    write_bytes(engine, model.SerializeToString(deterministic=True))
    return files


def swap(engine: EngineFile, operators: OperatorSet, target: Path) -> EngineFile:
    """Writes ``target.onnx``: ``engine`` with the initializers ``ghost.{b}.*`` replaced; all other weights shared.

    Raises:
        BuildError: the operators do not fit the engine.
    """
    model = load_graph(engine.path)
    spliced = {i.name: i for i in model.graph.initializer if i.name.startswith("ghost.")}
    shapes = {name: (tuple(i.dims), i.data_type) for name, i in spliced.items()}
    arrays = operator_weights({name: shape for name, (shape, _) in shapes.items()}, operators, engine.path)
    new = target.with_name(f"{target.name}.onnx")
    data = new.with_name(f"{new.name}.operators")
    content = bytearray()
    for name, array in arrays.items():
        values = array.astype(ir.DataType(shapes[name][1]).numpy()).tobytes()
        refer(spliced[name], External(data.name, len(content), len(values)))
        content += values
    write_bytes(data, bytes(content))
    used = {where.location for i in model.graph.initializer if (where := external(i))} - {data.name}
    for name in sorted(used):
        copy_data(engine.path.parent / name, new.parent / name, replace=True)
    write_bytes(new, model.SerializeToString(deterministic=True))
    files = [new, *(new.parent / name for name in sorted(used)), data]
    return record_swap(engine, operators, files, engine_bytes(new))


def engine_bytes(engine: Path) -> int:
    """Bytes of the graph file and of the weights it refers to, not of others in a shared data file."""
    initializers = load_graph(engine).graph.initializer
    return engine.stat().st_size + sum(where.length for i in initializers if (where := external(i)))


def _same(a: Any, a_model: Path, b: Any, b_model: Path) -> bool:
    if a.data_type != b.data_type or list(a.dims) != list(b.dims):
        return False
    return all(x == y for x, y in itertools.zip_longest(_chunks(a, a_model), _chunks(b, b_model)))


def _chunks(initializer: Any, model: Path) -> Iterator[bytes]:
    where = external(initializer)
    assert where is not None
    return read_bytes_of(model.parent / where.location, where.offset, where.length)
