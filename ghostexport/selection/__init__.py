"""Criteria: which decoder blocks to remove. One file per criterion."""

from __future__ import annotations

from collections.abc import Callable

from ghostexport.calibration import CalibrationSet
from ghostexport.models import LoadedModel
from ghostexport.plan import PrunePlan
from ghostexport.recipe import Execution, SelectSection, require_name
from ghostexport.selection.eligibility import require_prunable
from ghostexport.selection.streamline import streamline

Criterion = Callable[[LoadedModel, CalibrationSet, SelectSection, Execution], PrunePlan]

CRITERIA: dict[str, Criterion] = {
    "streamline": streamline,
}


def select(
    loaded: LoadedModel, calibration: CalibrationSet, section: SelectSection, execution: Execution | None = None
) -> PrunePlan:
    """Chooses the blocks to remove: the recipe's own spans where given, else by its criterion.

    Raises:
        RecipeError: unknown criterion; spans or number of blocks that do not suit the model.
        CalibrationError: calibration tokens that do not suit the model, or non-finite activations.
    """
    if section.spans is not None:
        return PrunePlan.from_spans(loaded.num_blocks, section.spans)
    require_name(section.criterion, CRITERIA, "criterion")
    require_prunable(loaded.num_blocks, section.prune or 0)
    calibration.require_fits(loaded.vocab_size, loaded.max_length)
    return CRITERIA[section.criterion](loaded, calibration, section, execution or Execution())
