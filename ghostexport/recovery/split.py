"""``ghost-split`` and ``ghost-zero``: repairs that also re-solve the last kept block's down-projection.

With ``x_s = x_mid + h V0`` inside the last kept block before the cut (token weights as in ghost-weighted)::

    ghost-split     x_e ~ x_mid W + h V         W = I + M at x_mid, V in place of V0: the same nodes as ghost
    ghost-zero      x_e ~ x_mid   + h V         no node at all

Both are solved for the change, ``Delta ~ x_mid M + h (V - V0)``, under a ridge that pulls towards ``M = 0, V = V0`` and
is judged on every fourth sequence (``judging``), whatever the recipe's ridge.
ghost (``V = V0 W``) and ReplaceMe (``W = I, V = V0 T``) are special cases of the first, ReplaceMe of the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ghostexport.moments import BoundaryMoments
from ghostexport.operators import Operator, WeightFold
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.cross_validation import median_diagonal
from ghostexport.recovery.judging import RIDGES, choose_change
from ghostexport.recovery.passes import BoundaryStatistics
from ghostexport.recovery.rank import linear_form, reduced_rank


def fit_split(statistics: BoundaryStatistics, section: RecoverSection) -> Operator:
    """Solves for ``M`` and ``V`` jointly; with ``section.rank``, for the best ``M`` of that rank and its ``V``.

    Raises:
        RecoveryError: fewer than four sequences, singular or non-finite.
    """
    choice, moments = _judged(statistics.last_block_folds)
    C = moments.channels
    M, D = choice.change[:C], choice.change[C:]
    metric = moments.gram[:C, :C]
    if section.rank is not None and choice.error < 1:  # else the judges refused: nothing changes
        # The objective minimised over V is ||S^(1/2) (M - M*)||^2 with the Schur complement S.
        system = moments.gram.clone()
        system.diagonal().add_(choice.ridge)
        factor = torch.linalg.cholesky(system[C:, C:])
        metric = system[:C, :C] - system[:C, C:] @ torch.cholesky_solve(system[C:, :C], factor)
        U, V = reduced_rank(M, metric, section.rank)
        D = torch.cholesky_solve(moments.cross[C:] - system[C:, :C] @ (U @ V), factor)
    return Operator(
        statistics.boundary,
        "ghost-split",
        **linear_form(M, metric, section.rank),
        folds=(_fold(statistics, D),),
        site="mid",
        fit={"ridge": choice.ridge, "judged": choice.error},
    )


def fit_zero(statistics: BoundaryStatistics, section: RecoverSection) -> Operator:
    """Solves for ``V`` alone.

    Raises:
        RecoveryError: fewer than four sequences, singular or non-finite.
    """
    choice, _ = _judged([inner_moments(fold) for fold in statistics.last_block_folds])
    return Operator(
        statistics.boundary,
        "ghost-zero",
        folds=(_fold(statistics, choice.change),),
        fit={"ridge": choice.ridge, "judged": choice.error},
    )


@dataclass(frozen=True, eq=False)
class _Solution:
    """``change`` ``[R, C]``, its absolute ridge, and the judges' error relative to no change."""

    change: torch.Tensor
    ridge: float
    error: float


def _judged(folds: list[BoundaryMoments]) -> tuple[_Solution, BoundaryMoments]:
    choice = choose_change(*folds)
    whole = folds[0] + folds[1]
    change = torch.zeros_like(whole.cross) if choice.change is None else choice.change
    return _Solution(change, (choice.ridge or RIDGES[-1]) * median_diagonal(whole), choice.error), whole


def inner_moments(moments: BoundaryMoments) -> BoundaryMoments:
    """The part of the last block's moments that concerns ``h`` alone."""
    C = moments.channels
    part = BoundaryMoments(C, moments.gram.device, len(moments.sum_x) - C)
    part.gram, part.cross, part.sum_x = moments.gram[C:, C:], moments.cross[C:], moments.sum_x[C:]
    part.sum_delta, part.square_delta = moments.sum_delta, moments.square_delta
    part.weight, part.tokens = moments.weight, moments.tokens
    return part


def _fold(statistics: BoundaryStatistics, D: torch.Tensor) -> WeightFold:
    assert statistics.last_block_weight is not None
    V = statistics.last_block_weight + D
    return WeightFold(statistics.boundary.span.start - 1, "mlp_output", V.float().cpu().numpy())
