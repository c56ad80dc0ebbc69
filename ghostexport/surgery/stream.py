"""Type of the residual stream: dtype and hidden size, the same at every boundary."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ghostexport.errors import BoundaryNotFound, SurgeryError
from ghostexport.surgery.layout import DecoderLayout, ResidualPoint

_MAX_STEPS = 64


@dataclass(frozen=True)
class StreamType:
    """dtype of the residual values, their last dim, and their rank (3, or 2 for token-major streams; None unknown)."""

    dtype: ir.DataType
    hidden_size: int
    rank: int | None


def stream_type(layout: DecoderLayout) -> StreamType:
    """Reads the type off the residual values, or off what they are computed from where the graph does not declare it.

    Raises:
        SurgeryError: dtype, hidden size or rank differ between boundaries.
        BoundaryNotFound: the stream is not float, not of rank 2 or 3, or its type cannot be told.
    """
    dtypes = {dtype for point in layout.points if (dtype := _dtype(point)) is not None}
    shapes = [shape for point in layout.points if (shape := _value(point).shape) is not None]
    ranks = {len(shape) for shape in shapes}
    sizes = {dim for shape in shapes if len(shape) and isinstance(dim := shape[-1], int)}
    if not sizes:
        sizes = {size for point in layout.points if (size := _width(_value(point))) is not None}
    if len(dtypes) > 1 or len(sizes) > 1 or len(ranks) > 1:
        raise SurgeryError(
            f"The residual stream changes its type along the blocks: dtypes {sorted(d.name for d in dtypes)}, hidden "
            f"sizes {sorted(sizes)}, ranks {sorted(ranks)}.",
            "Only decoders with one hidden size and dtype can be cut.",
        )
    if not dtypes or not sizes:
        raise BoundaryNotFound(
            "The dtype or hidden size of the residual stream cannot be told from the graph.",
            "Run ONNX shape inference on it first.",
        )
    dtype, rank = dtypes.pop(), next(iter(ranks), None)
    if not dtype.is_floating_point() or rank not in (None, 2, 3):
        raise BoundaryNotFound(
            f"{layout.points[0].name!r} is {dtype.name} of rank {rank}: not a residual stream.",
            "Give a decoder-only LLM.",
        )
    return StreamType(dtype, sizes.pop(), rank)


def _value(point: ResidualPoint) -> ir.Value:
    return point.value if point.value is not None else point.addends[0]


def _dtype(point: ResidualPoint) -> ir.DataType | None:
    """dtype declared, or followed back through operators that keep it."""
    value: ir.Value | None = _value(point)
    for _ in range(_MAX_STEPS):
        if value is None or value.dtype is not None:
            break
        node = value.producer()
        if node is None:
            break
        if node.op_type == "Cast":
            return ir.DataType(node.attributes["to"].as_int())
        value = _data_operand(node)
    return None if value is None else value.dtype


def _data_operand(node: ir.Node) -> ir.Value | None:
    known = [v for v in node.inputs if v is not None and v.dtype is not None and v.dtype.is_floating_point()]
    return known[0] if known else node.inputs[0]


def _width(value: ir.Value) -> int | None:
    """Last dim, from a weight that the value meets: the embedding table, a bias, the right factor of a product."""
    current: ir.Value | None = value
    for _ in range(_MAX_STEPS):
        if current is None:
            return None
        if current.shape is not None and len(current.shape) and isinstance(dim := current.shape[-1], int):
            return dim
        node = current.producer()
        if node is None:
            return None
        if node.op_type in ("MatMul", "Gemm") and node.inputs[1] is not None and node.inputs[1].shape is not None:
            transposed = "transB" in node.attributes and node.attributes["transB"].as_int()
            dim = node.inputs[1].shape[0 if transposed else -1]
            return dim if isinstance(dim, int) else None
        current = node.inputs[1] if node.op_type == "Add" and len(node.inputs) > 1 else node.inputs[0]
    return None
