"""Criteria that try: the model runs without a block, and what is missed decides.

``perplexity``: one-shot, one forward pass per block (Shortened LLaMA, 2402.02834); the published code applies the "+"
protection of ``weights`` here too::

    score(block) = exp(mean next-token loss of the model without this block)

``sleb``: one block after the other, each time the one least missed (SLEB, 2402.09025), in ``sum_{r < n} (L - r - 2)``
forward passes::

    round r:  remove argmin over the blocks left of  mean next-token loss of the model without it and those before

``prune-and-comp``: ranks again after every block removed and compensated (Prune&Comp, 2507.18212)::

    round r:  j = first eligible block by the base score of the current model
              alpha = mean over channels and sequences of  mean_t |x_{j+1}| / mean_t |x_j|      on the current model
              remove j, scale the stream at the cut by alpha (operator prune-and-comp)

The scale is folded behind the cut, which leaves every base score as it is in the published fold before it, except
``magnitude``'s: its projections are multiplied by the product of all scales, so that the ratios are the published ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.evaluation.text import forward_of, losses
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, Shelf, drop_blocks, needed_blocks, patch, read_streams
from ghostexport.moments import MagnitudeRatios, require_finite
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.recovery.fits.magnitudes import require_scalable
from ghostexport.selection.criteria import RUNNERS_UP, eligible_blocks, function


def perplexity(loaded: LoadedModel, calibration: CalibrationSet, execution: Execution) -> list[float | None]:
    """``score(block)`` of every block; None of one that the model cannot be without."""
    scores: list[float | None] = []
    needed = needed_blocks(loaded.model)
    for block in range(loaded.num_blocks):
        scores.append(None if block in needed else math.exp(loss_without(loaded, [block], calibration)))
        execution.progress("select", block + 1, loaded.num_blocks)
    return scores


def sleb(loaded: LoadedModel, calibration: CalibrationSet, section: SelectSection, execution: Execution) -> PrunePlan:
    """Runs ``section.prune`` rounds; ``scores["rounds"]`` holds each round's choice and runners-up with their losses.

    Raises:
        RecipeError: too few blocks are eligible.
    """
    count = section.prune or 0
    eligible = eligible_blocks(loaded.num_blocks, section)
    evaluations = sum(len(eligible) - r for r in range(count))
    removed: list[int] = []
    rounds: list[dict[str, Any]] = []
    scores: dict[str, Any] = {}
    done = 0
    for number in range(count):
        found: dict[int, float] = {}
        for block in (b for b in eligible if b not in removed):
            found[block] = loss_without(loaded, [*removed, block], calibration)
            done += 1
            execution.progress("select", done, evaluations)
        chosen, *others = sorted(found, key=lambda block: (found[block], block))
        removed.append(chosen)
        rounds.append({"removed": chosen, "loss": found[chosen], "runners_up": _runners_up(others, found)})
        scores[f"round {number + 1}"] = [[block, block + 1, found[block]] for block in sorted(found)]
    return PrunePlan.from_blocks(loaded.num_blocks, removed, "sleb", scores | {"rounds": rounds})


def loss_without(loaded: LoadedModel, blocks: list[int], calibration: CalibrationSet) -> float:
    """Mean negative log-likelihood, in nats, of every real token that follows a real token. One forward pass."""
    without = drop_blocks(loaded.model, PrunePlan.from_blocks(loaded.num_blocks, blocks))
    forward = forward_of(replace(loaded, model=without), calibration.batches(loaded.device), Execution())
    total, tokens = 0.0, 0
    for batch in calibration.batches(loaded.device):
        for loss, count in losses(forward(batch.input_ids, batch.attention_mask), batch):
            total, tokens = total + float(loss), tokens + count
    return total / tokens


def prune_and_comp(
    loaded: LoadedModel, calibration: CalibrationSet, section: SelectSection, execution: Execution
) -> PrunePlan:
    """Runs ``section.prune`` rounds; ``scores["rounds"]`` holds each round's choice, its scale and the runners-up.

    Raises:
        RecipeError: too few blocks are eligible.
        RecoveryError: the model's blocks do not allow the fold.
        CalibrationError: non-finite activations.
    """
    num_blocks, count = loaded.num_blocks, section.prune or 0
    eligible = eligible_blocks(num_blocks, section)
    require_scalable(loaded, PrunePlan.from_blocks(num_blocks, [eligible[0]]))
    quiet = Execution(device=execution.device)
    scales: dict[int, float] = {}
    rounds: list[dict[str, Any]] = []
    scores: dict[str, Any] = {}
    for number in range(count):
        plan = PrunePlan.from_blocks(num_blocks, scales)
        current = compensated(loaded, plan, scales)
        options = {"writes": math.prod(scales.values())} if section.base == "magnitude" else {}
        ranked = function(section.base)(current, calibration, quiet, **options)
        found = {block: ranked[position] for position, block in enumerate(plan.kept)}
        chosen, *others = sorted((b for b in found if b in eligible), key=lambda block: (found[block], block))
        alpha = channel_scale(current, plan.kept.index(chosen), calibration, quiet)
        scales[chosen] = alpha
        shown = _runners_up(others, found)
        rounds.append({"removed": chosen, "score": found[chosen], "scale": alpha, "runners_up": shown})
        scores[f"round {number + 1}"] = [[block, block + 1, found[block]] for block in plan.kept]
        execution.progress("select", number + 1, count)
    scores |= {"rounds": rounds, "base": section.base}
    return PrunePlan.from_blocks(num_blocks, scales, "prune-and-comp", scores)


def compensated(loaded: LoadedModel, plan: PrunePlan, scales: Mapping[int, float]) -> LoadedModel:
    """The model without the plan's blocks, the stream at every cut scaled by the product of its blocks' scales."""
    if not plan.removed:
        return loaded
    products = [math.prod(scales[block] for block in range(b.span.start, b.span.stop)) for b in plan.boundaries]
    operators = (Operator(b, "prune-and-comp", scale=s) for b, s in zip(plan.boundaries, products, strict=True))
    return patch(loaded, plan, OperatorSet("prune-and-comp", tuple(operators), plan))


def channel_scale(loaded: LoadedModel, block: int, calibration: CalibrationSet, execution: Execution) -> float:
    """``alpha`` across one block: the mean of the channels' mean ratios of magnitude. One pass up to the block."""
    ratios = MagnitudeRatios(loaded.hidden_size, device=loaded.device)
    shelf = Shelf()

    def visit(batch: Batch, point: int, x: torch.Tensor) -> None:
        require_finite(x[batch.mask], point)
        if point == block:
            shelf.put(batch.sequences.start, x)
            return
        for before, after, real in zip(shelf.take(batch.sequences.start), x, batch.mask, strict=True):
            ratios.add(before[real], after[real])

    batches, points = calibration.batches(loaded.device), (block, block + 1)
    read_streams(loaded, batches, points, visit, execution, "select: scale", len(calibration))
    return float(ratios.mean_of_ratios.mean())


def _runners_up(order: list[int], scores: Mapping[int, float]) -> list[list[Any]]:
    return [[block, scores[block]] for block in order[:RUNNERS_UP]]
