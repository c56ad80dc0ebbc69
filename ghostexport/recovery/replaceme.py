"""``replaceme-lstsq``: a linear map of the last kept MLP's output, folded into its down-projection (2505.02819).

With ``m = h V0 (+ b0)`` the MLP output of the last kept block, so that ``x_s = x_mid + m``::

    T = argmin ||m T - (x_e - x_mid)||^2 + ridge ||T||^2 = (G + ridge I)^-1 (B + G)        G = m'm, B = m'(x_e - x_s)
    y = x_mid + m T          V = V0 T, b = b0 T: no node

The residual path is not transformed. The published ridge is 0, and pads count there; here they never do.
"""

from __future__ import annotations

import torch

from ghostexport.moments import BoundaryMoments
from ghostexport.operators import FloatArray, Operator, WeightFold
from ghostexport.plan import Boundary
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.cross_validation import choose_ridge
from ghostexport.recovery.passes import BoundaryStatistics
from ghostexport.recovery.solving import condition, solve_ridge


def fit_lstsq(statistics: BoundaryStatistics, section: RecoverSection) -> Operator:
    """Solves in float64. ``--ridge cv`` pulls ``T`` towards ``I``, a number towards 0, as published.

    Raises:
        RecoveryError: singular or non-finite.
    """
    folds = statistics.mlp_folds
    moments: BoundaryMoments = sum(folds[1:], start=folds[0])
    if section.ridge == "cv":
        ridge = choose_ridge(folds).ridge
        T = torch.eye(len(moments.gram)).to(moments.gram)
        T = T + solve_ridge(moments.gram, moments.cross, ridge, moments.tokens)
    else:
        ridge = section.ridge
        T = solve_ridge(moments.gram, moments.cross + moments.gram, ridge, moments.tokens)
    fit = {"ridge": ridge, "condition": condition(moments.gram, ridge)}
    assert statistics.last_block_weight is not None
    fold = folded(statistics.boundary, statistics.last_block_weight, statistics.last_block_bias, T)
    return Operator(statistics.boundary, "replaceme-lstsq", folds=(fold,), fit=fit)


def folded(boundary: Boundary, weight: torch.Tensor, bias: torch.Tensor | None, T: torch.Tensor) -> WeightFold:
    """``T`` ``[C, C]`` behind the last kept down-projection ``[I, C]`` (and bias), as its new weight and bias."""
    new_bias = None if bias is None else _array(bias @ T)
    return WeightFold(boundary.span.start - 1, "mlp_output", _array(weight @ T), new_bias)


def _array(values: torch.Tensor) -> FloatArray:
    return values.float().cpu().numpy()
