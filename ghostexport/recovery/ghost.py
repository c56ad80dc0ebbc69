"""``ghost``: the least-squares operator of a removed run (Ghosted Layers, 2605.15491, Appendix H).

::

    M = argmin ||X_pre M - Delta||^2 + ridge ||M||^2  =  (G + ridge I)^-1 B         W = I + M

``--solver svd`` is the main text's form: the pseudo-inverse of ``X_pre`` without its singular values below 1e-6 of the
largest, ``M = X_pre^+ Delta``; with ``G = Q diag(s^2) Q'`` that is ``Q diag(s^-2 where s > 1e-6 s_max) Q' B``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ghostexport.errors import RecoveryError
from ghostexport.moments import BoundaryMoments
from ghostexport.operators import Operator
from ghostexport.plan import Boundary
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.cross_validation import choose_ridge
from ghostexport.recovery.passes import BoundaryStatistics
from ghostexport.recovery.rank import linear_form

#: Relative to the largest singular value of ``X_pre``, as published.
SVD_THRESHOLD = 1e-6


def fit_ghost(statistics: BoundaryStatistics, section: RecoverSection) -> Operator:
    """Solves the ridge normal equations in float64; the delta is stored as float32.

    Raises:
        RecoveryError: the Gram matrix is singular to working precision, or the solution is not finite.
    """
    return fit_moments("ghost", statistics.boundary, statistics.folds, section)


def fit_moments(kind: str, boundary: Boundary, folds: Sequence[BoundaryMoments], section: RecoverSection) -> Operator:
    """The least-squares operator of some moments, under the recipe's ridge and rank.

    Raises:
        RecoveryError: singular, not finite, or the rank exceeds ``C``.
    """
    moments: BoundaryMoments = sum(folds[1:], start=folds[0])
    if section.solver == "svd" and kind == "ghost":
        M, kept = solve_truncated(moments.gram, moments.cross)
        fit = {"directions": kept, "condition": condition(moments.gram, 0.0)}
        return Operator(boundary, kind, **linear_form(M, moments.gram, section.rank), fit=fit)
    ridge = choose_ridge(folds).ridge if section.ridge == "cv" else section.ridge
    M = solve_ridge(moments.gram, moments.cross, ridge, moments.tokens)
    metric = moments.gram + ridge * torch.eye(len(M)).to(M)
    return Operator(
        boundary,
        kind,
        **linear_form(M, metric, section.rank),
        fit={"ridge": ridge, "condition": condition(moments.gram, ridge)},
    )


def solve_ridge(gram: torch.Tensor, cross: torch.Tensor, ridge: float, tokens: int) -> torch.Tensor:
    """``(G + ridge I)^-1 B`` by Cholesky, whose accuracy does not suffer from channels of very different scale."""
    system = gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor, failed = torch.linalg.cholesky_ex(system)
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
