"""Quality of the engines themselves, so that a fast broken engine shows: perplexity, KL to dense, top-1 agreement."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ghostexport.calibration import CalibrationSet
from ghostexport.errors import CalibrationError
from ghostexport.recipe import Execution
from ghostexport.runfolder import require_space
from ghostexport.runtimes.base import Session

Logits = NDArray[np.float32]


@dataclass
class Agreement:
    """Streaming sums over predicted tokens; nothing grows with their number.

    Attributes:
        tokens: predicted tokens so far.
        nll: sum of -log p(next token).
        kl: sum of KL(reference || candidate) in nats.
        same: tokens on which both prefer the same next token.
    """

    tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    same: int = 0

    def add(self, logits: Logits, next_tokens: NDArray[np.int64], reference: Logits) -> None:
        """Adds ``(T, V)`` logits of both models and the ``(T,)`` tokens that follow."""
        q, p = (torch.log_softmax(torch.from_numpy(np.array(x)), dim=-1) for x in (logits, reference))
        rows = torch.arange(len(next_tokens))
        self.tokens += len(next_tokens)
        self.nll -= float(q[rows, torch.from_numpy(next_tokens)].double().sum())
        self.kl += float((p.exp() * (p - q)).sum(dim=-1).double().sum())
        self.same += int((p.argmax(dim=-1) == q.argmax(dim=-1)).sum())

    def to_json(self) -> dict[str, float]:
        return {
            "perplexity": math.exp(self.nll / self.tokens),
            "kl": max(0.0, self.kl / self.tokens),  # rounding can leave -1e-9 for equal models
            "top1": self.same / self.tokens,
        }


def windows(held_out: CalibrationSet, tokens: int, longest: int) -> Iterator[NDArray[np.int64]]:
    """Windows ``(T,)`` of at most ``longest`` tokens with ``tokens`` predicted tokens in all; padding is left out."""
    left = tokens
    for ids, mask in zip(held_out.tokens, held_out.attention_mask, strict=True):
        real = ids[mask == 1]
        for first in range(0, len(real) - 1, longest):
            window = real[first : first + min(longest, left + 1)]
            if len(window) < 2:
                continue
            left -= len(window) - 1
            yield window
            if left <= 0:
                return


def engine_quality(
    loaders: Mapping[str, Callable[[], Session]],
    held_out: CalibrationSet,
    tokens: int,
    longest: int,
    execution: Execution,
) -> dict[str, Any]:
    """Runs every engine over the same held-out windows, one engine at a time.

    The dense logits wait in a temporary file, so that two engines are never needed in memory together.

    Args:
        loaders: variant -> function that loads its engine; the first is the reference (``dense``).
        tokens: predicted tokens.
        longest: tokens of a window, each from an empty cache (an engine's profiles limit it).

    Returns:
        ``{"tokens", "window", "variants": {name: {"perplexity", "kl" (nats, to the reference), "top1"}}}``.

    Raises:
        CalibrationError: there is no held-out text.
    """
    chosen = list(windows(held_out, tokens, longest))
    if not chosen:
        raise CalibrationError("The held-out set has no tokens to predict.", "Use longer --length or another source.")
    rows = sum(len(w) - 1 for w in chosen)
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="ghostexport-") as folder:
        reference: Any = None
        for number, (variant, load) in enumerate(loaders.items()):
            execution.progress("evaluate", number, len(loaders))
            session, sums, row = load(), Agreement(), 0
            for window in chosen:
                logits = session.forward(window[None, :-1], session.new_cache(1))[0][0]  # (T - 1, V)
                if reference is None:
                    require_space(Path(folder), rows * logits.shape[1] * 4, "the dense logits")
                    reference = np.memmap(Path(folder) / "dense", np.float32, "w+", shape=(rows, logits.shape[1]))
                part = slice(row, row + len(logits))
                if number == 0:
                    reference[part] = logits
                sums.add(logits, window[1:], reference[part])
                row += len(logits)
            session.close()
            figures[variant] = sums.to_json()
        del reference
    execution.progress("evaluate", len(loaders), len(loaders))
    return {"tokens": rows, "window": longest, "variants": figures}
