"""``linearpatch-diag`` and ``linearpatch-rotate``: channel-wise rescaling across the cut (LinearPatch, 2505.24680).

::

    z = x H            H orthonormal Hadamard (rotate) or I (diag)
    d = mean over sequences of  mean_t |z_post| / mean_t |z_pre|        (as coded; ``--ratio ratio-of-means``, as in the
                                                                         paper: both means over all sequences first)
    W = H diag(d) H'   M = W - I = H diag(d - 1) H'
"""

from __future__ import annotations

import torch

from ghostexport.errors import RecoveryError
from ghostexport.moments import MagnitudeRatios
from ghostexport.operators import Operator
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.passes import BoundaryStatistics


def fit_diag(statistics: BoundaryStatistics, section: RecoverSection) -> Operator:
    """Rescales the channels themselves; stored as a diagonal of ``C`` numbers.

    Raises:
        RecoveryError: a channel is zero before the cut, so its ratio is not finite.
    """
    d = scales(statistics.ratios["identity"], section)
    return Operator(statistics.boundary, "linearpatch-diag", diagonal=(d - 1).float().cpu().numpy())


def fit_rotate(statistics: BoundaryStatistics, section: RecoverSection) -> Operator:
    """Rescales the Hadamard coefficients; a dense symmetric ``[C, C]`` delta.

    Raises:
        RecoveryError: a coefficient is zero before the cut, so its ratio is not finite.
    """
    ratios = statistics.ratios["hadamard"]
    assert ratios.basis is not None
    H = ratios.basis.double()
    M = (H * (scales(ratios, section) - 1)) @ H.T
    return Operator(statistics.boundary, "linearpatch-rotate", delta=M.float().cpu().numpy())


def scales(ratios: MagnitudeRatios, section: RecoverSection) -> torch.Tensor:
    """``d`` ``[C]`` by the recipe's kind of ratio.

    Raises:
        RecoveryError: a channel is zero before the cut.
    """
    d = ratios.mean_of_ratios if section.ratio == "mean-of-ratios" else ratios.ratio_of_means
    dead = int((~torch.isfinite(d)).sum())
    if dead:
        raise RecoveryError(
            f"{dead} channels are zero before the cut in some sequence: LinearPatch divides by their magnitude.",
            "Use ghost, or longer calibration sequences.",
        )
    return d
