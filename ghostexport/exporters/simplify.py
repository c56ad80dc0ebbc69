"""Simplifying a freshly translated graph: constants folded, no-ops removed, duplicates merged.

The exporter's own optimiser does the same in time quadratic in the number of blocks: one of its rules, splitting
paired slices, walks the whole graph at every node and never applies to a decoder. Here it is left out.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as passes

_ROUNDS = 2


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
