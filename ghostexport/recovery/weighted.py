"""``ghost-weighted``: the ghost fit with every token's error measured relative to its own magnitude.

::

    M = argmin sum_t w_t ||x_t M - delta_t||^2 + ridge ||M||^2        w_t = 1 / (||x_post,t||^2 / C + 1e-6)

Unweighted least squares is ruled by a few massive tokens whose square is thousands of times the others'. The RMSNorms
that read the stream divide every token by its magnitude, so relative errors are the ones that matter downstream.
"""

from __future__ import annotations

from ghostexport.operators import Operator
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.ghost import fit_moments
from ghostexport.recovery.passes import BoundaryStatistics


def fit_weighted(statistics: BoundaryStatistics, section: RecoverSection) -> Operator:
    """The same solve as ghost's on token-weighted moments.

    Raises:
        RecoveryError: singular or non-finite.
    """
    return fit_moments("ghost-weighted", statistics.boundary, statistics.weighted_folds, section)
