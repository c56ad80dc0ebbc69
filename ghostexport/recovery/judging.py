"""How far a weight may move: fitted on most sequences, judged on the others, toward the old weight.

::

    D = (G + ridge m I)^-1 B        m = median of diag(G)       the change of the weight

Weights inside a block have more inputs than the stream has channels, and their activations are nearly collinear: least
squares would follow the calibration text. Every fourth sequence judges. The ridge is the one of :data:`RIDGES` whose
fit on the others errs least there, and the old weight stays when none errs at least one percent less than it; the
winner is solved again on all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ghostexport.errors import RecoveryError
from ghostexport.moments import BoundaryMoments
from ghostexport.recovery.cross_validation import median_diagonal
from ghostexport.recovery.solving import solve_ridge

#: Relative to the median diagonal of the Gram matrix.
RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2)

#: Every JUDGES-th sequence judges.
JUDGES = 4

#: A change must lower the judges' error by this share: many tiny changes, each just better on the judges, add up to a
#: model that reads other text worse (SmolLM2, 7 of 30 blocks: benchmarks/results/quality.md).
IMPROVEMENT = 1e-2


@dataclass(frozen=True, eq=False)
class Choice:
    """A judged change of a weight.

    Attributes:
        change: ``[R, C]``; None to keep the old weight.
        ridge: the relative ridge chosen; None when kept.
        error: the judges' weighted squared error over that of the old weight, of the best candidate.
    """

    change: torch.Tensor | None
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
        return Choice(None, None, 1.0)
    scale = median_diagonal(fitting)
    errors = {}
    for ridge in RIDGES:
        change = solve_ridge(fitting.gram, fitting.cross, ridge * scale, fitting.tokens)
        errors[ridge] = judging.residual(change) / judging.square_delta
    best = min(errors, key=lambda ridge: errors[ridge])
    if not errors[best] < 1 - IMPROVEMENT:
        return Choice(None, None, errors[best])
    whole = fitting + judging
    change = solve_ridge(whole.gram, whole.cross, best * median_diagonal(whole), whole.tokens)
    return Choice(change, best, errors[best])
