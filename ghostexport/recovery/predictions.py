"""What the judging sequences' predictions say about a repaired prefix: the judge of a refit beside the stream's error.

::

    divergence = mean over positions of KL(p || q)      p: dense model; q: dense model going on from the repaired stream

A nearer stream is not always a better model: the error is a mean over channels, of which the rest of the model reads
some more than others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.models import LoadedModel
from ghostexport.recovery.judging import judges
from ghostexport.recovery.streams import Call, block_calls, go_on

#: Judging sequences that are looked at, at most, and every which of their positions: enough to tell a change of half a
#: percent of perplexity, and few enough to cost less than the refit itself.
SEQUENCES = 8
STRIDE = 4

#: From a batch and the calls of its blocks to a residual value ``(B, T, C)``.
Stream = Callable[[Batch, list[Call]], torch.Tensor]


class Predictions:
    """The dense model's predictions at some positions of at most :data:`SEQUENCES` judging sequences.

    Kept in float16: ``2 V T / STRIDE`` bytes per sequence. One sequence is run and compared at a time, in float32: ten
    times as much.
    """

    def __init__(self, loaded: LoadedModel, calibration: CalibrationSet) -> None:
        judging = (b for b in calibration.batches(loaded.device, tokens=1) if judges(b.sequences.start))
        self.loaded = loaded
        self.batches = list(itertools.islice(judging, SEQUENCES))
        head = loaded.model.get_output_embeddings()
        self.head: nn.Module = head
        self.dense = [self._log_probabilities(batch).half() for batch in self.batches]

    def divergences(self, point: int, stream: Stream) -> list[float]:
        """Mean KL in nats of every sequence when the dense model goes on from ``stream`` as its ``x_point``."""
        found = []
        for batch, dense in zip(self.batches, self.dense, strict=True):
            x = stream(batch, block_calls(self.loaded, batch))
            log_p, log_q = dense.float(), self._log_probabilities(batch, point, x)
            found.append(float((log_p.exp() * (log_p - log_q)).sum(1).mean()))
        return found

    def _log_probabilities(self, batch: Batch, point: int = 0, x: torch.Tensor | None = None) -> torch.Tensor:
        """``[n, V]`` float32 of the real positions looked at; the head runs at those alone."""

        def only(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (args[0][batch.mask.to(args[0].device)][::STRIDE], *args[1:])

        handle = self.head.register_forward_pre_hook(only)
        try:
            logits = go_on(self.loaded, batch, point, x)
        finally:
            handle.remove()
        return logits.float().log_softmax(1)
