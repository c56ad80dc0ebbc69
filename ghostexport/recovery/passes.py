"""The streaming passes of recovery: statistics of all boundaries in one, held-out errors of all operators in one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, read_residuals
from ghostexport.moments import BoundaryMoments, MagnitudeRatios, TokenSample, require_finite, token_weights
from ghostexport.operators import Operator, WeightFold
from ghostexport.plan import Boundary, PrunePlan
from ghostexport.recovery.hadamard import hadamard
from ghostexport.recovery.judging import judges
from ghostexport.recovery.last_block import LastBlock, tapped
from ghostexport.recovery.ranks import add_up, shared_out

Basis = Literal["identity", "hadamard"]

#: Statistics beyond the plain moments: ``weighted`` = token-weighted moments of the stream, ``last-block`` = the same
#: of ``[x_mid, h]`` inside the last kept block, ``mlp-output`` = plain moments of that block's MLP output.
Need = Literal["weighted", "last-block", "mlp-output"]

#: Needs that look inside the last kept block.
INSIDE = frozenset({"last-block", "mlp-output"})

#: Tokens whose inside of the last block is kept for mean relative errors (each C + I numbers).
LAST_BLOCK_SAMPLE = 1024


class BoundaryStatistics:
    """Everything the fits read of one boundary.

    Attributes:
        boundary: the boundary.
        folds: moments by fold of sequences (sequence i is in fold ``i % len(folds)``).
        weighted_folds: the same with :func:`token_weights`; empty unless needed.
        last_block_folds: token-weighted moments of the change on ``[x_mid, h]``, of fitting and of judging sequences
            (:mod:`ghostexport.recovery.judging`); empty unless needed.
        mlp_folds: moments of the change on the MLP output ``m = x_s - x_mid``; empty unless needed.
        last_block_weight, last_block_bias: ``V0`` ``[I, C]`` and its bias in the last kept block; None unless needed.
        ratios: magnitude ratios by basis, for the operators that need them.
        sample: tokens kept for mean relative errors.
        last_block_sample: tokens kept with their ``[x_mid, h]``, for the operators that need it.
    """

    def __init__(
        self,
        boundary: Boundary,
        channels: int,
        tokens: int,
        bases: Iterable[Basis],
        folds: int,
        device: torch.device,
        needs: Iterable[Need] = (),
    ) -> None:
        self.boundary = boundary
        self.needs = frozenset(needs)
        self.folds = [BoundaryMoments(channels, device) for _ in range(folds)]
        self.weighted_folds = [
            BoundaryMoments(channels, device) for _ in range(folds if "weighted" in self.needs else 0)
        ]
        self.last_block_folds: list[BoundaryMoments] = []
        self.mlp_folds = [BoundaryMoments(channels, device) for _ in range(folds if "mlp-output" in self.needs else 0)]
        self.last_block_weight: torch.Tensor | None = None
        self.last_block_bias: torch.Tensor | None = None
        self.last_block_sample = TokenSample(tokens, LAST_BLOCK_SAMPLE)
        self.ratios: dict[str, MagnitudeRatios] = {
            basis: MagnitudeRatios(channels, _basis(basis, channels), device) for basis in bases
        }
        self.sample = TokenSample(tokens)

    @property
    def moments(self) -> BoundaryMoments:
        """Moments of all folds together."""
        return sum(self.folds[1:], start=self.folds[0])

    def add(
        self, sequences: range, mask: torch.Tensor, x: torch.Tensor, post: torch.Tensor, last: LastBlock | None = None
    ) -> None:
        """Adds the residual values ``(B, T, C)`` before and after the removed run; ``mask`` ``(B, T)`` bool."""
        self.sample.add(x[mask], post[mask])
        if last is not None:
            self._require_last_block(last)
            self.last_block_sample.add(x[mask], post[mask], last[mask].regressors)
        count = len(self.folds)
        for fold in range(count):
            rows = [row for row, sequence in enumerate(sequences) if sequence % count == fold]
            if rows:
                self._add_fold(fold, mask[rows], x[rows], post[rows], None if last is None else last[rows])
        if last is not None and "last-block" in self.needs:
            self._add_last_block(sequences, mask, post.double() - x.double(), post, last)
        for ratios in self.ratios.values():
            for row in range(len(sequences)):
                ratios.add(x[row][mask[row]], post[row][mask[row]])

    def _add_fold(
        self, fold: int, mask: torch.Tensor, x: torch.Tensor, post: torch.Tensor, last: LastBlock | None
    ) -> None:
        before, after = x[mask], post[mask]
        self.folds[fold].add(before, after)
        if "weighted" in self.needs:
            self.weighted_folds[fold].add(before, after, token_weights(after))
        if last is not None and "mlp-output" in self.needs:
            change = after.double() - before.double()
            self.mlp_folds[fold].add_change(before.double() - last.mid[mask].double(), change)

    def _add_last_block(
        self, sequences: range, mask: torch.Tensor, change: torch.Tensor, post: torch.Tensor, last: LastBlock
    ) -> None:
        for fold in range(2):
            rows = [row for row, sequence in enumerate(sequences) if judges(sequence) == bool(fold)]
            if rows:
                chosen = mask[rows]
                weights = token_weights(post[rows][chosen])
                self.last_block_folds[fold].add_change(last[rows][chosen].regressors, change[rows][chosen], weights)

    def _require_last_block(self, last: LastBlock) -> None:
        if self.last_block_weight is None:
            self.last_block_weight, self.last_block_bias = last.weight, last.bias
            if "last-block" in self.needs:
                rows = last.mid.shape[-1] + last.inner.shape[-1]
                one = self.folds[0]
                self.last_block_folds = [BoundaryMoments(one.channels, one.gram.device, rows) for _ in range(2)]


@dataclass(frozen=True)
class Request:
    """What a pass gathers at every boundary besides the plain moments.

    Attributes:
        bases: of the magnitude ratios.
        needs: other statistics.
        folds: number of folds of sequences.
    """

    bases: frozenset[Basis] = frozenset()
    needs: frozenset[Need] = frozenset()
    folds: int = 1

    @property
    def inside(self) -> bool:
        """Whether the pass looks inside the last kept block."""
        return bool(self.needs & INSIDE)

    def empty(
        self, loaded: LoadedModel, boundaries: Sequence[Boundary], calibration: CalibrationSet
    ) -> list[BoundaryStatistics]:
        """Statistics of no token yet, one per boundary."""
        shape = (loaded.hidden_size, calibration.num_tokens, sorted(self.bases), self.folds, loaded.device, self.needs)
        return [BoundaryStatistics(boundary, *shape) for boundary in boundaries]


class BoundaryErrors:
    """Sums over held-out tokens for one operator at one boundary."""

    def __init__(self) -> None:
        self.residual = self.delta = self.relative = self.relative_change = 0.0
        self.largest_x = self.largest_change = self.largest_y = 0.0
        self.tokens = 0

    def add(self, operator: Operator, x: torch.Tensor, post: torch.Tensor, last: LastBlock | None) -> None:
        self.add_values(x, apply(operator, x.double(), last), post, x)

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


def gather(
    loaded: LoadedModel,
    boundaries: Sequence[Boundary],
    calibration: CalibrationSet,
    request: Request,
    execution: Execution,
) -> list[BoundaryStatistics]:
    """One pass of the dense model over the calibration set; statistics of every boundary.

    In a distributed process group every rank reads its share of the batches, and all get the statistics of all.

    Raises:
        CalibrationError: non-finite activations.
        RecoveryError: the last kept block is needed and is not a plain sum of stream, attention and MLP.
    """
    statistics = request.empty(loaded, boundaries, calibration)
    batches, add = shared_out(calibration.batches(loaded.device)), into(statistics)
    stream_boundaries(loaded, boundaries, batches, len(calibration), add, execution, "recover", request.inside)
    for gathered in statistics:
        moments = (*gathered.folds, *gathered.weighted_folds, *gathered.last_block_folds, *gathered.mlp_folds)
        add_up([*moments, *gathered.ratios.values()], [gathered.sample, gathered.last_block_sample])
    return statistics


def measure(
    loaded: LoadedModel,
    plan: PrunePlan,
    held_out: CalibrationSet,
    variants: Mapping[str, Sequence[Operator]],
    execution: Execution,
) -> dict[str, list[dict[str, float]]]:
    """One pass of the dense model over the held-out set; errors of every operator of every variant, by boundary."""
    errors = {name: [BoundaryErrors() for _ in operators] for name, operators in variants.items()}
    inside = any(reaches_inside(operator) for operators in variants.values() for operator in operators)

    def add(
        index: int, sequences: range, mask: torch.Tensor, x: torch.Tensor, post: torch.Tensor, last: LastBlock | None
    ) -> None:
        for name, operators in variants.items():
            errors[name][index].add(operators[index], x[mask], post[mask], None if last is None else last[mask])

    batches = held_out.batches(loaded.device)
    stream_boundaries(loaded, plan.boundaries, batches, len(held_out), add, execution, "recover: held-out", inside)
    return {name: [e.figures() for e in sums] for name, sums in errors.items()}


#: ``add(boundary index, sequences, mask, x_start, x_stop, last block)``
Add = Callable[[int, range, torch.Tensor, torch.Tensor, torch.Tensor, LastBlock | None], None]


def into(statistics: Sequence[BoundaryStatistics]) -> Add:
    """Adds what crosses a boundary to its statistics."""

    def add(
        index: int, sequences: range, mask: torch.Tensor, x: torch.Tensor, post: torch.Tensor, last: LastBlock | None
    ) -> None:
        statistics[index].add(sequences, mask, x, post, last)

    return add


class BoundaryWatch:
    """Looks on while residual values go by in depth order, and calls ``add`` at the end of every boundary's span.

    Attributes:
        points: the residual values it needs; one is held at a time.
    """

    def __init__(self, boundaries: Sequence[Boundary], add: Add, last: Mapping[int, LastBlock] | None = None) -> None:
        self._starts = {b.span.start for b in boundaries}
        self._stops = {b.span.stop: b for b in boundaries}
        self.points = self._starts | set(self._stops)
        self._add, self._last = add, {} if last is None else last
        self._before: torch.Tensor | None = None

    def __call__(self, batch: Batch, point: int, x: torch.Tensor) -> None:
        if point not in self.points:
            return
        require_finite(x[batch.mask], point)
        if point in self._stops:
            boundary = self._stops[point]
            assert self._before is not None
            inner = self._last.get(boundary.span.start - 1)
            self._add(boundary.index, batch.sequences, batch.mask, self._before, x, inner)
        if point in self._starts:
            self._before = x


def stream_boundaries(
    loaded: LoadedModel,
    boundaries: Sequence[Boundary],
    batches: Iterable[Batch],
    sequences: int,
    add: Add,
    execution: Execution,
    task: str,
    inside: bool = False,
) -> None:
    """Runs the model and calls ``add`` at every boundary for each batch.

    The forward pass ends at the last boundary's stop; one residual value is held at a time. ``inside`` asks for the
    inside of the last kept block before each boundary, which is None otherwise. ``sequences`` counts progress.
    """
    blocks = [b.span.start - 1 for b in boundaries] if inside else []
    with tapped(loaded, blocks, "This operator") as last:
        watch = BoundaryWatch(boundaries, add, last)
        for batch in batches:
            visit = partial(watch, batch)
            read_residuals(loaded.model, watch.points, visit, batch.input_ids, batch.attention_mask)
            execution.progress(task, batch.sequences.stop, sequences)


def apply(operator: Operator, x: torch.Tensor, last: LastBlock | None = None) -> torch.Tensor:
    """What an operator makes of ``x`` ``[n, C]``, in its own dtype: ``x + x M (+ b)``, or with the last block's inside.

    A new down-projection ``V`` of the last kept block adds ``h (V - V0)``; at site ``mid`` the map reads ``x_mid``.
    """
    y = x
    for fold in _last_folds(operator):
        assert last is not None
        y = y + last.inner.to(x) @ (torch.as_tensor(fold.weight).to(x) - last.weight.to(x))
        if fold.bias is not None:
            y = y + torch.as_tensor(fold.bias).to(x) - (0 if last.bias is None else last.bias.to(x))
    if operator.scale is not None:
        return x * operator.scale
    if operator.network is not None:
        W1, b1, W2, b2 = (torch.as_tensor(array).to(x) for array in operator.network)
        return torch.relu(x @ W1 + b1) @ W2 + b2
    source = y
    if operator.site == "mid":
        assert last is not None
        source = last.mid.to(x)
    if operator.diagonal is not None:
        y = y + source * torch.as_tensor(operator.diagonal).to(x)
    elif operator.factors is not None:
        u, v = (torch.as_tensor(factor).to(x) for factor in operator.factors)
        y = y + (source @ u) @ v
    elif operator.delta is not None:
        y = y + source @ torch.as_tensor(operator.delta).to(x)
    return y if operator.bias is None else y + torch.as_tensor(operator.bias).to(x)


def reaches_inside(operator: Operator) -> bool:
    """Whether the operator's effect at its boundary depends on the inside of the last kept block."""
    return operator.site == "mid" or bool(_last_folds(operator))


def _last_folds(operator: Operator) -> list[WeightFold]:
    last = operator.boundary.span.start - 1
    return [fold for fold in operator.folds if fold.block == last and fold.role == "mlp_output"]


def _basis(name: Basis, channels: int) -> torch.Tensor | None:
    return torch.from_numpy(hadamard(channels)).float() if name == "hadamard" else None
