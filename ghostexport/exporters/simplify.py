"""Simplifying a freshly translated graph: constants folded, no-ops removed, duplicates merged.

The exporter's own optimiser does the same in time quadratic in the number of blocks: one of its rules, splitting
paired slices, walks the whole graph at every node and never applies to a decoder. Here it is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
from numpy.typing import NDArray

_ROUNDS = 2
#: How many neighbours of a rounded factor are tried on either side.
_NEIGHBOURS = 64


def simplify(model: ir.Model) -> ir.Model:
    """Simplifies ``model`` in place and returns it; what it computes stays the same."""
    from onnxscript import optimizer, rewriter
    from onnxscript.rewriter.rules import common

    rules = [
        common.add_0_rule,
        common.sub_0_rule,
        common.mul_by_1_rule,
        common.div_by_1_rule,
        common.collapse_slice_rule,
        common.collapse_slice2_rule,
        common.materialize_reshape_shape_rule,
        common.one_reshape_matmul_reshape_rule,
        common.two_reshapes_matmul_reshape_rule,
        common.cast_cast_rule,
        common.no_op_cast_rule,
        common.no_op_expand_rule,
        common.no_op_transpose_rule,
        common.transpose_transpose_rule,
        common.reshape_reshape_rule,
        common.squeeze_reshape_1d_rule,
        common.unsqueeze_unsqueeze_rule,
    ]
    passes.InlinePass()(model)
    for _ in range(_ROUNDS):
        optimizer.fold_constants(model)
        rewriter.rewrite(model, rules)
    ir.passes.Sequential(
        passes.RemoveUnusedNodesPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.LiftSubgraphInitializersToMainGraphPass(),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.RemoveUnusedNodesPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    )(model)
    return model


def widen_bfloat16(model: ir.Model) -> None:
    """Arithmetic in bfloat16 becomes float32 arithmetic, rounded again: the same bits, and every runtime has it.

    For float32 decoders that compute a detail in bfloat16 (Falcon's alibi). float32 has more than twice the digits, so
    rounding twice gives the bits of rounding once (Figueroa, 1995).
    """
    for node in list(model.graph.all_nodes()):
        output = node.outputs[0]
        if node.op_type not in ("Add", "Sub", "Mul", "Div") or output.dtype != ir.DataType.BFLOAT16:
            continue
        wide, shape = ir.DataType.FLOAT, output.shape
        casts = [ir.node("Cast", [value], {"to": int(wide)}) for value in node.inputs]
        for index, cast in enumerate(casts):
            cast.outputs[0].dtype = wide
            node.replace_input_with(index, cast.outputs[0])
        rounded = ir.node("Cast", [output], {"to": int(ir.DataType.BFLOAT16)})
        rounded.outputs[0].dtype, rounded.outputs[0].shape = ir.DataType.BFLOAT16, shape
        output.replace_all_uses_with(rounded.outputs[0], replace_graph_outputs=True)
        rounded.replace_input_with(0, output)
        output.dtype = wide
        assert node.graph is not None
        node.graph.insert_before(node, casts)
        node.graph.insert_after(node, rounded)
    passes.NameFixPass()(model)


def sharpen_scales(model: ir.Model, scales: Iterable[float]) -> None:
    """Attention scales in half precision become two factors whose product is the scale, to four digits.

    torch.onnx multiplies queries and keys by ``sqrt(scale)``, rounded to the stream's dtype: for heads of 128 in
    bfloat16 every score is 0.3 % too small, where PyTorch scales in float32. Of the neighbours ``a`` of that factor the
    one is taken for which ``a b`` is nearest to the scale, with ``b`` the number of the dtype nearest to ``scale / a``.
    """
    graph, exact = model.graph, list(scales)
    for node in list(graph.all_nodes()):
        sides = [value.producer() for value in node.inputs if value is not None] if node.op_type == "MatMul" else []
        found = [_scalar_of(side) for side in sides]
        if len(found) != 2 or found[0] is None or found[0] is not found[1]:
            continue
        rounded = found[0].const_value
        assert rounded is not None
        factor = rounded.numpy().reshape(())
        scale = next((one for one in exact if factor.dtype.type(math.sqrt(one)) == factor), None)
        if scale is None:
            continue
        for side, one in zip(sides, _two_factors(scale, factor), strict=True):
            name = f"attention_scale_{float(one):.8g}"
            if name not in graph.initializers:
                tensor = ir.tensor(one.reshape(rounded.numpy().shape), name=name)
                shape, kind = ir.Shape(rounded.numpy().shape), ir.TensorType(rounded.dtype)
                graph.register_initializer(ir.Value(name=name, shape=shape, type=kind, const_value=tensor))
            assert side is not None
            side.replace_input_with(side.inputs.index(found[0]), graph.initializers[name])
    passes.RemoveUnusedNodesPass()(model)


def _scalar_of(node: ir.Node | None) -> ir.Value | None:
    """The scalar in half precision that a ``Mul`` multiplies by."""
    for value in node.inputs if node is not None and node.op_type == "Mul" else ():
        if value is not None and value.const_value is not None and value.const_value.size == 1:
            return value if value.const_value.dtype in (ir.DataType.BFLOAT16, ir.DataType.FLOAT16) else None
    return None


def _two_factors(scale: float, factor: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    near = np.arange(-_NEIGHBOURS, _NEIGHBOURS + 1) + int(factor.view(np.uint16))
    first = near.astype(np.uint16).view(factor.dtype)
    second = (scale / first.astype(np.float64)).astype(factor.dtype)
    best = np.argmin(np.abs(first.astype(np.float64) * second.astype(np.float64) - scale))
    return first[best], second[best]
