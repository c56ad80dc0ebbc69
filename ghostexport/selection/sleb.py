"""``sleb``: remove one block after the other, each time the one least missed (SLEB, 2402.09025).

::

    round r:  remove argmin over the blocks left of  mean next-token loss of the model without it and those before

Iterative and greedy: ``sum_{r < n} (L - r - 2)`` forward passes. The first and the last block are protected by default.
"""

from __future__ import annotations

from typing import Any

from ghostexport.calibration import CalibrationSet
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, drop_blocks
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.selection.eligibility import eligible_blocks, require_eligible
from ghostexport.selection.likelihood import mean_loss
from ghostexport.selection.ranking import RUNNERS_UP


def sleb(loaded: LoadedModel, calibration: CalibrationSet, section: SelectSection, execution: Execution) -> PrunePlan:
    """Runs ``section.prune`` rounds; ``scores["rounds"]`` holds each round's choice and runners-up with their losses.

    Raises:
        RecipeError: too few blocks are eligible.
    """
    num_blocks, count = loaded.num_blocks, section.prune or 0
    eligible = eligible_blocks(num_blocks, section)
    require_eligible(eligible, num_blocks, section)
    evaluations = sum(len(eligible) - r for r in range(count))
    removed: list[int] = []
    rounds: list[dict[str, Any]] = []
    scores: dict[str, Any] = {}
    done = 0
    for number in range(count):
        losses: dict[int, float] = {}
        for block in (b for b in eligible if b not in removed):
            without = drop_blocks(loaded.model, PrunePlan.from_blocks(num_blocks, [*removed, block]))
            losses[block] = mean_loss(without, calibration, loaded.device)
            done += 1
            execution.progress("select", done, evaluations)
        order = sorted(losses, key=lambda block: (losses[block], block))
        removed.append(order[0])
        rounds.append({"removed": order[0], "loss": losses[order[0]], "runners_up": _shown(order[1:], losses)})
        scores[f"round {number + 1}"] = [[block, block + 1, losses[block]] for block in sorted(losses)]
    return PrunePlan.from_blocks(num_blocks, removed, "sleb", scores | {"rounds": rounds})


def _shown(order: list[int], losses: dict[int, float]) -> list[list[Any]]:
    return [[block, losses[block]] for block in order[:RUNNERS_UP]]
