"""From scores to a plan: the best window of consecutive blocks, or the blocks of lowest score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.selection.eligibility import eligible_blocks, eligible_starts, require_eligible

#: Choices kept beside the best one in ``plan.json``.
RUNNERS_UP = 5


def best_window(
    criterion: str, num_blocks: int, scores: Sequence[float], section: SelectSection, lowest: bool = False
) -> PrunePlan:
    """Removes the window of ``section.prune`` blocks with the highest (or lowest) score; ties go to the first.

    Args:
        scores: of the windows that start at block 0, 1, ...

    Raises:
        RecipeError: the protected blocks leave no window.
    """
    count = section.prune or 0
    sign = -1 if lowest else 1
    order = sorted(eligible_starts(num_blocks, count, section), key=lambda start: (-sign * scores[start], start))
    windows = [[start, start + count, scores[start]] for start in sorted(order)]
    ranked: list[list[Any]] = [[start, start + count, scores[start]] for start in order[: RUNNERS_UP + 1]]
    best = order[0]
    return PrunePlan.from_spans(
        num_blocks,
        [(best, best + count)],
        criterion,
        {"windows": windows, "best": scores[best], "ranking": {"chosen": ranked[0], "runners_up": ranked[1:]}},
    )


def lowest_blocks(criterion: str, scores: Sequence[float], section: SelectSection) -> PrunePlan:
    """Removes the ``section.prune`` eligible blocks of lowest score, one-shot; ties go to the first.

    Args:
        scores: one per block of the model.

    Raises:
        RecipeError: too few blocks are eligible.
    """
    count = section.prune or 0
    eligible = eligible_blocks(len(scores), section)
    require_eligible(eligible, len(scores), section)
    order = sorted(eligible, key=lambda block: (scores[block], block))
    ranking = {"removed": order[:count], "runners_up": order[count : count + RUNNERS_UP]}
    return PrunePlan.from_blocks(len(scores), order[:count], criterion, {"blocks": list(scores), "ranking": ranking})
