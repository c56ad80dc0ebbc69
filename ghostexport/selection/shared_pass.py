"""The pass of ``select`` in which the statistics that ``recover`` needs are gathered too.

What is cut is known only at the end of a criterion's pass. It is guessed before, from a few of the sequences: while the
criterion then reads all of them, the statistics of the guessed cuts are summed up. Where the guess holds they are those
of a pass of ``recover``, bit for bit: the same values in the same batches and order. Where it fails they are dropped,
and ``recover`` makes its pass. So both stages together take ``1 + 1/8`` passes of the dense model instead of two.
"""

from __future__ import annotations

from ghostexport.calibration import CalibrationSet
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection, SelectSection
from ghostexport.recovery import shareable
from ghostexport.recovery.passes import BoundaryStatistics, BoundaryWatch, into
from ghostexport.selection import CRITERIA, select

#: One calibration sequence in so many, the first ones, makes the guess.
GUESSING = 8


def select_and_gather(
    loaded: LoadedModel,
    calibration: CalibrationSet,
    section: SelectSection,
    recover: RecoverSection,
    execution: Execution,
) -> tuple[PrunePlan, list[BoundaryStatistics] | None]:
    """Chooses the blocks as :func:`ghostexport.selection.select` does.

    Returns:
        The plan, and the statistics of its boundaries as :func:`ghostexport.recovery.recover` takes them; None where
        the criterion's pass cannot be watched, ``recover`` could not use them, or the guess was wrong.

    Raises:
        GhostExportError: as ``select``.
    """
    criterion = None if section.spans is not None else CRITERIA.get(section.criterion)
    if criterion is None or not criterion.watchable or shareable(recover, cuts=1) is None:
        return select(loaded, calibration, section, execution), None
    count = max(1, len(calibration) // GUESSING)
    few = CalibrationSet.from_tokens(calibration.tokens[:count], calibration.attention_mask[:count])
    guess = select(loaded, few, section, Execution(device=execution.device))
    request = shareable(recover, len(guess.removed))
    if request is None:
        return select(loaded, calibration, section, execution), None
    statistics = request.empty(loaded, guess.boundaries, calibration)
    plan = select(loaded, calibration, section, execution, BoundaryWatch(guess.boundaries, into(statistics)))
    return plan, statistics if plan.removed == guess.removed else None
