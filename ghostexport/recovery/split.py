"""``ghost-split`` and ``ghost-zero``: repairs that also re-solve the last kept block's down-projection.

With ``x_s = x_mid + h V0`` inside the last kept block before the cut (token weights as in ghost-weighted)::

    ghost-split     x_e ~ x_mid W + h V         W = I + M at x_mid, V in place of V0: the same nodes as ghost
    ghost-zero      x_e ~ x_mid   + h V         no node at all

Both are solved for the change, ``Delta ~ x_mid M + h (V - V0)``, under a ridge that pulls towards ``M = 0, V = V0``.
ghost (``V = V0 W``) and ReplaceMe (``W = I, V = V0 T``) are special cases of the first, ReplaceMe of the second.
"""

from __future__ import annotations

import torch

from ghostexport.moments import BoundaryMoments
from ghostexport.operators import Operator, WeightFold
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.cross_validation import choose_ridge, median_diagonal
from ghostexport.recovery.ghost import condition, solve_ridge
from ghostexport.recovery.passes import BoundaryStatistics
from ghostexport.recovery.rank import linear_form, reduced_rank

#: Ridge towards the original weights, relative to the median diagonal of the weighted Gram matrix, when none is chosen
#: by cross-validation: C + I regressors leave few tokens for each.
PRIOR_RIDGE = 1e-3


def fit_split(statistics: BoundaryStatistics, section: RecoverSection) -> Operator:
    """Solves for ``M`` and ``V`` jointly; with ``section.rank``, for the best ``M`` of that rank and its ``V``.

    Raises:
        RecoveryError: singular or non-finite.
    """
    folds = statistics.last_block_folds
    moments: BoundaryMoments = sum(folds[1:], start=folds[0])
    ridge = _ridge(folds, moments, section)
    C = moments.channels
    solution = solve_ridge(moments.gram, moments.cross, ridge, moments.tokens)
    M, D = solution[:C], solution[C:]
    system = moments.gram + ridge * torch.eye(len(moments.gram)).to(moments.gram)
    metric = system[:C, :C]
    if section.rank is not None:
        # The objective minimised over V is ||S^(1/2) (M - M*)||^2 with the Schur complement S.
        factor = torch.linalg.cholesky(system[C:, C:])
        metric = metric - system[:C, C:] @ torch.cholesky_solve(system[C:, :C], factor)
        U, V = reduced_rank(M, metric, section.rank)
        D = torch.cholesky_solve(moments.cross[C:] - system[C:, :C] @ (U @ V), factor)
    return Operator(
        statistics.boundary,
        "ghost-split",
        **linear_form(M, metric, section.rank),
        folds=(_fold(statistics, D),),
        site="mid",
        fit={"ridge": ridge, "condition": condition(moments.gram, ridge)},
    )


def fit_zero(statistics: BoundaryStatistics, section: RecoverSection) -> Operator:
    """Solves for ``V`` alone.

    Raises:
        RecoveryError: singular or non-finite.
    """
    folds = [inner_moments(fold) for fold in statistics.last_block_folds]
    moments: BoundaryMoments = sum(folds[1:], start=folds[0])
    ridge = _ridge(folds, moments, section)
    D = solve_ridge(moments.gram, moments.cross, ridge, moments.tokens)
    return Operator(
        statistics.boundary,
        "ghost-zero",
        folds=(_fold(statistics, D),),
        fit={"ridge": ridge, "condition": condition(moments.gram, ridge)},
    )


def inner_moments(moments: BoundaryMoments) -> BoundaryMoments:
    """The part of the last block's moments that concerns ``h`` alone."""
    C = moments.channels
    part = BoundaryMoments(C, moments.gram.device, len(moments.sum_x) - C)
    part.gram, part.cross, part.sum_x = moments.gram[C:, C:], moments.cross[C:], moments.sum_x[C:]
    part.sum_delta, part.square_delta = moments.sum_delta, moments.square_delta
    part.weight, part.tokens = moments.weight, moments.tokens
    return part


def _ridge(folds: list[BoundaryMoments], moments: BoundaryMoments, section: RecoverSection) -> float:
    if section.ridge == "cv":
        return choose_ridge(folds).ridge
    return max(section.ridge, PRIOR_RIDGE * median_diagonal(moments))


def _fold(statistics: BoundaryStatistics, D: torch.Tensor) -> WeightFold:
    assert statistics.last_block_weight is not None
    V = statistics.last_block_weight + D
    return WeightFold(statistics.boundary.span.start - 1, "mlp_output", V.float().cpu().numpy())
