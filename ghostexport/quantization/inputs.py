"""What the inputs of a linear are like: ``X'X``, or its diagonal, and the largest values, measured by the graph itself.

The graph gets more outputs per distinct input of a product, ``sum over tokens of x_k^2`` and ``max over tokens of
|x_k|``, and runs on calibration tokens. So the figures are those of the very variant that is quantised, repaired cuts
included, of foreign graphs too, and need no torch. ``X'X`` is gathered in further runs, as many inputs at a time as fit
into a bounded memory, and lies on disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ghostexport.files import require_space
from ghostexport.onnxfile import initializer, load_graph, save_graph
from ghostexport.quantization.linears import find_linears

#: Calibration tokens that suffice for a diagonal: its entries are sums of as many squares.
TOKENS = 16384
#: Bytes of ``X'X`` that one run gathers; a single one may be larger.
_GRAM_BYTES = 1 << 29

#: Opset since which ``ReduceMax`` takes its axes as an input (``ReduceSum`` since 13).
_AXES_ARE_INPUTS = 18
_PREFIX = "ghostexport.inputs."

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Inputs:
    """What was seen of one linear's input.

    Attributes:
        squares: ``sum_tokens x_k^2``, float64 ``[K]``.
        largest: ``max_tokens |x_k|``, float32 ``[K]``.
        gram: file of ``sum_tokens x_k x_l``, float32 ``[K, K]``, where it was asked for.
    """

    squares: NDArray[np.float64]
    largest: NDArray[np.float32]
    gram: Path | None = None


@dataclass(frozen=True)
class _Source:
    """A value of the graph that products read: its name, size ``K``, their weights' names, and the probes' name."""

    value: str
    size: int
    weights: list[str]
    probe: str


def measure_inputs(
    graph: Path,
    tokens: NDArray[np.int64],
    progress: Progress = lambda done, total: None,
    grams: Path | None = None,
) -> dict[str, Inputs]:
    """What the input of every quantisable weight is like, by the weight's name.

    Args:
        graph: a float decoder graph.
        tokens: ``[N, T]`` token ids without padding; rows beyond 16,384 tokens are left out.
        progress: called with sequences done and their number.
        grams: existing folder that ``X'X`` is written to, a file per distinct input; None leaves it out.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing, or cannot run the graph.
        RunFolderError: ``grams`` has no room for them.
    """
    tokens = tokens[: max(1, TOKENS // tokens.shape[1])]
    sources = _sources(load_graph(graph))
    groups = _groups(sources) if grams is not None else []
    total, passed = len(tokens) * (1 + len(groups)), 0
    if grams is not None:
        require_space(grams, sum(4 * source.size**2 for source in sources), "X'X of the inputs")
    squares: dict[str, NDArray[np.float64]] = {}
    largest: dict[str, NDArray[np.float32]] = {}
    for outputs in _run(graph, sources, _sums, tokens):
        progress(passed := passed + 1, total)
        for source in sources:
            name = source.probe
            squares[name] = squares.get(name, 0.0) + outputs[f"{name}.total"].astype(np.float64)
            largest[name] = np.maximum(largest.get(name, 0.0), outputs[f"{name}.largest"])
    seen = {source.probe: Inputs(squares[source.probe], largest[source.probe]) for source in sources}
    for group in groups:
        sums: dict[str, NDArray[np.float32]] = {}
        for outputs in _run(graph, group, _products, tokens):
            progress(passed := passed + 1, total)
            for source in group:
                sums[source.probe] = sums.get(source.probe, 0.0) + outputs[f"{source.probe}.gram"]
        for name, gram in sums.items():
            assert grams is not None
            file = grams / f"{name}.npy"
            np.save(file, gram)
            seen[name] = replace(seen[name], gram=file)
    return {weight: seen[source.probe] for source in sources for weight in source.weights}


def _sources(model: ir.Model) -> list[_Source]:
    found: dict[ir.Value, _Source] = {}
    for linear in find_linears(model):
        if not linear.products:
            continue  # an embedding alone: its inputs are token ids
        value = linear.products[0].inputs[0]
        assert value is not None and value.name is not None
        if value not in found:
            found[value] = _Source(value.name, linear.shape[0], [], f"{_PREFIX}{len(found)}")
        found[value].weights.append(linear.name)
    return list(found.values())


def _groups(sources: list[_Source]) -> list[list[_Source]]:
    groups: list[list[_Source]] = []
    room = 0
    for source in sources:
        room -= 4 * source.size**2
        if room < 0:
            groups.append([])
            room = _GRAM_BYTES - 4 * source.size**2
        groups[-1].append(source)
    return groups


def _run(
    graph: Path,
    sources: list[_Source],
    probe: Callable[[ir.Graph, ir.Value, _Source, int], list[ir.Value]],
    tokens: NDArray[np.int64],
) -> Iterator[dict[str, NDArray[np.float32]]]:
    """The outputs of the graph, the probes' among them, for one sequence after the other."""
    from ghostexport.float32_twin import write_float32_twin
    from ghostexport.runtimes.interface import read_interface
    from ghostexport.runtimes.ort.onnxruntime import open_graph

    model = load_graph(graph)
    known = {value.name: value for node in model.graph for value in node.outputs}
    known |= {value.name: value for value in model.graph.inputs}
    opset = model.opset_imports[""]
    for source in sources:
        model.graph.outputs.extend(probe(model.graph, known[source.value], source, opset))
    with tempfile.TemporaryDirectory(prefix=".inputs.", dir=graph.parent) as folder:
        probed = Path(folder) / graph.name
        save_graph(model, probed, [], self_contained=True)
        if read_interface(graph).dtype != "float32":  # half precision has slow kernels on the CPU, or none
            probed = write_float32_twin(probed, Path(tempfile.mkdtemp(dir=folder)))
        session = open_graph(probed)
        try:
            for row in tokens:
                yield session.outputs(row[None], session.new_cache(1))[0]
        finally:
            session.close()


def _sums(graph: ir.Graph, value: ir.Value, source: _Source, opset: int) -> list[ir.Value]:
    """``sum x_k^2`` and ``max |x_k|`` of ``value``."""
    name = source.probe
    axes = _constant(graph, f"{name}.axes", [0])
    wide = _rows(graph, value, source)
    square = ir.node("Mul", [wide, wide], name=f"{name}.square")
    total = ir.node("ReduceSum", [square.outputs[0], axes], {"keepdims": 0}, name=f"{name}.total")
    size = ir.node("Abs", [wide], name=f"{name}.size")
    if opset >= _AXES_ARE_INPUTS:
        largest = ir.node("ReduceMax", [size.outputs[0], axes], {"keepdims": 0}, name=f"{name}.largest")
    else:
        largest = ir.node("ReduceMax", size.outputs, {"keepdims": 0, "axes": [0]}, name=f"{name}.largest")
    _append(graph, [square, total, size, largest])
    return [_output(node, [source.size]) for node in (total, largest)]


def _products(graph: ir.Graph, value: ir.Value, source: _Source, opset: int) -> list[ir.Value]:
    """``X'X`` of ``value``."""
    name = source.probe
    wide = _rows(graph, value, source)
    turned = ir.node("Transpose", [wide], {"perm": [1, 0]}, name=f"{name}.turned")
    gram = ir.node("MatMul", [turned.outputs[0], wide], name=f"{name}.gram")
    _append(graph, [turned, gram])
    return [_output(gram, [source.size, source.size])]


def _rows(graph: ir.Graph, value: ir.Value, source: _Source) -> ir.Value:
    """``value`` as float32 ``[tokens, K]``."""
    name = source.probe
    rows = ir.node("Reshape", [value, _constant(graph, f"{name}.shape", [-1, source.size])], name=f"{name}.rows")
    wide = ir.node("Cast", rows.outputs, {"to": ir.DataType.FLOAT}, name=f"{name}.wide")
    _append(graph, [rows, wide])
    return wide.outputs[0]


def _append(graph: ir.Graph, nodes: list[ir.Node]) -> None:
    for node in nodes:
        graph.append(node)
        node.outputs[0].name = f"{node.name}.value"


def _output(node: ir.Node, shape: list[int]) -> ir.Value:
    value = node.outputs[0]
    value.name, value.shape, value.type = node.name, ir.Shape(shape), ir.TensorType(ir.DataType.FLOAT)
    return value


def _constant(graph: ir.Graph, name: str, values: list[int]) -> ir.Value:
    constant = initializer(ir.tensor(np.asarray(values, np.int64), name=name))
    graph.register_initializer(constant)
    return constant
