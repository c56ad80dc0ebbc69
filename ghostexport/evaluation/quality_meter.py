"""Perplexity of logits on text, and their distance to a reference: of NumPy arrays or of torch tensors, with no torch.

Nothing of vocabulary size is kept between calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

#: Rows of logits turned into float64 log-probabilities at once: 64 x 150k x 8 B = 77 MB, some times over.
ROWS = 64


def predicting(mask: Any) -> Any:
    """The positions ``(B, T - 1)`` that count: real tokens before a real token, of a mask ``(B, T)`` bool."""
    return mask[:, :-1] & mask[:, 1:]


@dataclass(frozen=True)
class Quality:
    """What was measured.

    Attributes:
        perplexity: ``exp`` of the mean negative log-likelihood of the next token.
        mean_kl: mean over positions of ``KL(dense || model)`` in nats; None without a reference.
        top1_agreement: share of positions where both models prefer the same next token; None without a reference.
        tokens: predicted positions.
        tasks: accuracy on zero-shot tasks by task and metric, where they were asked for.
    """

    perplexity: float
    mean_kl: float | None
    top1_agreement: float | None
    tokens: int
    tasks: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class WindowSums:
    """Sums over the predicted positions of one call of :meth:`QualityMeter.add`.

    Attributes:
        nll: negative log-likelihood of the next token, nats.
        kl, agree: of the ``compared`` positions: KL to the reference, and same preferred token.
        tokens, compared: predicted positions, and those with a reference.
    """

    nll: float = 0.0
    kl: float = 0.0
    agree: int = 0
    tokens: int = 0
    compared: int = 0


class QualityMeter:
    """Accumulates :class:`Quality` over windows of text; ``windows`` holds the sums of every call, for intervals."""

    def __init__(self) -> None:
        self.windows: list[WindowSums] = []

    def add(self, logits: Any, tokens: Any, mask: Any = None, reference: Any = None) -> None:
        """Adds windows.

        Args:
            logits: ``(B, T, V)``; position t predicts token t + 1, the last position predicts nothing.
            tokens: ``(B, T)`` token ids.
            mask: ``(B, T)``, 0 where padded; a position counts when it and the token it predicts are real.
            reference: the dense model's logits of the same windows, for KL and agreement.
        """
        if reference is not None and isinstance(logits, np.ndarray) != isinstance(reference, np.ndarray):
            logits, reference = (
                x if isinstance(x, np.ndarray) else x.float().cpu().numpy() for x in (logits, reference)
            )
        tokens = np.asarray(tokens)
        real = np.ones(tokens.shape, bool) if mask is None else np.asarray(mask) != 0
        row, position = np.nonzero(predicting(real))
        sums = WindowSums(tokens=len(row), compared=0 if reference is None else len(row))
        self.windows.append(sums)
        for first in range(0, len(row), ROWS):
            b, t = row[first : first + ROWS], position[first : first + ROWS]
            log_q, _ = _log_softmax(logits[b, t])  # [n, V]
            sums.nll -= float(log_q[np.arange(len(b)), tokens[b, t + 1]].sum())
            if reference is not None:
                log_p, p = _log_softmax(reference[b, t])
                log_p, p = (x if isinstance(x, np.ndarray) else x.to(log_q.device) for x in (log_p, p))
                sums.kl += float((p * (log_p - log_q)).sum())
                sums.agree += int((log_p.argmax(1) == log_q.argmax(1)).sum())

    def result(self) -> Quality:
        """Figures over everything added so far (NaN perplexity when nothing was)."""
        nll, kl = math.fsum(w.nll for w in self.windows), math.fsum(w.kl for w in self.windows)
        tokens, compared = sum(w.tokens for w in self.windows), sum(w.compared for w in self.windows)
        return Quality(
            math.exp(nll / tokens) if tokens else math.nan,
            kl / compared if compared else None,
            sum(w.agree for w in self.windows) / compared if compared else None,
            tokens,
        )


def _log_softmax(rows: Any) -> tuple[Any, Any]:
    """Log-probabilities ``[n, V]`` in float64, and their exponentials."""
    if not isinstance(rows, np.ndarray):
        log = rows.double().log_softmax(1)
        return log, log.exp()
    shifted = rows.astype(np.float64)
    shifted -= shifted.max(1, keepdims=True)
    log = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return log, np.exp(log)
