"""How far a weight may move: fitted on most sequences, judged on the others, toward the old weight.

::

    D = (G + ridge m I)^-1 B        m = median of diag(G)       the change of the weight

Weights inside a block have more inputs than the stream has channels, and their activations are nearly collinear: least
squares would follow the calibration text. Every fourth sequence judges. The ridge is the one of :data:`RIDGES` whose
fit on the others errs least there, and the old weight stays when none errs less than it; the winner is solved again on
all sequences.

A refit asks besides what the judging sequences' predictions make of the change, for a nearer stream is not always a
better model: the error is a mean over channels, of which the rest of the model reads some more than others::

    divergence = mean over positions of KL(p || q)      p: dense model; q: dense model going on from the repaired stream
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.errors import RecoveryError
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel
from ghostexport.models.calls import Call, block_calls, finish, go_on
from ghostexport.models.walking import walk_to_the_end
from ghostexport.moments import BoundaryMoments
from ghostexport.recovery.fits.solving import median_diagonal, solve_ridge

#: Relative to the median diagonal of the Gram matrix.
RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2)

#: Every JUDGES-th sequence judges.
JUDGES = 4

#: Judging sequences that are looked at, at most, and every which of their positions: enough to tell a change of half a
#: percent of perplexity, and few enough to cost less than the refit itself.
SEQUENCES = 8
STRIDE = 4

#: From a batch and the calls of its blocks to a residual value ``(B, T, C)``.
Stream = Callable[[Batch, list[Call]], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Choice:
    """A judged change of a weight.

    Attributes:
        change: ``[R, C]``; None to keep the old weight.
        fitted: the same without the judging sequences, for a fair look at them.
        ridge: the relative ridge chosen; None when kept.
        error: the judges' weighted squared error over that of the old weight, of the best candidate.
    """

    change: torch.Tensor | None
    fitted: torch.Tensor | None
    ridge: float | None
    error: float


def judges(sequence: int) -> bool:
    """Whether a calibration sequence judges."""
    return sequence % JUDGES == JUDGES - 1


def choose_change(fitting: BoundaryMoments, judging: BoundaryMoments) -> Choice:
    """The ridge solution that the judging sequences like best, on all tokens; or none.

    Raises:
        RecoveryError: fewer than four calibration sequences, so that none judges; or a singular solve.
    """
    if not judging.tokens:
        raise RecoveryError(
            f"This operator needs at least {JUDGES} calibration sequences, one of which judges.",
            "Use more --sequences.",
        )
    if not judging.square_delta:
        return Choice(None, None, None, 1.0)
    scale = median_diagonal(fitting)
    best = Choice(None, None, None, math.inf)
    for ridge in RIDGES:
        change = solve_ridge(fitting.gram, fitting.cross, ridge * scale, fitting.tokens)
        error = judging.residual(change) / judging.square_delta
        if error < best.error:
            best = Choice(None, change, ridge, error)
    if best.ridge is None or not best.error < 1:
        return Choice(None, None, None, best.error)
    whole = fitting + judging
    change = solve_ridge(whole.gram, whole.cross, best.ridge * median_diagonal(whole), whole.tokens)
    return replace(best, change=change)


def surely_less(after: Sequence[float], before: Sequence[float]) -> bool:
    """Whether a figure of the judging sequences fell, on average by more than twice the standard error of its fall."""
    fall = np.subtract(before, after)
    spread = float(fall.std(ddof=1)) / len(fall) ** 0.5 if len(fall) > 1 else 0.0
    return float(fall.mean()) > 2 * spread


class Predictions:
    """The dense model's predictions at some positions of at most :data:`SEQUENCES` judging sequences.

    Kept in float16: ``2 V T / STRIDE`` bytes per sequence. One sequence is run and compared at a time, in float32: ten
    times as much.
    """

    def __init__(self, loaded: LoadedModel, calibration: CalibrationSet) -> None:
        judging = (b for b in calibration.batches(loaded.device, tokens=1) if judges(b.sequences.start))
        self.loaded = loaded
        self.batches = list(itertools.islice(judging, SEQUENCES))
        self.dense = [log_p.half() for log_p in self._log_probabilities()]

    def divergences(self, point: int, stream: Stream) -> list[float]:
        """Mean KL in nats of every sequence when the dense model goes on from ``stream`` as its ``x_point``."""
        streams = (stream(batch, block_calls(self.loaded, batch)) for batch in self.batches)
        found = enumerate(self._log_probabilities(point, streams))
        return [_divergence(self.dense[index], log_q) for index, log_q in found]

    def divergence(self, index: int, other: LoadedModel, point: int, x: torch.Tensor) -> float:
        """Mean KL in nats on one of the sequences when another model goes on from ``x`` as its ``x_point``."""
        return _divergence(self.dense[index], _log_probabilities(other, self.batches[index], point, x))

    def _log_probabilities(
        self, point: int = 0, streams: Iterable[torch.Tensor | None] = itertools.repeat(None)
    ) -> Iterator[torch.Tensor]:
        """Of the dense model on every sequence, its ``x_point`` replaced where the point is not 0."""
        if not self.loaded.walked:
            for batch, x in zip(self.batches, streams, strict=False):
                yield _log_probabilities(self.loaded, batch, point, x)
            return
        given = list(itertools.islice(streams, len(self.batches) if point else 0))
        entering = (lambda number: given[number]) if point else None
        shelf = walk_to_the_end(self.loaded, self.batches, Execution(), "refit: judges", point, entering)
        for number, batch in enumerate(self.batches):
            with _judged(self.loaded, batch):
                yield finish(self.loaded, batch, shelf.take(number)).float().log_softmax(1)


def _divergence(dense: torch.Tensor, log_q: torch.Tensor) -> float:
    log_p = dense.float()
    return float((log_p.exp() * (log_p - log_q)).sum(1).mean())


@torch.no_grad()
def _log_probabilities(
    loaded: LoadedModel, batch: Batch, point: int = 0, x: torch.Tensor | None = None
) -> torch.Tensor:
    """``[n, V]`` float32 of the real positions looked at."""
    with _judged(loaded, batch):
        return go_on(loaded, batch, point, x).float().log_softmax(1)


@contextmanager
def _judged(loaded: LoadedModel, batch: Batch) -> Iterator[None]:
    """Meanwhile the head runs at the real positions looked at alone."""

    def only(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (args[0][batch.mask.to(args[0].device)][::STRIDE], *args[1:])

    handle = loaded.model.get_output_embeddings().register_forward_pre_hook(only)
    try:
        yield
    finally:
        handle.remove()
