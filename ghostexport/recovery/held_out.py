"""How near an operator, and a repaired model, brings the residual stream to the dense model's: figures of the fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, Shelf, patch, read_streams
from ghostexport.models.variants import around_operator
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recovery.gathering import Gathered, stream_boundaries
from ghostexport.recovery.last_block import LastBlock


class BoundaryErrors:
    """Sums over held-out tokens for one operator at one boundary."""

    def __init__(self) -> None:
        self.residual = self.delta = self.relative = self.relative_change = 0.0
        self.largest_x = self.largest_change = self.largest_y = 0.0
        self.tokens = 0

    def add(self, operator: Operator, x: torch.Tensor, post: torch.Tensor, last: LastBlock | None) -> None:
        self.add_values(x, operator.apply(x.double(), last), post, x)

    def add_values(self, x: torch.Tensor, y: torch.Tensor, post: torch.Tensor, start: torch.Tensor) -> None:
        """Adds tokens ``[n, C]``: before and after the operator, and the dense model's after and before the run."""
        x, y, post, start = x.double(), y.double(), post.double(), start.double()
        error, delta, magnitude = post - y, post - start, post.norm(dim=1)
        self.largest_x = max(self.largest_x, float(x.abs().max()))
        self.largest_change = max(self.largest_change, float((y - x).abs().max()))
        self.largest_y = max(self.largest_y, float(y.abs().max()))
        self.residual += float(error.square().sum())
        self.delta += float(delta.square().sum())
        self.relative += float((error.norm(dim=1) / magnitude).sum())
        self.relative_change += float((delta.norm(dim=1) / magnitude).sum())
        self.tokens += len(x)

    def figures(self) -> dict[str, float]:
        return {
            "nmse_held_out": self.residual / self.delta if self.delta else 0.0,
            "relative_error_held_out": self.relative / self.tokens,
            "relative_change_held_out": self.relative_change / self.tokens,
            "largest_x": self.largest_x,
            "largest_change": self.largest_change,
            "largest_y": self.largest_y,
        }


def measure(
    loaded: LoadedModel,
    plan: PrunePlan,
    held_out: CalibrationSet,
    variants: Mapping[str, Sequence[Operator]],
    execution: Execution,
) -> dict[str, list[dict[str, float]]]:
    """One pass of the dense model over the held-out set; errors of every operator of every variant, by boundary."""
    errors = {name: [BoundaryErrors() for _ in operators] for name, operators in variants.items()}
    inside = any(operator.reaches_inside for operators in variants.values() for operator in operators)

    def add(
        index: int, sequences: range, mask: torch.Tensor, x: torch.Tensor, post: torch.Tensor, last: LastBlock | None
    ) -> None:
        for name, operators in variants.items():
            errors[name][index].add(operators[index], x[mask], post[mask], None if last is None else last[mask])

    batches = held_out.batches(loaded.device)
    stream_boundaries(loaded, plan.boundaries, batches, len(held_out), add, execution, "recover: held-out", inside)
    return {name: [e.figures() for e in sums] for name, sums in errors.items()}


def measure_refit(
    loaded: LoadedModel, operators: OperatorSet, held_out: CalibrationSet, execution: Execution
) -> list[dict[str, float]]:
    """Runs both models over the held-out set.

    Returns:
        Per boundary the figures of :class:`BoundaryErrors`, the change being the dense model's, and
        ``relative_error_final_held_out`` of the last residual value, ``mean_t ||x^_L - x_L|| / ||x_L||``.
    """
    plan = operators.plan
    repaired, shelf, final = patch(loaded, plan, operators), Shelf(), [0.0]
    errors = {b.position: (b, BoundaryErrors()) for b in plan.boundaries}
    end, kept = plan.num_blocks, len(plan.kept)

    def keep(batch: Batch, point: int, x: torch.Tensor) -> None:
        shelf.put((batch.sequences.start, point), x[batch.mask])

    def compare(batch: Batch, position: int, x: torch.Tensor) -> None:
        before, after = (value[batch.mask] for value in around_operator(repaired.blocks, position, x))
        if position in errors:
            boundary, sums = errors[position]
            post, start = (shelf.look((batch.sequences.start, p)) for p in (boundary.span.stop, boundary.span.start))
            sums.add_values(before, after, post, start)
        if position == kept:
            wanted = shelf.look((batch.sequences.start, end)).double()
            final[0] += float(((after.double() - wanted).norm(dim=1) / wanted.norm(dim=1)).sum())

    spans = [b.span for b in plan.boundaries]
    points = {*(span.start for span in spans), *(span.stop for span in spans), end}
    for model, wanted, visit in ((loaded, points, keep), (repaired, {*errors, kept}, compare)):
        read_streams(model, held_out.batches(loaded.device), wanted, visit, execution, "refit: held-out", len(held_out))
    return [e.figures() | {"relative_error_final_held_out": final[0] / e.tokens} for _, e in errors.values()]


def figures(operator: Operator, gathered: Gathered) -> dict[str, Any]:
    """Calibration figures of one operator; those that reach inside the last block are measured on its token sample."""
    M = None if operator.matrix is None else torch.as_tensor(operator.matrix).double()
    if operator.scale is not None:
        M = (operator.scale - 1) * torch.eye(gathered.moments.channels).double()
    b = None if operator.bias is None else torch.as_tensor(operator.bias).double()
    inside = operator.reaches_inside
    sample = gathered.last_block_sample if inside else gathered.sample
    pre, post = sample.pre.double(), sample.post.double()
    last = None
    if inside:
        assert gathered.last_block_weight is not None
        mid, inner = sample.column(2).split([pre.shape[1], len(gathered.last_block_weight)], dim=1)
        bias, multiplier = gathered.last_block_bias, gathered.last_block_multiplier
        weight = gathered.last_block_weight.cpu()
        last = LastBlock(mid, inner / multiplier, weight, None if bias is None else bias.cpu(), multiplier)
    error = post - operator.apply(pre, last)
    measured = float(error.square().sum() / (post - pre).square().sum().clamp_min(torch.finfo(pre.dtype).tiny))
    return {
        "tokens": gathered.moments.tokens,
        "nmse_calibration": measured if inside else gathered.moments.nmse(M, b),
        "relative_error_calibration": float((error.norm(dim=1) / post.norm(dim=1)).mean()),
        "antisymmetric_share": antisymmetric_share(M),
    }


def antisymmetric_share(M: torch.Tensor | None) -> float:
    """``||(M - M')/2||_F / ||M||_F``: 0 for a symmetric matrix, 0.707 for a random one."""
    if M is None or not bool(M.any()):
        return 0.0
    return float(((M - M.T) / 2).norm() / M.norm())


#: From this NMSE on an operator misses the tokens that make up the change, whatever its error on the others.
LOST = 0.9


def say_lost_tokens(name: str, operators: Sequence[Operator], execution: Execution) -> None:
    """Tells where an operator, good on most tokens, gets the few massive ones wrong that make up the squared change."""
    for operator in operators:
        nmse, relative, change = (
            operator.fit.get(f"{figure}_held_out", 0.0) for figure in ("nmse", "relative_error", "relative_change")
        )
        alike = (relative / change) ** 2 if change else 1.0  # about the NMSE if all tokens were alike
        if operator.kind != "none" and nmse > LOST and alike < nmse / 2:
            execution.say(
                f"{name}: behind the removed run {operator.boundary.span} this repair gets a few massive tokens wrong "
                f"(NMSE {nmse:.2f}; mean relative error {relative:.2f}, without repair {change:.2f}). "
                "Look at its perplexity: ghostexport eval RUN"
            )
