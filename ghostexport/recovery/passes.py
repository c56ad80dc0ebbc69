"""The streaming passes of recovery: statistics of all boundaries in one, held-out errors of all operators in one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch

from ghostexport.calibration import CalibrationSet
from ghostexport.models import LoadedModel, read_residuals
from ghostexport.moments import BoundaryMoments, MagnitudeRatios, TokenSample, require_finite
from ghostexport.operators import Operator
from ghostexport.plan import Boundary, PrunePlan
from ghostexport.recipe import Execution
from ghostexport.recovery.hadamard import hadamard

Basis = Literal["identity", "hadamard"]


class BoundaryStatistics:
    """Everything the fits read of one boundary.

    Attributes:
        boundary: the boundary.
        folds: moments by fold of sequences (sequence i is in fold ``i % len(folds)``).
        ratios: magnitude ratios by basis, for the operators that need them.
        sample: tokens kept for mean relative errors.
    """

    def __init__(
        self, boundary: Boundary, channels: int, tokens: int, bases: Iterable[Basis], folds: int, device: torch.device
    ) -> None:
        self.boundary = boundary
        self.folds = [BoundaryMoments(channels, device) for _ in range(folds)]
        self.ratios: dict[str, MagnitudeRatios] = {
            basis: MagnitudeRatios(channels, _basis(basis, channels), device) for basis in bases
        }
        self.sample = TokenSample(tokens)

    @property
    def moments(self) -> BoundaryMoments:
        """Moments of all folds together."""
        return sum(self.folds[1:], start=self.folds[0])

    def add(self, sequences: range, mask: torch.Tensor, x: torch.Tensor, post: torch.Tensor) -> None:
        """Adds the residual values ``(B, T, C)`` before and after the removed run; ``mask`` ``(B, T)`` bool."""
        self.sample.add(x[mask], post[mask])
        count = len(self.folds)
        for fold in range(count):
            rows = [row for row, sequence in enumerate(sequences) if sequence % count == fold]
            if rows:
                chosen = mask[rows]
                self.folds[fold].add(x[rows][chosen], post[rows][chosen])
        for ratios in self.ratios.values():
            for row in range(len(sequences)):
                ratios.add(x[row][mask[row]], post[row][mask[row]])


class _Errors:
    """Sums over held-out tokens for one operator at one boundary."""

    def __init__(self) -> None:
        self.residual = self.delta = self.relative = 0.0
        self.tokens = 0

    def add(self, operator: Operator, x: torch.Tensor, post: torch.Tensor) -> None:
        error = post.double() - apply(operator, x.double())
        self.residual += float(error.square().sum())
        self.delta += float((post.double() - x.double()).square().sum())
        self.relative += float((error.norm(dim=1) / post.double().norm(dim=1)).sum())
        self.tokens += len(x)


def gather(
    loaded: LoadedModel,
    plan: PrunePlan,
    calibration: CalibrationSet,
    bases: Iterable[Basis],
    execution: Execution,
    folds: int = 1,
) -> list[BoundaryStatistics]:
    """One pass of the dense model over the calibration set; statistics of every boundary of the plan.

    Raises:
        CalibrationError: non-finite activations.
    """
    bases = sorted(set(bases))
    statistics = [
        BoundaryStatistics(b, loaded.hidden_size, calibration.num_tokens, bases, folds, loaded.device)
        for b in plan.boundaries
    ]

    def add(index: int, sequences: range, mask: torch.Tensor, x: torch.Tensor, post: torch.Tensor) -> None:
        statistics[index].add(sequences, mask, x, post)

    stream_boundaries(loaded, plan, calibration, add, execution, "recover")
    return statistics


def measure(
    loaded: LoadedModel,
    plan: PrunePlan,
    held_out: CalibrationSet,
    variants: Mapping[str, Sequence[Operator]],
    execution: Execution,
) -> dict[str, list[dict[str, float]]]:
    """One pass of the dense model over the held-out set; errors of every operator of every variant, by boundary."""
    errors = {name: [_Errors() for _ in operators] for name, operators in variants.items()}

    def add(index: int, sequences: range, mask: torch.Tensor, x: torch.Tensor, post: torch.Tensor) -> None:
        for name, operators in variants.items():
            errors[name][index].add(operators[index], x[mask], post[mask])

    stream_boundaries(loaded, plan, held_out, add, execution, "recover: held-out")
    return {
        name: [
            {
                "nmse_held_out": e.residual / e.delta if e.delta else 0.0,
                "relative_error_held_out": e.relative / e.tokens,
            }
            for e in sums
        ]
        for name, sums in errors.items()
    }


def stream_boundaries(
    loaded: LoadedModel,
    plan: PrunePlan,
    calibration: CalibrationSet,
    add: Callable[[int, range, torch.Tensor, torch.Tensor, torch.Tensor], None],
    execution: Execution,
    task: str,
) -> None:
    """Runs the model and calls ``add(boundary index, sequences, mask, x_start, x_stop)`` for each batch and boundary.

    The forward pass ends at the last boundary's stop; one residual value is held at a time.
    """
    starts = {b.span.start: b.index for b in plan.boundaries}
    stops = {b.span.stop: b.index for b in plan.boundaries}
    before: list[torch.Tensor] = []
    for batch in calibration.batches(loaded.device):

        def visit(point: int, x: torch.Tensor, batch=batch) -> None:  # type: ignore[no-untyped-def]
            require_finite(x[batch.mask], point)
            if point in starts:
                before[:] = [x]
            else:
                add(stops[point], batch.sequences, batch.mask, before[0], x)

        read_residuals(loaded.model, [*starts, *stops], visit, batch.input_ids, batch.attention_mask)
        execution.progress(task, batch.sequences.stop, len(calibration))


def apply(operator: Operator, x: torch.Tensor) -> torch.Tensor:
    """``x + x M (+ b)`` for ``x`` ``[n, C]`` in its own dtype."""
    y = x
    if operator.diagonal is not None:
        y = x + x * torch.as_tensor(operator.diagonal).to(x)
    elif operator.factors is not None:
        u, v = (torch.as_tensor(factor).to(x) for factor in operator.factors)
        y = x + (x @ u) @ v
    elif operator.delta is not None:
        y = x + x @ torch.as_tensor(operator.delta).to(x)
    return y if operator.bias is None else y + torch.as_tensor(operator.bias).to(x)


def _basis(name: Basis, channels: int) -> torch.Tensor | None:
    return torch.from_numpy(hadamard(channels)).float() if name == "hadamard" else None
