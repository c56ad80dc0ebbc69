"""Twins of graphs for ONNX Runtime's CPU provider, which has no kernels for bfloat16, MXFP8 and four-bit floats.

A twin checks there what can be checked: that the graph computes the model's function. The float32 twin has the same
nodes, every bfloat16 or float16 type widened; it does not check bfloat16 rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ghostexport.onnxfile import load_graph, values
from ghostexport.quantization.reader import write_unpacked
from ghostexport.quantization.targets import weight_form
from ghostexport.runtimes.interface import read_interface

UNPACKED_NOTE = (
    "ONNX Runtime has no kernels for this format on the CPU: the weights were unpacked to what they stand for."
)
BFLOAT16_NOTE = (
    "ONNX Runtime has no bfloat16 kernels on the CPU: both sides were widened to float32 and compared there; "
    "bfloat16 rounding was not checked."
)

_HALF = (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)


def for_cpu(graph: Path, dtype: str, folder: Path) -> tuple[Path, str]:
    """The graph itself where the CPU provider can run it, else a twin in ``folder``; and what is not checked so.

    Args:
        graph: an ONNX decoder.
        dtype: of its stream.
        folder: an empty one.
    """
    notes = []
    if weight_form(read_interface(graph).weight_types) in ("mxfp8", "nvfp4"):
        graph = write_unpacked(graph, folder)
        notes.append(UNPACKED_NOTE)
    if dtype == "bfloat16":
        widened = folder / "float32"  # of its own: the unpacked graph is read while this one is written
        widened.mkdir()
        graph = write_float32_twin(graph, widened)
        notes.append(BFLOAT16_NOTE)
    return graph, " ".join(notes)


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
