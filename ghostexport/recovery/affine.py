"""``ghost-affine``: the ghost fit with a bias, ``y = x + x M + b``.

::

    Gc = G - N m m'    Bc = B - N m d'        m, d: means of x and delta
    M = (Gc + ridge I)^-1 Bc      b = d - m M

Never worse than ghost in sample up to the ridge term. On the models measured the gain is within noise: the
stream's mean is small beside its spread, and the bias can only move the mean.
"""

from __future__ import annotations

import torch

from ghostexport.operators import Operator
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.cross_validation import choose_ridge, shifted
from ghostexport.recovery.passes import BoundaryStatistics
from ghostexport.recovery.rank import linear_form
from ghostexport.recovery.solving import condition, solve_ridge


def fit_affine(statistics: BoundaryStatistics, section: RecoverSection) -> Operator:
    """Solves the centred normal equations in float64.

    Raises:
        RecoveryError: singular or non-finite.
    """
    moments = statistics.moments
    mean_x, mean_delta = moments.sum_x / moments.weight, moments.sum_delta / moments.weight
    G, B, _ = shifted(moments, mean_x, mean_delta)
    ridge = choose_ridge(statistics.folds, centred=True).ridge if section.ridge == "cv" else section.ridge
    M = solve_ridge(G, B, ridge, moments.tokens)
    metric = G + ridge * torch.eye(len(G)).to(G)
    form = linear_form(M, metric, section.rank)
    matrix = M if section.rank is None else torch.as_tensor(form["factors"][0] @ form["factors"][1]).to(M)
    b = mean_delta - mean_x @ matrix
    return Operator(
        statistics.boundary,
        "ghost-affine",
        **form,
        bias=b.float().cpu().numpy(),
        fit={"ridge": ridge, "condition": condition(G, ridge)},
    )
