"""Scales what a surviving block adds to the residual stream, inside its weights: no node is added.

From a residual sum, back along its non-stream operands as long as the path is linear, to the first weights::

    Add(a, b)              both operands                MatMul | Gemm      the weight (and bias)
    Mul(a, constant)       the constant                 RMS norm           its gain (and bias): post-norm blocks
    Cast, Reshape, ...     the operand
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from ghostexport.errors import SurgeryError
from ghostexport.operators import FloatArray
from ghostexport.plan import PrunePlan
from ghostexport.surgery.attention import is_constant
from ghostexport.surgery.boundaries import DecoderLayout, bias_index, point_at
from ghostexport.surgery.flow import is_weight
from ghostexport.surgery.splice import weight

_PRODUCTS = frozenset({"MatMul", "Gemm", "FusedMatMul"})
_NORMS = frozenset({"RMSNormalization", "SimplifiedLayerNormalization", "LayerNormalization"})
_LAYOUT = frozenset({"Cast", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity"})


def scale_blocks(layout: DecoderLayout, plan: PrunePlan, scales: list[float | None]) -> dict[str, list[ir.Value]]:
    """Divides what every kept block behind a cut adds to the stream by the product of the scales before it.

    With ``alpha`` at a cut the stream should go on as ``alpha x + f_1 + f_2 + ...``; it goes on as ``x + f_1 / alpha +
    ...``, the same up to a factor, which the norms that read it remove.

    Args:
        scales: one per boundary; None for none.

    Returns:
        New initializers by the name of the one they replace.

    Raises:
        SurgeryError: a path from a weight to the sum is not linear, is quantised or has other readers.
    """
    made: dict[str, list[ir.Value]] = {}
    for block in plan.kept:
        factor = 1.0
        for boundary, scale in zip(plan.boundaries, scales, strict=True):
            if scale is not None and boundary.span.stop <= block:
                factor /= scale
        if factor != 1.0:
            _Scaler(layout, block, factor, made).run()
    return made


def with_new_addends(layout: DecoderLayout) -> DecoderLayout:
    """The layout whose fused sums are read again from their nodes."""
    points = [p if p.node is None or not p.is_fused else point_at(p.node) for p in layout.points]
    return replace(layout, points=tuple(points))


class _Scaler:
    """Walks one block's branches."""

    def __init__(self, layout: DecoderLayout, block: int, factor: float, made: dict[str, list[ir.Value]]) -> None:
        self.layout = layout
        self.block = block
        self.factor = factor
        self.made = made
        self.count = 0

    def run(self) -> None:
        sums = self.layout.sums[self.block]
        chain = {self.layout.points[self.block].node, *sums}
        for total in sums:
            for index in _summands(total):
                value = total.inputs[index]
                if value is not None and not self._on_stream(value, chain):
                    self.scale(total, index)

    def _on_stream(self, value: ir.Value, chain: set[ir.Node | None]) -> bool:
        """Whether a summand is the stream itself, possibly behind nodes that change only its form."""
        node = value.producer()
        while node not in chain and value is not self.layout.points[self.block].value:
            source = node.inputs[0] if node is not None and node.op_type in _LAYOUT else None
            if source is None:
                return False
            value, node = source, source.producer()
        return True

    def scale(self, reader: ir.Node, index: int) -> None:
        """Makes input ``index`` of ``reader`` the scaled value."""
        value = reader.inputs[index]
        assert value is not None
        if is_weight(value):
            self._replace(reader, index, value)
            return
        node = value.producer()
        if node is None or len(list(value.uses())) != 1:
            raise self._refusal(f"{value.name!r} is a graph input or has other readers")
        if node.op_type in ("Add", "Sum"):
            for operand in range(len(node.inputs)):
                self.scale(node, operand)
        elif node.op_type in _PRODUCTS and node.inputs[1] is not None and is_constant(node.inputs[1]):
            self.scale(node, 1)
            if len(node.inputs) > 2 and node.inputs[2] is not None:
                self.scale(node, 2)
        elif node.op_type in _NORMS:
            for operand in range(1, len(node.inputs)):
                if node.inputs[operand] is not None:
                    self.scale(node, operand)
        elif node.op_type == "Mul":
            constants = [i for i, v in enumerate(node.inputs) if v is not None and is_constant(v)]
            if not constants:
                raise self._refusal("two activations are multiplied")
            self.scale(node, constants[-1])
        elif node.op_type in _LAYOUT:
            self.scale(node, 0)
        else:
            raise self._refusal(f"{node.op_type} {node.name!r} is not linear in a weight, or quantised")

    def _replace(self, reader: ir.Node, index: int, old: ir.Value) -> None:
        tensor = old.const_value
        if tensor is None or old.dtype is None:
            raise self._refusal(f"the values of {old.name!r} are not in the file")
        scaled = _values(tensor).astype("float32") * self.factor
        new = weight(f"ghost.scale.{self.block}.{self.count}", scaled, old.dtype)
        self.count += 1
        reader.replace_input_with(index, new)
        self.made.setdefault(old.name or "?", []).append(new)

    def _refusal(self, why: str) -> SurgeryError:
        return SurgeryError(
            f"Block {self.block} cannot be scaled: {why}.", "Use an operator that acts at the boundary, such as ghost."
        )


def _summands(total: ir.Node) -> list[int]:
    """The inputs that are summed: all, or of a fused skip-norm the two addends and the bias."""
    if total.op_type in ("Add", "Sum"):
        return list(range(len(total.inputs)))
    bias = bias_index(total)
    return [0, 1, *([bias] if len(total.inputs) > bias and total.inputs[bias] is not None else [])]


def _values(tensor: ir.TensorProtocol) -> FloatArray:
    """The numbers of a weight. onnx-ir reads no data file that has a second name, and shared data files do."""
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor.numpy()
    values = np.fromfile(
        tensor.path, tensor.dtype.numpy(), int(np.prod(tensor.shape.numpy())), offset=tensor.offset or 0
    )
    return values.reshape(tensor.shape.numpy())
