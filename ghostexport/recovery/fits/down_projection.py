"""Repairs that re-solve the last kept block's down-projection: ``ghost-split``, ``ghost-zero``, ``replaceme-lstsq``.

With ``x_s = x_mid + h V0`` inside the last kept block before the cut, ``m = h V0 (+ b0)``::

    ghost-split        x_e ~ x_mid W + h V         W = I + M at x_mid, V in place of V0: the same nodes as ghost
    ghost-zero         x_e ~ x_mid   + h V         no node at all
    replaceme-lstsq    x_e ~ x_mid   + m T         V = V0 T, b = b0 T: no node (ReplaceMe, 2505.02819)

The first two, with token weights as in ghost-weighted, are solved for the change, ``Delta ~ x_mid M + h (V - V0)``,
under a ridge that pulls towards ``M = 0, V = V0`` and is judged on every fourth sequence (``judging``), whatever the
recipe's ridge. ghost (``V = V0 W``) and ReplaceMe are special cases of the first, ReplaceMe of the second.

ReplaceMe's plain sums give ``T = (m'm + ridge I)^-1 (m'(x_e - x_s) + m'm)``. The published ridge is 0, and pads count
there; here they never do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ghostexport.moments import BoundaryMoments
from ghostexport.operators import FloatArray, Operator, WeightFold
from ghostexport.plan import Boundary
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.fits.least_squares import fit_weighted
from ghostexport.recovery.fits.solving import (
    choose_ridge,
    condition,
    linear_form,
    median_diagonal,
    reduced_rank,
    solve_ridge,
)
from ghostexport.recovery.gathering import Gathered
from ghostexport.recovery.refit.judging import RIDGES, choose_change


def fit_split(gathered: Gathered, section: RecoverSection) -> Operator:
    """Solves for ``M`` and ``V`` jointly; with ``section.rank``, for the best ``M`` of that rank and its ``V``.

    Where no block is kept before the cut there is no ``V``, and it is ghost-weighted.

    Raises:
        RecoveryError: fewer than four sequences, singular or non-finite.
    """
    if gathered.boundary.span.start == 0:
        return fit_weighted(gathered, section)
    choice, moments = _judged(gathered.last_block_folds)
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
        gathered.boundary,
        "ghost-split",
        **linear_form(M, metric, section.rank),
        folds=(_fold(gathered, D),),
        site="mid",
        fit={"ridge": choice.ridge, "judged": choice.error},
    )


def fit_zero(gathered: Gathered, section: RecoverSection) -> Operator:
    """Solves for ``V`` alone.

    Raises:
        RecoveryError: fewer than four sequences, singular or non-finite.
    """
    choice, _ = _judged([inner_moments(fold) for fold in gathered.last_block_folds])
    return Operator(
        gathered.boundary,
        "ghost-zero",
        folds=(_fold(gathered, choice.change),),
        fit={"ridge": choice.ridge, "judged": choice.error},
    )


def fit_replaceme(gathered: Gathered, section: RecoverSection) -> Operator:
    """Solves in float64. ``--ridge cv`` pulls ``T`` towards ``I``, a number towards 0, as published.

    Raises:
        RecoveryError: singular or non-finite.
    """
    folds = gathered.mlp_folds
    moments: BoundaryMoments = sum(folds[1:], start=folds[0])
    if section.ridge == "cv":
        ridge = choose_ridge(folds).ridge
        T = torch.eye(len(moments.gram)).to(moments.gram)
        T = T + solve_ridge(moments.gram, moments.cross, ridge, moments.tokens)
    else:
        ridge = section.ridge
        T = solve_ridge(moments.gram, moments.cross + moments.gram, ridge, moments.tokens)
    fit = {"ridge": ridge, "condition": condition(moments.gram, ridge)}
    assert gathered.last_block_weight is not None
    fold = folded(gathered.boundary, gathered.last_block_weight, gathered.last_block_bias, T)
    return Operator(gathered.boundary, "replaceme-lstsq", folds=(fold,), fit=fit)


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


def _fold(gathered: Gathered, D: torch.Tensor) -> WeightFold:
    assert gathered.last_block_weight is not None
    V = gathered.last_block_weight + D
    return WeightFold(gathered.boundary.span.start - 1, "mlp_output", V.float().cpu().numpy())


def folded(boundary: Boundary, weight: torch.Tensor, bias: torch.Tensor | None, T: torch.Tensor) -> WeightFold:
    """``T`` ``[C, C]`` behind the last kept down-projection ``[I, C]`` (and bias), as its new weight and bias."""
    new_bias = None if bias is None else _array(bias @ T)
    return WeightFold(boundary.span.start - 1, "mlp_output", _array(weight @ T), new_bias)


def _array(values: torch.Tensor) -> FloatArray:
    return values.float().cpu().numpy()
