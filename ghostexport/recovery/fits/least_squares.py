"""``ghost`` and its least-squares kin at the boundary, ``y = x + x M (+ b)``, and the cut without repair.

::

    ghost             M = argmin ||X M - Delta||^2 + ridge ||M||^2  =  (G + ridge I)^-1 B          W = I + M
    ghost-weighted    M = argmin sum_t w_t ||x_t M - delta_t||^2 + ridge ||M||^2   w_t = 1 / (||x_post,t||^2 / C + 1e-6)
    ghost-affine      M = (Gc + ridge I)^-1 Bc      b = d - m M      Gc, Bc: about the means m of x and d of delta

``ghost`` is the published operator (Ghosted Layers, 2605.15491, Appendix H). ``--solver svd`` is the main text's form:
the pseudo-inverse of ``X`` without its singular values below 1e-6 of the largest, ``M = X^+ Delta``; with
``G = Q diag(s^2) Q'`` that is ``Q diag(s^-2 where s > 1e-6 s_max) Q' B``.

Unweighted least squares is ruled by a few massive tokens whose square is thousands of times the others'. The RMSNorms
that read the stream divide every token by its magnitude, so relative errors are the ones that matter downstream.

A bias is never worse in sample up to the ridge term. On the models measured its gain is within noise: the stream's mean
is small beside its spread, and the bias can only move the mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ghostexport.moments import BoundaryMoments
from ghostexport.operators import Operator
from ghostexport.plan import Boundary
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.fits.solving import (
    choose_ridge,
    condition,
    linear_form,
    shifted,
    solve_ridge,
    solve_truncated,
)
from ghostexport.recovery.gathering import Gathered


def fit_ghost(gathered: Gathered, section: RecoverSection) -> Operator:
    """Solves the ridge normal equations in float64; the delta is stored as float32.

    Raises:
        RecoveryError: the Gram matrix is singular to working precision, or the solution is not finite.
    """
    return fit_moments("ghost", gathered.boundary, gathered.folds, section)


def fit_weighted(gathered: Gathered, section: RecoverSection) -> Operator:
    """The same solve as ghost's on token-weighted moments.

    Raises:
        RecoveryError: singular or non-finite.
    """
    return fit_moments("ghost-weighted", gathered.boundary, gathered.weighted_folds, section)


def fit_affine(gathered: Gathered, section: RecoverSection) -> Operator:
    """Solves the centred normal equations in float64.

    Raises:
        RecoveryError: singular or non-finite.
    """
    moments = gathered.moments
    mean_x, mean_delta = moments.sum_x / moments.weight, moments.sum_delta / moments.weight
    G, B, _ = shifted(moments, mean_x, mean_delta)
    ridge = choose_ridge(gathered.folds, centred=True).ridge if section.ridge == "cv" else section.ridge
    M = solve_ridge(G, B, ridge, moments.tokens)
    metric = G + ridge * torch.eye(len(G)).to(G)
    form = linear_form(M, metric, section.rank)
    matrix = M if section.rank is None else torch.as_tensor(form["factors"][0] @ form["factors"][1]).to(M)
    b = mean_delta - mean_x @ matrix
    return Operator(
        gathered.boundary,
        "ghost-affine",
        **form,
        bias=b.float().cpu().numpy(),
        fit={"ridge": ridge, "condition": condition(G, ridge)},
    )


def fit_none(gathered: Gathered, section: RecoverSection) -> Operator:
    """An operator that does nothing; its figures are those of the bare cut."""
    return Operator(gathered.boundary, "none")


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
