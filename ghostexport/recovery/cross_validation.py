"""``--ridge cv``: the ridge whose fit predicts left-out sequences best, from sufficient statistics alone.

For fold v, with ``G, B`` the moments of the other folds and ``G_v, B_v, tr_v`` its own::

    G = Q diag(L) Q'     B~ = Q'B     D = Q'B_v     H = (Q' G_v Q) o (B~ B~')     w_i = 1 / (L_i + lambda)
    ||Delta_v - X_v M||^2 = tr_v - 2 sum_i w_i <B~_i, D_i> + w' H w

so one eigendecomposition per fold makes every lambda cost O(R^2). Folds are of sequences: tokens of one sequence are
correlated, and leaving out single tokens would flatter small ridges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ghostexport.errors import RecoveryError
from ghostexport.moments import BoundaryMoments

FOLDS = 4

#: Candidates relative to the median diagonal of the Gram matrix (its mean would follow the few massive channels).
GRID = tuple(10.0 ** (exponent / 2) for exponent in range(-16, 5))


@dataclass(frozen=True)
class RidgeChoice:
    """The result of a cross-validation.

    Attributes:
        ridge: the chosen ``lambda``, absolute.
        errors: ``(lambda, left-out squared error / sum w ||delta||^2)`` of every candidate.
    """

    ridge: float
    errors: tuple[tuple[float, float], ...]


def choose_ridge(folds: Sequence[BoundaryMoments], centred: bool = False) -> RidgeChoice:
    """Cross-validates over :data:`GRID`.

    Args:
        folds: moments by fold, at least two.
        centred: the fit has an unpenalised bias, which is estimated on the training folds.

    Raises:
        RecoveryError: fewer than two folds hold tokens.
    """
    filled = [fold for fold in folds if fold.tokens]
    if len(filled) < 2:
        raise RecoveryError("--ridge cv needs at least two calibration sequences.", "Use more --sequences.")
    whole: BoundaryMoments = sum(filled[1:], start=filled[0])
    scale = median_diagonal(whole)
    grid = torch.tensor(GRID, dtype=torch.float64, device=whole.gram.device) * scale
    total = torch.zeros_like(grid)
    for index, left_out in enumerate(filled):
        others = [fold for i, fold in enumerate(filled) if i != index]
        total += left_out_errors(sum(others[1:], start=others[0]), left_out, grid, centred)
    errors = total / (whole.square_delta or 1.0)
    best = int(errors.argmin())
    table = tuple((float(ridge), float(error)) for ridge, error in zip(grid, errors, strict=True))
    return RidgeChoice(float(grid[best]), table)


def left_out_errors(
    train: BoundaryMoments, left_out: BoundaryMoments, ridges: torch.Tensor, centred: bool = False
) -> torch.Tensor:
    """Squared error on ``left_out`` of the fits on ``train``, one per ridge ``[k]``."""
    if centred:
        mean_x, mean_delta = train.sum_x / train.weight, train.sum_delta / train.weight
        G, B, _ = shifted(train, mean_x, mean_delta)
        G_v, B_v, square = shifted(left_out, mean_x, mean_delta)
    else:
        G, B = train.gram, train.cross
        G_v, B_v, square = left_out.gram, left_out.cross, left_out.square_delta
    L, Q = torch.linalg.eigh(G)
    B_t, D = Q.T @ B, Q.T @ B_v
    H = (Q.T @ G_v @ Q) * (B_t @ B_t.T)
    linear = (B_t * D).sum(1)
    w = 1 / (L.clamp(min=0)[None] + ridges[:, None])  # [k, R]
    errors: torch.Tensor = square - 2 * w @ linear + ((w @ H) * w).sum(1)
    return errors


def shifted(moments: BoundaryMoments, x: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """``G``, ``B`` and ``sum w ||delta||^2`` after subtracting ``x`` ``[R]`` and ``delta`` ``[C]`` from every token."""
    n, sx, sd = moments.weight, moments.sum_x, moments.sum_delta
    G = moments.gram - torch.outer(sx, x) - torch.outer(x, sx) + n * torch.outer(x, x)
    B = moments.cross - torch.outer(sx, delta) - torch.outer(x, sd) + n * torch.outer(x, delta)
    return G, B, moments.square_delta - 2 * float(sd @ delta) + n * float(delta @ delta)


def median_diagonal(moments: BoundaryMoments) -> float:
    """The scale of a relative ridge; 1 where more than half of the regressors never move."""
    return float(moments.gram.diagonal().median()) or 1.0
