"""``magnitude``: remove the blocks of smallest weights (Mag+ in Shortened LLaMA, 2402.02834).

::

    score(block) = sum over weights W of  sum_ij |W_ij|

No calibration. The first four and the last two blocks are protected by default, as for ``taylor``.
"""

from __future__ import annotations

import torch

from ghostexport.calibration import CalibrationSet
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, find_projections
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.selection.ranking import lowest_blocks


def magnitude(
    loaded: LoadedModel, calibration: CalibrationSet, section: SelectSection, execution: Execution
) -> PrunePlan:
    """Scores all blocks from their parameters named "weight", norms included.

    Raises:
        RecipeError: too few blocks are eligible.
    """
    return lowest_blocks("magnitude", magnitude_scores(loaded), section)


def magnitude_scores(loaded: LoadedModel, writes: float = 1.0) -> list[float]:
    """``score(block)`` of every block; ``writes`` multiplies the weights whose results are added to the stream."""
    scores = []
    for index, block in enumerate(loaded.blocks):
        scores.append(sum(_size(p) for name, p in block.named_parameters() if "weight" in name))
        if writes != 1.0:
            projections = find_projections(loaded.model, index)
            written = (projections.attention_output, projections.mlp_output)
            scores[-1] += (writes - 1) * sum(_size(module.weight) for module in written)
    return scores


def _size(weight: torch.Tensor) -> float:
    return float(weight.abs().sum(dtype=torch.float64))
