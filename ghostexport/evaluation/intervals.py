"""Paired bootstrap over sequences: is one variant better than another, or was it this text?

Both variants read the same sequences, so one resampling of sequences serves both, and what makes a sequence hard for
both cancels. Tokens are not resampled: those of one sequence are correlated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ghostexport.benchmarking.statistics import interval, resampled
from ghostexport.evaluation.text import WindowSums


def differences(
    windows: Sequence[WindowSums], others: Sequence[WindowSums], resamples: int, seed: int
) -> dict[str, dict[str, Any]]:
    """What the first variant has more than the second on the same windows.

    Returns:
        ``loss`` (difference of mean negative log-likelihood, nats: the logarithm of the perplexity ratio) and, where
        both have a reference, ``kl`` and ``top1``; each ``{"difference", "interval", "claimed"}``, the last telling
        whether the interval leaves out 0.
    """
    draws = resampled(len(windows), resamples, seed)
    found = {"loss": _difference(windows, others, draws, "nll", "tokens")}
    if all(w.compared for w in (*windows, *others)):
        found["kl"] = _difference(windows, others, draws, "kl", "compared")
        found["top1"] = _difference(windows, others, draws, "agree", "compared")
    return found


def paired_mean(values: Sequence[float], others: Sequence[float], resamples: int, seed: int) -> dict[str, Any]:
    """Difference of two means over the same items, such as right (1) and wrong (0) answers, with its interval."""
    changes = np.asarray(values, np.float64) - np.asarray(others, np.float64)
    draws = resampled(len(changes), resamples, seed)
    return _summary(float(changes.mean()), draws @ changes / len(changes), [len(changes)])


def paired_average(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], resamples: int, seed: int
) -> dict[str, Any]:
    """Difference of the averages over tasks, the items of every task resampled by themselves."""
    changes = [np.asarray(one, np.float64) - np.asarray(other, np.float64) for one, other in pairs]
    means = [resampled(len(c), resamples, seed + i) @ c / len(c) for i, c in enumerate(changes)]
    return _summary(float(np.mean([c.mean() for c in changes])), np.mean(means, axis=0), [len(c) for c in changes])


def _difference(
    windows: Sequence[WindowSums], others: Sequence[WindowSums], draws: NDArray[np.int64], key: str, count: str
) -> dict[str, Any]:
    means, points = [], []
    for part in (windows, others):
        sums = np.array([getattr(w, key) for w in part], np.float64)
        counts = np.array([getattr(w, count) for w in part], np.float64)
        means.append((draws @ sums) / (draws @ counts))
        points.append(sums.sum() / counts.sum())
    return _summary(float(points[0] - points[1]), means[0] - means[1], [len(windows)])


def _summary(point: float, values: NDArray[np.float64], sizes: Sequence[int]) -> dict[str, Any]:
    low, high = interval(values, sizes)
    return {"difference": point, "interval": [low, high], "claimed": not low <= 0 <= high}
