"""What the inputs of a linear are like: the diagonal of ``X'X`` and the largest values, measured by the graph itself.

The graph gets two more outputs per product, ``sum over tokens of x_k^2`` and ``max over tokens of |x_k|``, and runs on
calibration tokens. So the figures are those of the very variant that is quantised, repaired cuts included, of foreign
graphs too, and need no torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ghostexport.onnxfile import initializer, load_graph, save_graph
from ghostexport.quantization.linears import find_linears

#: Calibration tokens that suffice for a diagonal: its entries are sums of as many squares.
TOKENS = 16384

#: Opset since which ``ReduceMax`` takes its axes as an input (``ReduceSum`` since 13).
_AXES_ARE_INPUTS = 18
_PREFIX = "ghostexport.inputs."


@dataclass(frozen=True, eq=False)
class Inputs:
    """What was seen of one linear's input.

    Attributes:
        squares: ``sum_tokens x_k^2``, float64 ``[K]``.
        largest: ``max_tokens |x_k|``, float32 ``[K]``.
    """

    squares: NDArray[np.float64]
    largest: NDArray[np.float32]


def measure_inputs(
    graph: Path,
    tokens: NDArray[np.int64],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Inputs]:
    """What the input of every quantisable weight is like, by the weight's name.

    Args:
        graph: a float decoder graph.
        tokens: ``[N, T]`` token ids without padding; rows beyond 16,384 tokens are left out.
        progress: called with sequences done and their number.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing, or cannot run the graph.
    """
    from ghostexport.float32_twin import write_float32_twin
    from ghostexport.runtimes.interface import read_interface
    from ghostexport.runtimes.ort.onnxruntime import open_graph

    model = load_graph(graph)
    probes = _add_probes(model)
    tokens = tokens[: max(1, TOKENS // tokens.shape[1])]
    squares: dict[str, NDArray[np.float64]] = {}
    largest: dict[str, NDArray[np.float32]] = {}
    with tempfile.TemporaryDirectory(prefix=".inputs.", dir=graph.parent) as folder:
        probed = Path(folder) / graph.name
        save_graph(model, probed, [], self_contained=True)
        if read_interface(graph).dtype != "float32":  # half precision has slow kernels on the CPU, or none
            probed = write_float32_twin(probed, Path(tempfile.mkdtemp(dir=folder)))
        session = open_graph(probed)
        for done, row in enumerate(tokens):
            progress(done, len(tokens))
            outputs, _ = session.outputs(row[None], session.new_cache(1))
            for name in probes:
                squares[name] = squares.get(name, 0.0) + outputs[f"{name}.total"].astype(np.float64)
                largest[name] = np.maximum(largest.get(name, 0.0), outputs[f"{name}.largest"])
        session.close()
    progress(len(tokens), len(tokens))
    seen = {name: Inputs(squares[name], largest[name]) for name in probes}
    return {weight: seen[name] for name, weights in probes.items() for weight in weights}


def _add_probes(model: ir.Model) -> dict[str, list[str]]:
    """Adds the outputs; their common beginnings -> the weights that read that input."""
    graph = model.graph
    probes: dict[str, list[str]] = {}
    known: dict[ir.Value, str] = {}
    for linear in find_linears(model):
        if not linear.products:
            continue  # an embedding alone: its inputs are token ids
        source = linear.products[0].inputs[0]
        assert source is not None
        if source not in known:
            known[source] = name = f"{_PREFIX}{len(known)}"
            probes[name] = []
            graph.outputs.extend(_probe(graph, source, linear.shape[0], name, model.opset_imports[""]))
        probes[known[source]].append(linear.name)
    return probes


def _probe(graph: ir.Graph, source: ir.Value, inputs: int, name: str, opset: int) -> list[ir.Value]:
    shape, axes = _constant(f"{name}.shape", [-1, inputs]), _constant(f"{name}.axes", [0])
    for constant in (shape, axes):
        graph.register_initializer(constant)
    rows = ir.node("Reshape", [source, shape], name=f"{name}.rows")
    wide = ir.node("Cast", rows.outputs, {"to": ir.DataType.FLOAT}, name=f"{name}.wide")
    square = ir.node("Mul", [wide.outputs[0], wide.outputs[0]], name=f"{name}.square")
    total = ir.node("ReduceSum", [square.outputs[0], axes], {"keepdims": 0}, name=f"{name}.total")
    size = ir.node("Abs", wide.outputs, name=f"{name}.size")
    if opset >= _AXES_ARE_INPUTS:
        largest = ir.node("ReduceMax", [size.outputs[0], axes], {"keepdims": 0}, name=f"{name}.largest")
    else:
        largest = ir.node("ReduceMax", size.outputs, {"keepdims": 0, "axes": [0]}, name=f"{name}.largest")
    for node in (rows, wide, square, total, size, largest):
        graph.append(node)
        node.outputs[0].name = f"{node.name}.value"
    for node in (total, largest):
        value = node.outputs[0]
        value.name, value.shape, value.type = node.name, ir.Shape([inputs]), ir.TensorType(ir.DataType.FLOAT)
    return [total.outputs[0], largest.outputs[0]]


def _constant(name: str, values: list[int]) -> ir.Value:
    return initializer(ir.tensor(np.asarray(values, np.int64), name=name))
