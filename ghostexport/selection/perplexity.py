"""``perplexity``: remove the blocks without which, one at a time, the model does best (Shortened LLaMA, 2402.02834).

::

    score(block) = exp(mean next-token loss of the model without this block)

One-shot; one forward pass per block. The published code applies the "+" protection (first four, last two blocks) here
too, which is the default; ``--protect-first 0 --protect-last 0`` is the criterion without it.
"""

from __future__ import annotations

import math

from ghostexport.calibration import CalibrationSet
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, drop_blocks
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.selection.likelihood import mean_loss
from ghostexport.selection.ranking import lowest_blocks


def perplexity(
    loaded: LoadedModel, calibration: CalibrationSet, section: SelectSection, execution: Execution
) -> PrunePlan:
    """Scores all blocks.

    Raises:
        RecipeError: too few blocks are eligible.
    """
    return lowest_blocks("perplexity", perplexity_scores(loaded, calibration, execution), section)


def perplexity_scores(loaded: LoadedModel, calibration: CalibrationSet, execution: Execution) -> list[float]:
    """``score(block)`` of every block."""
    scores = []
    for block in range(loaded.num_blocks):
        without = drop_blocks(loaded.model, PrunePlan.from_blocks(loaded.num_blocks, [block]))
        scores.append(math.exp(mean_loss(without, calibration, loaded.device)))
        execution.progress("select", block + 1, loaded.num_blocks)
    return scores
