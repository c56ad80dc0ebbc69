"""One pass of the dense model, and what it gathers at every boundary: moments, magnitude ratios, a sample of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.distributed import add_up, shared_out
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, Shelf, read_streams
from ghostexport.moments import BoundaryMoments, MagnitudeRatios, TokenSample, require_finite, token_weights
from ghostexport.plan import Boundary
from ghostexport.recovery.fits.hadamard import hadamard
from ghostexport.recovery.last_block import LastBlock, tapped
from ghostexport.recovery.refit.judging import judges
from ghostexport.recovery.registry import INSIDE, Basis, Kind, Need

#: Tokens whose inside of the last block is kept for mean relative errors (each C + I numbers).
LAST_BLOCK_SAMPLE = 1024


class Gathered:
    """Everything the fits read of one boundary.

    Attributes:
        boundary: the boundary.
        folds: moments by fold of sequences (sequence i is in fold ``i % len(folds)``).
        weighted_folds: the same with :func:`token_weights`; empty unless needed.
        last_block_folds: token-weighted moments of the change on ``[x_mid, h]``, of fitting and of judging sequences
            (:mod:`ghostexport.recovery.refit.judging`); empty unless needed.
        mlp_folds: moments of the change on the MLP output ``m = x_s - x_mid``; empty unless needed.
        last_block_weight, last_block_bias, last_block_multiplier: ``V0`` ``[I, C]`` in the last kept block, its bias,
            and what their result is multiplied by; None unless needed.
        ratios: magnitude ratios by basis, for the operators that need them.
        sample: tokens kept for mean relative errors.
        last_block_sample: tokens kept with their ``[x_mid, h]``, for the operators that need it.
    """

    def __init__(self, boundary: Boundary, request: Request, channels: int, tokens: int, device: torch.device) -> None:
        def folds(wanted: bool = True) -> list[BoundaryMoments]:
            return [BoundaryMoments(channels, device) for _ in range(request.folds if wanted else 0)]

        self.boundary, self.needs = boundary, request.needs
        self.folds = folds()
        self.weighted_folds = folds("weighted" in request.needs)
        self.mlp_folds = folds("mlp-output" in request.needs)
        self.last_block_folds: list[BoundaryMoments] = []
        self.last_block_weight: torch.Tensor | None = None
        self.last_block_bias: torch.Tensor | None = None
        self.last_block_multiplier = 1.0
        self.last_block_sample = TokenSample(tokens, LAST_BLOCK_SAMPLE)
        self.ratios: dict[str, MagnitudeRatios] = {
            basis: MagnitudeRatios(channels, _basis(basis, channels), device) for basis in sorted(request.bases)
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
            self.last_block_multiplier = last.multiplier
            if "last-block" in self.needs:
                rows = last.mid.shape[-1] + last.inner.shape[-1]
                one = self.folds[0]
                self.last_block_folds = [BoundaryMoments(one.channels, one.gram.device, rows) for _ in range(2)]


@dataclass(frozen=True)
class Request:
    """What a pass gathers at every boundary besides the plain moments.

    Attributes:
        bases: of the magnitude ratios.
        needs: what else is read.
        folds: number of folds of sequences.
    """

    bases: frozenset[Basis] = frozenset()
    needs: frozenset[Need] = frozenset()
    folds: int = 1

    @property
    def inside(self) -> bool:
        """Whether the pass looks inside the last kept block."""
        return bool(self.needs & INSIDE)

    @classmethod
    def of(cls, kinds: Iterable[Kind], folds: int = 1) -> Request:
        """What some kinds of operators read, all together."""
        kinds = list(kinds)
        bases = frozenset(basis for kind in kinds for basis in kind.bases)
        return cls(bases, frozenset(need for kind in kinds for need in kind.needs), folds)

    def empty(self, loaded: LoadedModel, boundaries: Sequence[Boundary], calibration: CalibrationSet) -> list[Gathered]:
        """What is gathered of no token yet, one per boundary."""
        shape = (loaded.hidden_size, calibration.num_tokens, loaded.device)
        return [Gathered(boundary, self, *shape) for boundary in boundaries]


def gather(
    loaded: LoadedModel,
    boundaries: Sequence[Boundary],
    calibration: CalibrationSet,
    request: Request,
    execution: Execution,
) -> list[Gathered]:
    """One pass of the dense model over the calibration set; what is gathered at every boundary.

    In a distributed process group every process reads its share of the batches, and all get the sums of all.

    Raises:
        CalibrationError: non-finite activations.
        RecoveryError: the last kept block is needed and is not a plain sum of stream, attention and MLP.
    """
    found = request.empty(loaded, boundaries, calibration)
    batches, add = shared_out(calibration.batches(loaded.device)), into(found)
    stream_boundaries(loaded, boundaries, batches, len(calibration), add, execution, "recover", request.inside)
    for gathered in found:
        moments = (*gathered.folds, *gathered.weighted_folds, *gathered.last_block_folds, *gathered.mlp_folds)
        add_up([*moments, *gathered.ratios.values()], [gathered.sample, gathered.last_block_sample])
    return found


#: ``add(boundary index, sequences, mask, x_start, x_stop, last block)``
Add = Callable[[int, range, torch.Tensor, torch.Tensor, torch.Tensor, LastBlock | None], None]


def into(found: Sequence[Gathered]) -> Add:
    """Adds what crosses a boundary to what is gathered there."""

    def add(
        index: int, sequences: range, mask: torch.Tensor, x: torch.Tensor, post: torch.Tensor, last: LastBlock | None
    ) -> None:
        found[index].add(sequences, mask, x, post, last)

    return add


class BoundaryWatch:
    """Looks on while residual values go by in depth order, and calls ``add`` at the end of every boundary's span.

    Attributes:
        points: the residual values it needs; one of each batch is held at a time.
    """

    def __init__(self, boundaries: Sequence[Boundary], add: Add, last: Mapping[int, LastBlock] | None = None) -> None:
        self._starts = {b.span.start for b in boundaries}
        self._stops = {b.span.stop: b for b in boundaries}
        self.points = self._starts | set(self._stops)
        self._add, self._last = add, {} if last is None else last
        self._shelf = Shelf()

    def __call__(self, batch: Batch, point: int, x: torch.Tensor) -> None:
        if point not in self.points:
            return
        require_finite(x[batch.mask], point)
        first = batch.sequences.start
        if boundary := self._stops.get(point):
            before, last = self._shelf.take((first, "x")), self._last.get(boundary.span.start - 1)
            last = None if last is None else last.taken(self._shelf, first)
            self._add(boundary.index, batch.sequences, batch.mask, before, x, last)
        if point in self._starts:
            self._shelf.put((first, "x"), x)
            if (last := self._last.get(point - 1)) is not None:
                last.put(self._shelf, first)


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

    The pass ends at the last boundary's stop; one residual value of a batch is held at a time. ``inside`` asks for the
    inside of the last kept block before each boundary, which is None otherwise and where nothing is kept.
    ``sequences`` counts progress.
    """
    blocks = [b.span.start - 1 for b in boundaries if b.span.start] if inside else []
    with tapped(loaded, blocks, "This operator") as last:
        watch = BoundaryWatch(boundaries, add, last)
        read_streams(loaded, batches, watch.points, watch, execution, task, sequences)


def _basis(name: Basis, channels: int) -> torch.Tensor | None:
    return torch.from_numpy(hadamard(channels)).float() if name == "hadamard" else None
