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
