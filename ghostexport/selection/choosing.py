"""From a model and calibration tokens to a plan, by the recipe's spans or by a criterion.

What is cut is known only at the end of a criterion's pass. To spare ``recover`` a pass of its own it is guessed before,
from a few of the sequences: while the criterion then reads all of them, the moments of the guessed cuts are summed
up. Where the guess holds they are those of a pass of ``recover``, bit for bit: the same values in the same batches and
order. Where it fails they are dropped, and ``recover`` makes its pass. So both stages together take ``1 + 1/8`` passes
of the dense model instead of two.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from ghostexport.calibration import CalibrationSet
from ghostexport.errors import RecipeError
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, needed_blocks
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection, SelectSection
from ghostexport.recovery.gathering import BoundaryWatch, Gathered, into
from ghostexport.recovery.recover import shareable
from ghostexport.selection.cosines import Watch, unwatched
from ghostexport.selection.criteria import BASES, CRITERIA, best_run, eligible_blocks, function, lowest_blocks
from ghostexport.validation import require_name

#: One calibration sequence in so many, the first ones, makes the guess.
GUESSING = 8


def select(
    loaded: LoadedModel,
    calibration: CalibrationSet,
    section: SelectSection,
    execution: Execution | None = None,
    watch: Watch = unwatched,
) -> PrunePlan:
    """Chooses the blocks to remove: the recipe's own spans where given, else by its criterion.

    ``watch`` sees the residual values of the criterion's pass, where it is watchable.

    Raises:
        RecipeError: unknown criterion; spans, protection or number of blocks that do not suit the model.
        CalibrationError: calibration tokens that do not suit the model or criterion, or non-finite activations.
        GhostExportError: what else a criterion that repairs, scales or clusters refuses.
    """
    num_blocks, name = loaded.num_blocks, section.criterion
    needed = needed_blocks(loaded.model)
    if section.spans is not None:
        return _without(needed, PrunePlan.from_spans(num_blocks, section.spans))
    require_name(name, CRITERIA, "criterion")
    if not 1 <= (section.prune or 0) < num_blocks:
        raise RecipeError(
            f"select.prune: {section.prune or 0} of {num_blocks} decoder blocks cannot be removed.",
            f"Choose 1 to {num_blocks - 1}.",
        )
    calibration.require_fits(loaded.vocab_size, loaded.max_length)
    section, execution = _protected(section, needed, num_blocks), execution or Execution()
    eligible_blocks(num_blocks, section)  # refuses before any pass
    pick = CRITERIA[name].pick
    if pick is None:
        return _without(needed, function(name)(loaded, calibration, section, execution))
    count = 1 if pick == "lowest blocks" else section.prune
    options = {"count": count, "watch": watch} if CRITERIA[name].watchable else {}
    scores = function(name)(loaded, calibration, execution, **options)
    if pick == "lowest blocks":
        return _without(needed, lowest_blocks(name, scores, section))
    return _without(needed, best_run(name, num_blocks, scores, section, lowest=pick == "lowest run"))


def _without(needed: Mapping[int, str], plan: PrunePlan) -> PrunePlan:
    """The plan; refuses one that removes a block which the model needs."""
    if lost := sorted(set(needed) - set(plan.kept)):
        raise RecipeError(
            f"select: block {lost[0]} cannot be removed: {needed[lost[0]]}.",
            f"Leave out {'block' if len(needed) == 1 else 'blocks'} {', '.join(map(str, sorted(needed)))} (--remove, "
            "--protect-first, --protect-last).",
        )
    return plan


def _protected(section: SelectSection, needed: Mapping[int, str], num_blocks: int) -> SelectSection:
    """The section with the criterion's published protection where the recipe leaves it open.

    Of a model that needs some of its blocks the longest run between those is open, the last one of equals.
    """
    scored_by = section.criterion
    if scored_by == "prune-and-comp":
        require_name(section.base, BASES, "base score")
        scored_by = section.base
    first, last = CRITERIA[scored_by].protect
    edges = [-1, *sorted(needed), num_blocks]
    start, stop = max(itertools.pairwise(edges), key=lambda run: (run[1] - run[0], run[0]))
    open_keys = {"protect_first": max(first, start + 1), "protect_last": max(last, num_blocks - stop)}
    return section.model_copy(update={k: v for k, v in open_keys.items() if getattr(section, k) is None})


def select_and_gather(
    loaded: LoadedModel,
    calibration: CalibrationSet,
    section: SelectSection,
    recover: RecoverSection,
    execution: Execution,
) -> tuple[PrunePlan, list[Gathered] | None]:
    """Chooses the blocks as :func:`select` does.

    Returns:
        The plan, and what was gathered at its boundaries, as :func:`ghostexport.recovery.recover.recover` takes it;
        None where the criterion's pass cannot be watched, ``recover`` could not use it, or the guess was wrong.

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
    gathered = request.empty(loaded, guess.boundaries, calibration)
    plan = select(loaded, calibration, section, execution, BoundaryWatch(guess.boundaries, into(gathered)))
    return plan, gathered if plan.removed == guess.removed else None
