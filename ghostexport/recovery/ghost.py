"""``ghost``: the least-squares operator of a removed run (Ghosted Layers, 2605.15491, Appendix H).

::

    M = argmin ||X_pre M - Delta||^2 + ridge ||M||^2  =  (G + ridge I)^-1 B         W = I + M

``--solver svd`` is the main text's form: the pseudo-inverse of ``X_pre`` without its singular values below 1e-6 of the
largest, ``M = X_pre^+ Delta``; with ``G = Q diag(s^2) Q'`` that is ``Q diag(s^-2 where s > 1e-6 s_max) Q' B``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ghostexport.moments import BoundaryMoments
from ghostexport.operators import Operator
from ghostexport.plan import Boundary
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.cross_validation import choose_ridge
from ghostexport.recovery.passes import BoundaryStatistics
from ghostexport.recovery.rank import linear_form
from ghostexport.recovery.solving import condition, solve_ridge, solve_truncated


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
