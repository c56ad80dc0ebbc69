"""The criteria, one row each: a score, and how the blocks to remove follow from it.

Nothing heavy is imported: a recipe's names are checked without torch.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ghostexport.errors import RecipeError
from ghostexport.plan import PrunePlan

if TYPE_CHECKING:
    from ghostexport.recipe import SelectSection

#: How a score picks: the best run of consecutive blocks, or the lowest blocks wherever they stand, one-shot.
Pick = Literal["highest run", "lowest run", "lowest blocks"]


@dataclass(frozen=True)
class Criterion:
    """A way to choose blocks. Functions are ``module:name`` below ``ghostexport.selection``.

    Attributes:
        function: ``score(loaded, calibration, execution)``, one number per block, where ``pick`` says how to go on
            from it; where it does not, ``search(loaded, calibration, section, execution)``, which returns the plan.
        pick: what the scores decide.
        protect: first and last blocks that the published method never removes; the recipe's numbers win.
        watchable: the score also takes ``count``, the blocks of a run, and ``watch``: it reads every residual value
            ``x_0`` to ``x_L`` in one plain pass, and others can look on.
    """

    function: str
    pick: Pick | None = None
    protect: tuple[int, int] = (0, 0)
    watchable: bool = False


CRITERIA: dict[str, Criterion] = {
    "streamline": Criterion("cosines:token_similarity", "highest run", watchable=True),
    "streamline-channelwise": Criterion("cosines:channel_similarity", "highest run", protect=(1, 1), watchable=True),
    "shortgpt": Criterion("cosines:token_influence", "lowest blocks", watchable=True),
    "shortgpt-channelwise": Criterion("cosines:channel_influence", "lowest blocks", protect=(0, 1), watchable=True),
    "angular": Criterion("cosines:last_token_angle", "lowest run", protect=(1, 0), watchable=True),
    "taylor": Criterion("weights:taylor", "lowest blocks", protect=(4, 2)),
    "magnitude": Criterion("weights:magnitude", "lowest blocks", protect=(4, 2)),
    "perplexity": Criterion("trials:perplexity", "lowest blocks", protect=(4, 2)),
    "sleb": Criterion("trials:sleb", protect=(1, 1)),
    "prune-and-comp": Criterion("trials:prune_and_comp"),
    "lorp": Criterion("cosines:lorp", protect=(1, 1)),
    "residual": Criterion("after_recovery:residual"),
    "residual-greedy": Criterion("after_recovery:residual_greedy"),
    "search": Criterion("search:search", protect=(1, 1)),
}

#: Criteria whose score ``prune-and-comp`` may rank by; their protection is its own then.
BASES = ("shortgpt", "taylor", "magnitude", "perplexity")

#: Choices kept beside the best one in ``plan.json``.
RUNNERS_UP = 5


def function(criterion: str) -> Any:
    """The function that a row of the table names."""
    module, _, name = CRITERIA[criterion].function.partition(":")
    return getattr(importlib.import_module(f"ghostexport.selection.{module}"), name)


def best_run(
    criterion: str, num_blocks: int, scores: Sequence[float], section: SelectSection, lowest: bool = False
) -> PrunePlan:
    """Removes the run of ``section.prune`` blocks with the highest (or lowest) score; ties go to the first.

    Args:
        scores: of the runs that start at block 0, 1, ...

    Raises:
        RecipeError: the protected blocks leave no run.
    """
    count = section.prune or 0
    sign = -1 if lowest else 1
    order = sorted(eligible_starts(num_blocks, section), key=lambda start: (-sign * scores[start], start))
    windows = [[start, start + count, scores[start]] for start in sorted(order)]
    ranked: list[list[Any]] = [[start, start + count, scores[start]] for start in order[: RUNNERS_UP + 1]]
    best = order[0]
    return PrunePlan.from_spans(
        num_blocks,
        [(best, best + count)],
        criterion,
        {"windows": windows, "best": scores[best], "ranking": {"chosen": ranked[0], "runners_up": ranked[1:]}},
    )


def lowest_blocks(criterion: str, scores: Sequence[float | None], section: SelectSection) -> PrunePlan:
    """Removes the ``section.prune`` eligible blocks of lowest score, one-shot; ties go to the first.

    Args:
        scores: one per block of the model; a block without one comes last.

    Raises:
        RecipeError: too few blocks are eligible.
    """
    count = section.prune or 0
    ranks = [math.inf if score is None else score for score in scores]
    order = sorted(eligible_blocks(len(scores), section), key=lambda block: (ranks[block], block))
    ranked = [block for block in order if scores[block] is not None]
    ranking = {"removed": order[:count], "runners_up": ranked[count : count + RUNNERS_UP]}
    return PrunePlan.from_blocks(len(scores), order[:count], criterion, {"blocks": list(scores), "ranking": ranking})


def eligible_blocks(num_blocks: int, section: SelectSection) -> range:
    """Blocks outside the protected first and last ones (0 where the section leaves them open).

    Raises:
        RecipeError: fewer than ``section.prune`` are left.
    """
    first, last = section.protect_first or 0, section.protect_last or 0
    blocks = range(first, max(first, num_blocks - last))
    if len(blocks) < (section.prune or 0):
        raise RecipeError(
            f"select: {section.prune} blocks cannot be removed from {num_blocks} when the first {first} and the last "
            f"{last} are protected.",
            "Remove fewer blocks or protect fewer (--protect-first, --protect-last).",
        )
    return blocks


def eligible_starts(num_blocks: int, section: SelectSection) -> range:
    """Starts ``s`` of the runs ``[s, s + section.prune)`` inside the eligible blocks; raises as they do."""
    blocks = eligible_blocks(num_blocks, section)
    return range(blocks.start, blocks.stop - (section.prune or 0) + 1)
