"""``--per-block``: in plans of several runs, the product of one map per removed block (the published code).

::

    run [s, e):   y = x (I + M_s) (I + M_{s+1}) ... (I + M_{e-1})        M_p fitted on x_p -> x_{p+1} of the dense model

The published code stacks one product per removed block; here their matrices are multiplied once, the same function. A
plan of one run is not changed by it, as published. Forms that are no square matrix at the boundary are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ghostexport.errors import RecoveryError
from ghostexport.operators import FloatArray, Operator
from ghostexport.plan import BlockSpan, Boundary, PrunePlan


def single_blocks(plan: PrunePlan) -> tuple[Boundary, ...]:
    """One boundary per removed block, in depth order; ``index`` counts them, ``position`` is that of their run."""
    blocks = ((b, block) for b in plan.boundaries for block in range(b.span.start, b.span.stop))
    return tuple(
        Boundary(index, BlockSpan(block, block + 1), boundary.position)
        for index, (boundary, block) in enumerate(blocks)
    )


def multiplied(plan: PrunePlan, singles: Sequence[Operator]) -> list[Operator]:
    """One operator per run from one per removed block.

    Raises:
        RecoveryError: an operator folds weights, or acts inside a block.
    """
    return [_product(b, [o for o in singles if o.boundary.span.start in b.span]) for b in plan.boundaries]


def _product(boundary: Boundary, singles: Sequence[Operator]) -> Operator:
    kind = singles[0].kind
    if any(o.folds or o.site != "boundary" or o.factors is not None for o in singles):
        raise RecoveryError(
            f"--per-block does not apply to {kind}: its maps are no full matrices at the boundary.",
            "Leave --per-block out, or use ghost or linearpatch.",
        )
    fit = {"blocks": [dict(o.fit) for o in singles]}
    if all(o.scale is not None for o in singles):
        return Operator(boundary, kind, scale=math.prod(o.scale or 1.0 for o in singles), fit=fit)
    if all(o.diagonal is not None for o in singles):
        gain = np.prod([1 + o.diagonal.astype(np.float64) for o in singles if o.diagonal is not None], axis=0)
        return Operator(boundary, kind, diagonal=(gain - 1).astype(np.float32), fit=fit)
    if not any(o.adds_nodes for o in singles):
        return Operator(boundary, kind, fit=fit)
    M, b = _chain(singles)
    return Operator(boundary, kind, delta=M.astype(np.float32), bias=b, fit=fit)


def _chain(singles: Sequence[Operator]) -> tuple[FloatArray, FloatArray | None]:
    """``M`` and ``b`` of the composed affine maps: ``(I + M)(I + N) = I + (M + N + M N)``, in float64."""
    steps: Iterator[Operator] = iter(singles)
    first = next(steps)
    assert first.matrix is not None
    M = first.matrix.astype(np.float64)
    b = None if first.bias is None else first.bias.astype(np.float64)
    for operator in steps:
        assert operator.matrix is not None
        N = operator.matrix.astype(np.float64)
        M = M + N + M @ N
        if b is not None and operator.bias is not None:
            b = b + b @ N + operator.bias
    return M, None if b is None else b.astype(np.float32)
