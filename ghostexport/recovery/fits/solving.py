"""The linear solves of recovery, in float64 from moments: under a ridge, its choice, and of a low rank.

``--ridge cv`` takes the ridge whose fit predicts left-out sequences best. For fold v, with ``G, B`` the moments of the
other folds and ``G_v, B_v, tr_v`` its own::

    G = Q diag(L) Q'     B~ = Q'B     D = Q'B_v     H = (Q' G_v Q) o (B~ B~')     w_i = 1 / (L_i + lambda)
    ||Delta_v - X_v M||^2 = tr_v - 2 sum_i w_i <B~_i, D_i> + w' H w

so one eigendecomposition per fold makes every lambda cost O(R^2). Folds are of sequences: tokens of one sequence are
correlated, and leaving out single tokens would flatter small ridges.

``--rank R`` is reduced-rank regression (Izenman 1975)::

    V_r = top-r eigenvectors of M'SM     M_r = (M V_r) V_r'        S = G + lambda I, the metric of the fit

``||X M - X M_r||^2`` then equals the Eckart-Young bound of ``S^(1/2) M``: no map of rank r fits better. A plain SVD of
``M`` ignores how often each direction is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch

from ghostexport.errors import RecoveryError
from ghostexport.moments import BoundaryMoments
from ghostexport.operators import FloatArray

#: Relative to the largest singular value of ``X_pre``, as published.
SVD_THRESHOLD = 1e-6

FOLDS = 4

#: Candidates relative to the median diagonal of the Gram matrix (its mean would follow the few massive channels).
GRID = tuple(10.0 ** (exponent / 2) for exponent in range(-16, 5))


def solve_ridge(gram: torch.Tensor, cross: torch.Tensor, ridge: float, tokens: int) -> torch.Tensor:
    """``(G + ridge I)^-1 B`` by Cholesky, whose accuracy does not suffer from channels of very different scale.

    ``G`` ``[R, R]``, or its diagonal ``[R]`` where the regressors are apart.
    """
    if gram.ndim == 1:
        return cross / (gram + ridge)
    system = gram.clone()
    system.diagonal().add_(ridge)
    factor, failed = torch.linalg.cholesky_ex(system)
    del system  # of three copies of a large G, two at a time
    solution = torch.cholesky_solve(cross, factor)
    if int(failed) or not bool(torch.isfinite(solution).all()):
        raise RecoveryError(
            f"The activations before the cut do not determine an operator: condition number "
            f"{condition(gram, ridge):.1e} from {tokens} tokens for {len(gram)} channels.",
            "Use more calibration tokens or a larger ridge.",
        )
    return solution


def solve_truncated(gram: torch.Tensor, cross: torch.Tensor) -> tuple[torch.Tensor, int]:
    """``X^+ Delta`` from ``G = X'X`` and ``B = X'Delta``, and the number of singular directions kept.

    Raises:
        RecoveryError: the solution is not finite.
    """
    eigenvalues, Q = torch.linalg.eigh(gram)
    keep = eigenvalues > SVD_THRESHOLD**2 * eigenvalues[-1]
    Q = Q[:, keep]
    solution = (Q / eigenvalues[keep]) @ (Q.T @ cross)
    if not bool(torch.isfinite(solution).all()):
        raise RecoveryError("The pseudo-inverse of the activations is not finite.", "Use more calibration tokens.")
    return solution, int(keep.sum())


def condition(gram: torch.Tensor, ridge: float) -> float:
    """Condition number of ``G + ridge I``; the smallest eigenvalue is floored at rounding level."""
    eigenvalues = torch.linalg.eigvalsh(gram)
    largest = float(eigenvalues[-1])
    smallest = max(float(eigenvalues[0]), largest * torch.finfo(gram.dtype).eps) + ridge
    return (largest + ridge) / smallest if smallest > 0 else 1.0


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
    gram = moments.gram
    return float((gram if gram.ndim == 1 else gram.diagonal()).median()) or 1.0


class LinearForm(TypedDict, total=False):
    """The arguments of an ``Operator`` that hold its matrix."""

    delta: FloatArray
    factors: tuple[FloatArray, FloatArray]


def linear_form(M: torch.Tensor, metric: torch.Tensor, rank: int | None) -> LinearForm:
    """``M`` ``[C, C]`` as a float32 ``delta``, or as factors of the given rank under the metric ``S`` ``[C, C]``."""
    if rank is None:
        return {"delta": M.float().cpu().numpy()}
    U, V = reduced_rank(M, metric, rank)
    return {"factors": (U.float().cpu().numpy(), V.float().cpu().numpy())}


def reduced_rank(M: torch.Tensor, metric: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``U`` ``[C, r]`` and ``V`` ``[r, C]`` with ``U V`` nearest to ``M`` under the metric; ``r`` is at most ``C``."""
    _, vectors = torch.linalg.eigh(M.T @ metric @ M)
    top = vectors[:, -rank:].flip(1)
    return M @ top, top.T
