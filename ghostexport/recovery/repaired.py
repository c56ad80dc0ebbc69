"""How near a repaired model's residual stream stays to the dense model's, on held-out text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ghostexport.calibration import CalibrationSet
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, patch, read_residuals
from ghostexport.models.blocks import find_blocks, hidden_states, output_states
from ghostexport.operators import OperatorSet
from ghostexport.recovery.passes import BoundaryErrors


def measure_refit(
    loaded: LoadedModel, operators: OperatorSet, held_out: CalibrationSet, execution: Execution
) -> list[dict[str, float]]:
    """Runs both models over the held-out set.

    Returns:
        Per boundary the figures of :class:`BoundaryErrors`, the change being the dense model's, and
        ``relative_error_final_held_out`` of the last residual value, ``mean_t ||x^_L - x_L|| / ||x_L||``.
    """
    plan = operators.plan
    repaired = patch(loaded, plan, operators).model
    stops = [b.span.stop for b in plan.boundaries]
    starts = [b.span.start for b in plan.boundaries]
    positions = [b.position for b in plan.boundaries]
    end, kept = plan.num_blocks, len(plan.kept)
    errors = [BoundaryErrors() for _ in plan.boundaries]
    final = 0.0
    for batch in held_out.batches(loaded.device):
        dense: dict[int, torch.Tensor] = {}

        def visit(point: int, x: torch.Tensor, dense: dict[int, torch.Tensor] = dense, mask: Any = batch.mask) -> None:
            dense[point] = x[mask].double()

        read_residuals(loaded.model, [*starts, *stops, end], visit, batch.input_ids, batch.attention_mask)
        before, after = _around_operators(repaired, {*positions, kept}, batch.input_ids, batch.attention_mask)
        for boundary, sums in zip(plan.boundaries, errors, strict=True):
            x, y = (values[boundary.position][batch.mask] for values in (before, after))
            sums.add_values(x, y, dense[boundary.span.stop], dense[boundary.span.start])
        wanted = dense[end]
        final += float(((after[kept][batch.mask].double() - wanted).norm(dim=1) / wanted.norm(dim=1)).sum())
        execution.progress("refit: held-out", batch.sequences.stop, len(held_out))
    return [e.figures() | {"relative_error_final_held_out": final / e.tokens} for e in errors]


def _around_operators(
    model: Any, points: Iterable[int], input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Residual values ``(B, T, C)`` at positions of a patched model, before and behind the operators there."""
    blocks = find_blocks(model)
    before: dict[int, torch.Tensor] = {}
    after: dict[int, torch.Tensor] = {}

    def entering(values: dict[int, torch.Tensor], index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            values[index] = hidden_states(args, kwargs)

        return hook

    def leaving(values: dict[int, torch.Tensor], index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            values[index] = output_states(output)

        return hook

    handles = []
    for i in points:  # an operator is a hook too: prepended ones come before it, others after it
        if i:
            handles.append(blocks[i - 1].register_forward_hook(leaving(before, i), prepend=True))
        else:
            handles.append(blocks[0].register_forward_pre_hook(entering(before, 0), with_kwargs=True, prepend=True))
        if i < len(blocks):
            handles.append(blocks[i].register_forward_pre_hook(entering(after, i), with_kwargs=True))
        else:
            handles.append(blocks[-1].register_forward_hook(leaving(after, i)))
    try:
        with torch.no_grad():
            model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return before, after
