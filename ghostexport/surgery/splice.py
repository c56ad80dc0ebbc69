"""Puts an operator into the graph: ``y = x + x @ M (+ b)`` at a residual point.

Names are public and stable: initializers ``ghost.{b}.delta | .factor_u | .factor_v | .diagonal | .bias``, nodes
``ghost.{b}.matmul`` (``.matmul_u``/``.matmul_v`` for factors, ``.mul`` for a diagonal), ``ghost.{b}.add_bias`` and
``ghost.{b}.add``, which a fused skip-norm replaces. The matrix product runs in the operator's dtype, between Casts
where the stream has another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ghostexport.errors import RecoveryError, SurgeryError
from ghostexport.onnxfile import DTYPES, initializer
from ghostexport.operators import FloatArray, Operator


@dataclass
class Splice:
    """New nodes and weights of one operator, not yet in a graph.

    Attributes:
        branch: value of ``x @ M (+ b)``, in the stream's dtype.
        bias: ``b`` where it was asked to stay apart.
        nodes: in topological order.
        weights: new initializers.
    """

    branch: ir.Value
    bias: ir.Value | None = None
    nodes: list[ir.Node] = field(default_factory=list)
    weights: list[ir.Value] = field(default_factory=list)


def build_branch(
    operator: Operator, x: ir.Value, stream: ir.DataType, dtype: ir.DataType, bias_apart: bool = False
) -> Splice:
    """Builds ``x @ M (+ b)`` for ``x`` ``(B, T, C)`` or token-major ``(N, C)``; the caller adds ``x``.

    A network ``relu(x W1 + b1) W2 + b2`` is the whole result: the caller adds nothing.

    Args:
        stream: dtype of ``x``.
        dtype: dtype of the operator's weights and products.
        bias_apart: whoever adds the branch to ``x`` adds ``b`` in the same node.

    Raises:
        RecoveryError: a weight overflows in ``dtype``.
    """
    linear = any(f is not None for f in (operator.delta, operator.factors, operator.diagonal, operator.network))
    if not linear:
        dtype = stream  # a bare bias is added as is
    maker = _Maker(operator.boundary.index, dtype, Splice(x))
    if stream != dtype:
        maker.cast("cast_in", dtype)
    if operator.delta is not None:
        maker.apply("MatMul", "matmul", "delta", operator.delta)
    elif operator.factors is not None:
        maker.apply("MatMul", "matmul_u", "factor_u", operator.factors[0])
        maker.apply("MatMul", "matmul_v", "factor_v", operator.factors[1])
    elif operator.diagonal is not None:
        maker.apply("Mul", "mul", "diagonal", operator.diagonal)
    elif operator.network is not None:
        maker.network(operator.network)
    if operator.bias is not None and linear and bias_apart:
        maker.splice.bias = maker.constant("bias", operator.bias)
    elif operator.bias is not None and linear:
        maker.apply("Add", "add_bias", "bias", operator.bias)
    elif operator.bias is not None:
        maker.splice.branch = maker.constant("bias", operator.bias)
    if stream != dtype:
        maker.cast("cast_out", stream)
    return maker.splice


def add_node(name: str, a: ir.Value, b: ir.Value, like: ir.Value | None) -> ir.Node:
    """``a + b`` with type and shape of ``like`` (of ``a`` when None)."""
    node = ir.Node("", "Add", [a, b], name=name)
    _describe(node.outputs[0], name, like or a)
    return node


def weight(name: str, array: FloatArray, dtype: ir.DataType) -> ir.Value:
    """A new initializer, rounded to ``dtype``.

    Raises:
        RecoveryError: finite numbers of ``array`` overflow, or it was not finite.
        SurgeryError: no such weight dtype.
    """
    if dtype not in (*DTYPES.values(), ir.DataType.DOUBLE):
        raise SurgeryError(f"Weights of dtype {dtype.name} cannot be created.", f"Use one of: {', '.join(DTYPES)}.")
    with np.errstate(over="ignore"):
        data = np.ascontiguousarray(array.astype(dtype.numpy()))
    if not np.isfinite(data.astype(np.float32)).all():
        raise RecoveryError(
            f"{name} is not finite in {dtype.name} (largest magnitude {np.abs(array).max():.3g}).",
            "Choose a wider operator dtype (bfloat16 or float32).",
        )
    return initializer(ir.Tensor(data, dtype=dtype, name=name))


class _Maker:
    """Appends one operation after the other to a splice."""

    def __init__(self, boundary: int, dtype: ir.DataType, splice: Splice) -> None:
        self.prefix = f"ghost.{boundary}"
        self.dtype = dtype
        self.splice = splice

    def apply(self, op: str, name: str, weight_name: str, array: FloatArray) -> None:
        value = self.constant(weight_name, array)
        self._append(ir.Node("", op, [self.splice.branch, value], name=f"{self.prefix}.{name}"), array.shape[-1])

    def constant(self, weight_name: str, array: FloatArray) -> ir.Value:
        value = weight(f"{self.prefix}.{weight_name}", array, self.dtype)
        self.splice.weights.append(value)
        return value

    def network(self, arrays: tuple[FloatArray, FloatArray, FloatArray, FloatArray]) -> None:
        W1, b1, W2, b2 = arrays
        self.apply("MatMul", "network_matmul1", "network_w1", W1)
        self.apply("Add", "network_add1", "network_b1", b1)
        self._append(ir.Node("", "Relu", [self.splice.branch], name=f"{self.prefix}.network_relu"), None)
        self.apply("MatMul", "network_matmul2", "network_w2", W2)
        self.apply("Add", "network_add2", "network_b2", b2)

    def cast(self, name: str, dtype: ir.DataType) -> None:
        node = ir.Node(
            "", "Cast", [self.splice.branch], [ir.AttrInt64("to", dtype.value)], name=f"{self.prefix}.{name}"
        )
        self._append(node, None, dtype)

    def _append(self, node: ir.Node, last_dim: int | None, dtype: ir.DataType | None = None) -> None:
        _describe(node.outputs[0], node.name or "", self.splice.branch, last_dim, dtype or self.dtype)
        self.splice.nodes.append(node)
        self.splice.branch = node.outputs[0]


def _describe(
    value: ir.Value, name: str, like: ir.Value, last_dim: int | None = None, dtype: ir.DataType | None = None
) -> None:
    value.name = name
    value.type = ir.TensorType(dtype) if dtype is not None else like.type
    if like.shape is not None:
        dims = list(like.shape)
        value.shape = ir.Shape([*dims[:-1], last_dim] if last_dim is not None else dims)
