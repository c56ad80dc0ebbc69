"""Checkpoints of a cut model that were trained elsewhere (TRL, Axolotl, Unsloth, merged adapters), as operator sets.

Which blocks were removed need not be said: training leaves the blocks nearest to those that they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ghostexport.errors import ModelLayoutError
from ghostexport.models.loading import LoadedModel
from ghostexport.models.reweighting import all_weights, changed_weights
from ghostexport.new_weights import NEAR, NewWeight, kept_blocks
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan

#: Name of the variant, and of the operator kind in a recipe.
TUNED = "tuned"


def tuned_operators(dense: LoadedModel, cut: LoadedModel, plan: PrunePlan | None = None) -> OperatorSet:
    """What a tuned checkpoint changed, against the dense model it was cut out of.

    Args:
        plan: what was removed; None finds it.

    Raises:
        ModelLayoutError: another class of model, more blocks, other shapes, or another base.
    """
    if type(dense.model) is not type(cut.model):
        raise ModelLayoutError(
            f"{cut.source} is a {type(cut.model).__name__}, the dense model a {type(dense.model).__name__}.",
            "Use a checkpoint made by removing blocks of this model.",
        )
    before, after = all_weights(dense.model), all_weights(cut.model)
    measured = _distances(before, after, dense.num_blocks, cut.num_blocks)
    plan = plan or plan_of_kept(dense.num_blocks, kept_blocks(measured, cut.source))
    require_count(cut, plan)
    for position, block in enumerate(plan.kept):
        if not measured[position, block] <= NEAR:
            raise ModelLayoutError(
                f"Block {position} of {cut.source} is not block {block} of the dense model, trained (relative distance "
                f"{measured[position, block]:.2f}).",
                "Say what was removed from it, or leave that out to have it found.",
            )
    extra = [name for name, weight in after.items() if weight.block is None and name not in before]
    if extra:
        raise ModelLayoutError(
            f"{cut.source} has weights that the dense model has not or ties: {', '.join(extra)}.",
            "Use a checkpoint whose embedding and head are tied as the dense model's.",
        )
    return _set(cut, plan, changed_weights(dense.model, plan, cut.model))


def near_operators(cut: LoadedModel, plan: PrunePlan) -> OperatorSet:
    """All weights of a tuned checkpoint, for a graph that holds what they were before, without the dense model.

    Raises:
        ModelLayoutError: the checkpoint has not the plan's number of blocks.
    """
    require_count(cut, plan)
    return _set(cut, plan, all_weights(cut.model, plan))


def require_count(cut: LoadedModel, plan: PrunePlan) -> None:
    """Raises ModelLayoutError unless the checkpoint has the blocks that the plan keeps."""
    if cut.num_blocks != len(plan.kept):
        raise ModelLayoutError(
            f"{cut.source} has {cut.num_blocks} blocks; {plan} keeps {len(plan.kept)}.",
            "Say what was removed from it, or leave that out to have it found.",
        )


def plan_of_kept(num_blocks: int, kept: Sequence[int]) -> PrunePlan:
    """The plan that keeps these blocks."""
    return PrunePlan.from_blocks(num_blocks, [block for block in range(num_blocks) if block not in kept], "weights")


def _set(cut: LoadedModel, plan: PrunePlan, weights: dict[str, NewWeight]) -> OperatorSet:
    if cut.operators is not None:  # a folder of save_model: operators of its own at the cuts
        cut.operators.require_plan(plan)
        return replace(cut.operators, name=TUNED, weights=weights)
    return OperatorSet(TUNED, tuple(Operator(b, "none") for b in plan.boundaries), plan, weights=weights)


def _distances(before: dict[str, NewWeight], after: dict[str, NewWeight], dense: int, cut: int) -> Any:
    """``[K, L]`` mean relative distances of the matrices of K blocks to those of L; infinite where shapes differ."""
    rows: dict[int, dict[str, Any]] = {}
    for name, weight in before.items():
        if weight.block is not None and weight.value.ndim > 1:
            rows.setdefault(weight.block, {})[_rest(name, weight)] = weight
    found = np.full((cut, dense), np.inf)
    for position in range(cut):
        own = {_rest(n, w): w for n, w in after.items() if w.block == position and w.value.ndim > 1}
        for block in range(dense):
            pairs = [(w, other) for rest, w in own.items() if (other := rows.get(block, {}).get(rest)) is not None]
            if len(pairs) == len(own) and pairs and all(a.value.shape == b.value.shape for a, b in pairs):
                found[position, block] = np.mean([_apart(a.known, b.known) for a, b in pairs])
    return found


def _rest(name: str, weight: NewWeight) -> str:
    return name.partition(f".{weight.block}.")[2]


def _apart(a: Any, b: Any) -> float:
    size = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
    return float(np.linalg.norm(a - b)) / size if size else 0.0
