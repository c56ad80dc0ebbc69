"""Which inputs of a linear matter: the diagonal of ``X'X``, measured by the graph itself.

The graph gets one more output per product, ``sum over tokens of x_k^2``, and runs on calibration tokens. So the figures
are those of the very variant that is quantised, repaired cuts included, of foreign graphs too, and need no torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ghostexport.onnxfile import load_graph, save_graph
from ghostexport.quantization.linears import find_linears

#: Calibration tokens that suffice for a diagonal: its entries are sums of as many squares.
TOKENS = 16384

_PREFIX = "ghostexport.importance."


def measure_importance(
    graph: Path,
    tokens: NDArray[np.int64],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, NDArray[np.float64]]:
    """``sum_tokens x_k^2`` of the input of every quantisable weight, by the weight's name, float64 ``[K]``.

    Args:
        graph: a float decoder graph.
        tokens: ``[N, T]`` token ids without padding.
        progress: called with sequences done and their number.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing, or cannot run the graph.
    """
    from ghostexport.float32_twin import write_float32_twin
    from ghostexport.runtimes.interface import read_interface
    from ghostexport.runtimes.ort.onnxruntime import open_graph

    model = load_graph(graph)
    probes = _add_probes(model)
    sums: dict[str, NDArray[np.float64]] = {}
    with tempfile.TemporaryDirectory(prefix=".importance.", dir=graph.parent) as folder:
        probed = Path(folder) / graph.name
        save_graph(model, probed, [], self_contained=True)
        if read_interface(graph).dtype != "float32":  # half precision has slow kernels on the CPU, or none
            probed = write_float32_twin(probed, Path(tempfile.mkdtemp(dir=folder)))
        session = open_graph(probed)
        for done, row in enumerate(tokens):
            progress(done, len(tokens))
            outputs, _ = session.outputs(row[None], session.new_cache(1))
            for output, weights in probes.items():
                for weight in weights:
                    sums[weight] = sums.get(weight, 0.0) + outputs[output].astype(np.float64)
        session.close()
    progress(len(tokens), len(tokens))
    return sums


def _add_probes(model: ir.Model) -> dict[str, list[str]]:
    """Adds the outputs; their names -> the weights that read that input."""
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
            graph.outputs.append(_probe(graph, source, linear.shape[0], name))
        probes[known[source]].append(linear.name)
    return probes


def _probe(graph: ir.Graph, source: ir.Value, inputs: int, name: str) -> ir.Value:
    shape, axes = _constant(f"{name}.shape", [-1, inputs]), _constant(f"{name}.axes", [0])
    for constant in (shape, axes):
        graph.register_initializer(constant)
    rows = ir.node("Reshape", [source, shape], name=f"{name}.rows")
    wide = ir.node("Cast", rows.outputs, {"to": ir.DataType.FLOAT}, name=f"{name}.wide")
    square = ir.node("Mul", [wide.outputs[0], wide.outputs[0]], name=f"{name}.square")
    total = ir.node("ReduceSum", [square.outputs[0], axes], {"keepdims": 0}, name=f"{name}.total")
    for node in (rows, wide, square, total):
        graph.append(node)
        node.outputs[0].name = f"{node.name}.value"
    value = total.outputs[0]
    value.name, value.shape, value.type = name, ir.Shape([inputs]), ir.TensorType(ir.DataType.FLOAT)
    return value


def _constant(name: str, values: list[int]) -> ir.Value:
    return ir.Value(
        name=name,
        shape=ir.Shape([len(values)]),
        type=ir.TensorType(ir.DataType.INT64),
        const_value=ir.tensor(np.asarray(values, np.int64), name=name),
    )
