"""The float32 twin of a half-precision graph: same nodes, every bfloat16 or float16 type widened.

ONNX Runtime has no bfloat16 kernels on the CPU. The twin checks there what can be checked: that the graph computes the
model's function. It does not check bfloat16 rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ghostexport.onnxfile import load_graph, values

_HALF = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


def write_float32_twin(graph: Path, folder: Path) -> Path:
    """Writes the twin of ``graph`` (weights included) into ``folder`` and returns its path."""
    model = load_graph(graph)
    for part in (model.graph, *model.graph.subgraphs()):
        _widen_graph(part)
    target = folder / graph.name
    ir.save(model, target, external_data=f"{graph.name}.data")
    return target


def _widen_graph(graph: ir.Graph) -> None:
    for value in _values(graph):
        if value.dtype in _HALF:
            value.type = ir.TensorType(ir.DataType.FLOAT)
        if value.const_value is not None and value.const_value.dtype in _HALF:
            value.const_value = _widened(value.const_value)
    for node in graph:
        for name, attribute in node.attributes.items():
            if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in _HALF:
                node.attributes[name] = ir.AttrTensor(name, _widened(attribute.value))
            elif name in ("to", "dtype") and attribute.type == ir.AttributeType.INT and attribute.value in _HALF:
                node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _widened(tensor: ir.TensorProtocol) -> ir.LazyTensor:
    """Widened when it is written, one at a time: a large model is never held twice."""
    return ir.LazyTensor(
        lambda: ir.tensor(values(tensor).astype(np.float32), name=tensor.name),
        dtype=ir.DataType.FLOAT,
        shape=ir.Shape([int(str(dim)) for dim in tensor.shape]),
        name=tensor.name,
    )
