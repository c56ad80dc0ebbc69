"""``prune-and-comp``: rank again after every block removed and compensated (Prune&Comp, 2507.18212).

::

    round r:  j = first eligible block by the base score of the current model
              alpha = mean over channels and sequences of  mean_t |x_{j+1}| / mean_t |x_j|      on the current model
              remove j, scale the stream at the cut by alpha (recovery.prune_and_comp)

Base scores: ``shortgpt`` (Block Influence), ``taylor``, ``magnitude``, ``perplexity``, with their own protected blocks.
The scale is folded behind the cut, which leaves every base score as it is in the published fold before it, except
``magnitude``'s: its projections are multiplied by the product of all scales, so that the ratios are the published ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ghostexport.calibration import CalibrationSet
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, patch, read_residuals
from ghostexport.moments import MagnitudeRatios, require_finite
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection, require_name
from ghostexport.recovery.prune_and_comp import require_scalable
from ghostexport.selection.eligibility import eligible_blocks, require_eligible
from ghostexport.selection.magnitude import magnitude_scores
from ghostexport.selection.perplexity import perplexity_scores
from ghostexport.selection.ranking import RUNNERS_UP
from ghostexport.selection.shortgpt import block_influence
from ghostexport.selection.taylor import taylor_scores

#: Base score -> its blocks' scores, lowest removed first, and its published protection (first, last).
BASES: dict[str, tuple[Callable[..., list[float]], tuple[int, int]]] = {
    "shortgpt": (block_influence, (0, 0)),
    "taylor": (taylor_scores, (4, 2)),
    "magnitude": (magnitude_scores, (4, 2)),
    "perplexity": (perplexity_scores, (4, 2)),
}


def prune_and_comp(
    loaded: LoadedModel, calibration: CalibrationSet, section: SelectSection, execution: Execution
) -> PrunePlan:
    """Runs ``section.prune`` rounds; ``scores["rounds"]`` holds each round's choice, its scale and the runners-up.

    Raises:
        RecipeError: unknown base score, or too few blocks are eligible.
        RecoveryError: the model's blocks do not allow the fold.
        CalibrationError: non-finite activations.
    """
    require_name(section.base, BASES, "base score")
    num_blocks, count = loaded.num_blocks, section.prune or 0
    eligible = eligible_blocks(num_blocks, section)
    require_eligible(eligible, num_blocks, section)
    require_scalable(loaded, PrunePlan.from_blocks(num_blocks, [eligible[0]]))
    quiet = Execution(device=execution.device)
    scales: dict[int, float] = {}
    rounds: list[dict[str, Any]] = []
    scores: dict[str, Any] = {}
    for number in range(count):
        plan = PrunePlan.from_blocks(num_blocks, scales)
        current = compensated(loaded, plan, scales)
        ranked = _scores(section.base, current, calibration, scales, quiet)
        found = {block: ranked[position] for position, block in enumerate(plan.kept)}
        order = sorted((b for b in found if b in eligible), key=lambda block: (found[block], block))
        chosen = order[0]
        alpha = channel_scale(current, plan.kept.index(chosen), calibration)
        scales[chosen] = alpha
        runners_up = [[block, found[block]] for block in order[1 : RUNNERS_UP + 1]]
        rounds.append({"removed": chosen, "score": found[chosen], "scale": alpha, "runners_up": runners_up})
        scores[f"round {number + 1}"] = [[block, block + 1, found[block]] for block in plan.kept]
        execution.progress("select", number + 1, count)
    return PrunePlan.from_blocks(
        num_blocks, scales, "prune-and-comp", scores | {"rounds": rounds, "base": section.base}
    )


def compensated(loaded: LoadedModel, plan: PrunePlan, scales: Mapping[int, float]) -> LoadedModel:
    """The model without the plan's blocks, the stream at every cut scaled by the product of its blocks' scales."""
    if not plan.removed:
        return loaded
    operators = []
    for boundary in plan.boundaries:
        product = 1.0
        for block in range(boundary.span.start, boundary.span.stop):
            product *= scales[block]
        operators.append(Operator(boundary, "prune-and-comp", scale=product))
    return patch(loaded, plan, OperatorSet("prune-and-comp", tuple(operators), plan))


def channel_scale(loaded: LoadedModel, block: int, calibration: CalibrationSet) -> float:
    """``alpha`` across one block: the mean of the channels' mean ratios of magnitude. One pass up to the block."""
    ratios = MagnitudeRatios(loaded.hidden_size, device=loaded.device)
    for batch in calibration.batches(loaded.device):
        before: list[torch.Tensor] = []

        def visit(point: int, x: torch.Tensor, batch: Any = batch, before: list[torch.Tensor] = before) -> None:
            require_finite(x[batch.mask], point)
            if point == block:
                before.append(x)
                return
            for row in range(len(x)):
                ratios.add(before[0][row][batch.mask[row]], x[row][batch.mask[row]])

        read_residuals(loaded.model, (block, block + 1), visit, batch.input_ids, batch.attention_mask)
    return float(ratios.mean_of_ratios.mean())


def _scores(
    base: str, current: LoadedModel, calibration: CalibrationSet, scales: Mapping[int, float], execution: Execution
) -> list[float]:
    if base != "magnitude":
        return BASES[base][0](current, calibration, execution)
    product = 1.0
    for scale in scales.values():
        product *= scale
    return magnitude_scores(current, product)
