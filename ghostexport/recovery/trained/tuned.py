"""``tuned``: no training here, but the result of one elsewhere: ``--weights FOLDER``, a checkpoint of the cut model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ghostexport.calibration import CalibrationSet
from ghostexport.errors import RecipeError
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, load_model
from ghostexport.models.foreign import TUNED, tuned_operators
from ghostexport.operators import OperatorSet
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.held_out import measure_refit


def take(
    loaded: LoadedModel,
    start: OperatorSet,
    calibration: CalibrationSet,
    held_out: CalibrationSet,
    section: RecoverSection,
    execution: Execution,
) -> OperatorSet:
    """The weights of ``section.weights``, in place of the bare cut; ``fit`` has what they bring on held-out text.

    Raises:
        RecipeError: no folder is named.
        ModelLayoutError: the checkpoint was not made by removing the plan's blocks of this model.
    """
    found = tuned_operators(loaded, _load(loaded, section, execution), start.plan)
    execution.say(f"recover: {len(found.weights)} weights of {section.weights} differ from the dense model's")
    measured = found.with_fit(measure_refit(loaded, found, held_out, execution))
    return replace(measured, calibration_sha256=start.calibration_sha256)


def removed_spans(loaded: LoadedModel, section: RecoverSection, execution: Execution) -> tuple[tuple[int, int], ...]:
    """What was removed from the model to make the checkpoint ``section.weights``.

    Raises:
        RecipeError: nothing was.
        ModelLayoutError: it was made from another model.
    """
    plan = tuned_operators(loaded, _load(loaded, section, execution)).plan
    if not plan.removed:
        raise RecipeError(
            f"recover.weights: {section.weights} has all {plan.num_blocks} blocks of the model.",
            "Export it as a model of its own, or put it into a graph: ghostexport surgery GRAPH --weights FOLDER.",
        )
    execution.say(f"{section.weights}: {plan}, found by the weights")
    return tuple((span.start, span.stop) for span in plan.removed)


def _load(loaded: LoadedModel, section: RecoverSection, execution: Execution) -> LoadedModel:
    if section.weights is None:
        raise RecipeError(f"recover: {TUNED} needs a checkpoint.", "Name its folder: --weights FOLDER.")
    dtype: Any = str(next(loaded.model.parameters()).dtype).removeprefix("torch.")
    return load_model(section.weights, dtype, execution)
