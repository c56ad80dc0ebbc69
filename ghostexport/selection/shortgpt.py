"""``shortgpt``: remove the blocks of least Block Influence, wherever they stand (ShortGPT, 2403.03853).

::

    BI(l) = mean over tokens of 1 - cos(x_l, x_{l+1})        cosine over channels; the n smallest are removed

One-shot. ``x_L`` is read before the final norm.
"""

from __future__ import annotations

from ghostexport.calibration import CalibrationSet
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.selection.ranking import lowest_blocks
from ghostexport.selection.streamline import Watch, summed_cosines, token_directions, unwatched


def shortgpt(
    loaded: LoadedModel,
    calibration: CalibrationSet,
    section: SelectSection,
    execution: Execution,
    watch: Watch = unwatched,
) -> PrunePlan:
    """Scores all blocks in one pass that holds two residual values of a batch.

    Raises:
        RecipeError: too few blocks are eligible.
        CalibrationError: non-finite activations.
    """
    return lowest_blocks("shortgpt", block_influence(loaded, calibration, execution, watch), section)


def block_influence(
    loaded: LoadedModel, calibration: CalibrationSet, execution: Execution, watch: Watch = unwatched
) -> list[float]:
    """``BI(l)`` of every block."""
    sums = summed_cosines(loaded, calibration, 1, token_directions, execution, watch)
    return [1 - total / calibration.num_tokens for total in sums]
