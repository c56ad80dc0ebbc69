"""How near a repaired model's residual stream stays to the dense model's, on held-out text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ghostexport.calibration import CalibrationSet
from ghostexport.models import LoadedModel, patch, read_residuals
from ghostexport.models.blocks import find_blocks, hidden_states, output_states
from ghostexport.operators import OperatorSet
from ghostexport.recipe import Execution


def measure_refit(
    loaded: LoadedModel, operators: OperatorSet, held_out: CalibrationSet, execution: Execution
) -> list[dict[str, float]]:
    """Runs both models over the held-out set.

    Returns:
        Per boundary: ``nmse_held_out`` and ``relative_error_held_out`` behind the operator, and
        ``relative_error_final_held_out`` of the last residual value, ``mean_t ||x^_L - x_L|| / ||x_L||``.
    """
    plan = operators.plan
    repaired = patch(loaded, plan, operators).model
    stops = {b.span.stop: b.position for b in plan.boundaries}
    starts = [b.span.start for b in plan.boundaries]
    end, kept = plan.num_blocks, len(plan.kept)
    sums = [[0.0, 0.0, 0.0, 0.0] for _ in plan.boundaries]
    tokens = 0
    for batch in held_out.batches(loaded.device):
        dense: dict[int, torch.Tensor] = {}

        def visit(point: int, x: torch.Tensor, dense: dict[int, torch.Tensor] = dense, mask: Any = batch.mask) -> None:
            dense[point] = x[mask].double()

        read_residuals(loaded.model, [*starts, *stops, end], visit, batch.input_ids, batch.attention_mask)
        got = _after_operators(repaired, {*stops.values(), kept}, batch.input_ids, batch.attention_mask)
        final = _relative(got[kept][batch.mask].double(), dense[end])
        for boundary, total in zip(plan.boundaries, sums, strict=True):
            x, post = got[boundary.position][batch.mask].double(), dense[boundary.span.stop]
            total[0] += float((x - post).square().sum())
            total[1] += float((post - dense[boundary.span.start]).square().sum())
            total[2] += _relative(x, post)
            total[3] += final
        tokens += int(batch.mask.sum())
        execution.progress("refit: held-out", batch.sequences.stop, len(held_out))
    return [_figures(total, tokens) for total in sums]


def _figures(total: Sequence[float], tokens: int) -> dict[str, float]:
    residual, delta, relative, final = total
    return {
        "nmse_held_out": residual / delta if delta else 0.0,
        "relative_error_held_out": relative / tokens,
        "relative_error_final_held_out": final / tokens,
    }


def _relative(x: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((x - wanted).norm(dim=1) / wanted.norm(dim=1)).sum())


def _after_operators(
    model: Any, points: Iterable[int], input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> dict[int, torch.Tensor]:
    """Residual values ``(B, T, C)`` at positions of a patched model, behind the operators inserted there."""
    blocks = find_blocks(model)
    values: dict[int, torch.Tensor] = {}

    def before(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            values[index] = hidden_states(args, kwargs)

        return hook

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        values[len(blocks)] = output_states(output)

    handles = [blocks[i].register_forward_pre_hook(before(i), with_kwargs=True) for i in points if i < len(blocks)]
    handles.append(blocks[-1].register_forward_hook(after))
    try:
        with torch.no_grad():
            model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return values
