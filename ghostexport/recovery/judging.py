"""How far a weight may move: fitted on most sequences, judged on the others, toward the old weight.

::

    D = (G + ridge m I)^-1 B        m = median of diag(G)       the change of the weight

Weights inside a block have more inputs than the stream has channels, and their activations are nearly collinear: least
squares would follow the calibration text. Every fourth sequence judges. The ridge is the one of :data:`RIDGES` whose
fit on the others errs least there, and the old weight stays when none errs less than it; the winner is solved again on
all sequences.

A refit asks besides what the judging sequences' predictions make of the change (``predictions``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ghostexport.errors import RecoveryError
from ghostexport.moments import BoundaryMoments
from ghostexport.recovery.cross_validation import median_diagonal
from ghostexport.recovery.solving import solve_ridge

#: Relative to the median diagonal of the Gram matrix.
RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2)

#: Every JUDGES-th sequence judges.
JUDGES = 4


@dataclass(frozen=True, eq=False)
class Choice:
    """A judged change of a weight.

    Attributes:
        change: ``[R, C]``; None to keep the old weight.
        fitted: the same without the judging sequences, for a fair look at them.
        ridge: the relative ridge chosen; None when kept.
        error: the judges' weighted squared error over that of the old weight, of the best candidate.
    """

    change: torch.Tensor | None
    fitted: torch.Tensor | None
    ridge: float | None
    error: float


def judges(sequence: int) -> bool:
    """Whether a calibration sequence judges."""
    return sequence % JUDGES == JUDGES - 1


def choose_change(fitting: BoundaryMoments, judging: BoundaryMoments) -> Choice:
    """The ridge solution that the judging sequences like best, on all tokens; or none.

    Raises:
        RecoveryError: fewer than four calibration sequences, so that none judges; or a singular solve.
    """
    if not judging.tokens:
        raise RecoveryError(
            f"This operator needs at least {JUDGES} calibration sequences, one of which judges.",
            "Use more --sequences.",
        )
    if not judging.square_delta:
        return Choice(None, None, None, 1.0)
    scale = median_diagonal(fitting)
    best = Choice(None, None, None, math.inf)
    for ridge in RIDGES:
        change = solve_ridge(fitting.gram, fitting.cross, ridge * scale, fitting.tokens)
        error = judging.residual(change) / judging.square_delta
        if error < best.error:
            best = Choice(None, change, ridge, error)
    if best.ridge is None or not best.error < 1:
        return Choice(None, None, None, best.error)
    whole = fitting + judging
    change = solve_ridge(whole.gram, whole.cross, best.ridge * median_diagonal(whole), whole.tokens)
    return replace(best, change=change)


def surely_less(after: Sequence[float], before: Sequence[float]) -> bool:
    """Whether a figure of the judging sequences fell, on average by more than twice the standard error of its fall."""
    fall = np.subtract(before, after)
    spread = float(fall.std(ddof=1)) / len(fall) ** 0.5 if len(fall) > 1 else 0.0
    return float(fall.mean()) > 2 * spread
