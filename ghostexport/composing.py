"""Operators one after the other as one operator. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ghostexport.errors import RecoveryError
from ghostexport.operators import Operator
from ghostexport.plan import Boundary


def product(boundary: Boundary, singles: Sequence[Operator]) -> Operator:
    """One operator that does what ``singles`` do one after the other: ``(I + M)(I + N) = I + (M + N + M N)``.

    Raises:
        RecoveryError: one folds weights, acts inside a block, or is no full matrix.
    """
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
    M, *others = [o.matrix.astype(np.float64) for o in singles if o.matrix is not None]
    b, *biases = [None if o.bias is None else o.bias.astype(np.float64) for o in singles]
    for N, c in zip(others, biases, strict=True):
        M = M + N + M @ N
        b = None if b is None or c is None else b + b @ N + c
    return Operator(
        boundary, kind, delta=M.astype(np.float32), bias=None if b is None else b.astype(np.float32), fit=fit
    )
