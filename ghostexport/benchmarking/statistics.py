"""The statistics of benchmark and evaluation: trtexec's percentiles, the one bootstrap, its intervals, steadiness.

Paired bootstraps over sequences ask whether one variant is better than another, or it was this text: both read the same
sequences, so what makes one hard for both cancels. Tokens are not resampled: those of one sequence are correlated.

Names and thresholds follow trtexec (``samples/common/sampleReporting.cpp``), so that numbers can be held against its.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ghostexport.evaluation.quality_meter import WindowSums

PERCENTILES = (90, 95, 99)
#: trtexec warns above this coefficient of variation and suggests locking the clocks.
CV_LIMIT = 0.025
#: trtexec calls a run host-bound above this share of enqueue time in GPU time.
ENQUEUE_LIMIT = 0.8
#: Second half slower than the first by more than this, and significantly so: the session slowed down.
SLOWDOWN_LIMIT = 0.05
RESAMPLES = 2000

Samples = Sequence[float]
Rounds = Sequence[Samples]


def percentile(values: Samples, p: float) -> float:
    """The ``p``-th percentile by trtexec's rule: element ``n - 1 - int((1 - p/100) n)`` of the sorted list.

    No interpolation, and in single precision as trtexec computes it (it decides at exact multiples).
    """
    ordered = sorted(values)
    n = len(ordered)
    excluded = int((np.float32(1) - np.float32(p) / np.float32(100)) * np.float32(n))
    return float(ordered[max(n - 1 - excluded, 0)])


def coefficient_of_variation(values: Samples) -> float:
    """Population standard deviation over mean (trtexec's ``coeffVar``); 0 for a mean of 0."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values)) / mean if mean else 0.0


def summarize(values: Samples) -> dict[str, float]:
    """n, min, max, mean, median, p90, p95, p99 and CV of raw samples; unit of the samples."""
    return {
        "n": len(values),
        "min": float(min(values)),
        "max": float(max(values)),
        "mean": math.fsum(values) / len(values),
        "median": float(np.median(values)),
        **{f"p{p}": percentile(values, p) for p in PERCENTILES},
        "cv": coefficient_of_variation(values),
    }


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __contains__(self, x: float) -> bool:
        return self.low <= x <= self.high

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high}


def round_medians(rounds: Rounds) -> NDArray[np.float64]:
    """Median of each round's samples ``[R]``: samples inside a round share its conditions and are not independent."""
    return np.array([np.median(samples) for samples in rounds], dtype=np.float64)


def resampled(count: int, resamples: int, seed: int | np.random.Generator) -> NDArray[np.int64]:
    """The one bootstrap: how often every item is drawn, ``[resamples, count]``; rows sum to ``count``."""
    draws = np.random.default_rng(seed).integers(0, count, (resamples, count))
    return np.stack([np.bincount(row, minlength=count) for row in draws])


def interval(values: NDArray[np.float64], sizes: Sequence[int]) -> tuple[float, float]:
    """The one rule for 95 % intervals: expanded percentiles of resampled means ``values`` or of their differences.

    The plain percentile interval is too narrow for a few rounds or windows: it lacks Student's t and the n - 1. Taking
    wider percentiles repairs that, and unlike a studentized interval it cannot leave the range of the data (Hesterberg
    2015, "What Teachers Should Know About the Bootstrap").

    Args:
        sizes: of the groups that were resampled, each by itself; with n in all and k groups there are n - k degrees of
            freedom.
    """
    n, degrees = sum(sizes), sum(sizes) - len(sizes)
    tail = NormalDist().cdf(-math.sqrt(n / degrees) * _t_quantile(degrees)) if degrees else 0.0
    low, high = np.quantile(values, (tail, 1 - tail))
    return float(low), float(high)


def paired_ratio(numerator: Rounds, denominator: Rounds, seed: int = 0) -> Interval:
    """Geometric mean over rounds of ``numerator / denominator``, with its interval.

    The two visits of a round are neighbours in time, so slow drift of the machine cancels.
    """
    return _exponential(_mean([np.log(round_medians(numerator)) - np.log(round_medians(denominator))], seed))


def unpaired_ratio(numerator: Rounds, denominator: Rounds, seed: int = 0) -> Interval:
    """As :func:`paired_ratio` for two separate runs: geometric means, their rounds resampled independently."""
    return _exponential(_mean([np.log(round_medians(numerator)), -np.log(round_medians(denominator))], seed))


def paired_difference(a: Rounds, b: Rounds, seed: int = 0) -> Interval:
    """Mean over rounds of ``a - b``, with its interval; unit of the samples."""
    return _mean([round_medians(a) - round_medians(b)], seed)


def _mean(groups: Sequence[NDArray[np.float64]], seed: int) -> Interval:
    """The sum of the groups' means."""
    generator = np.random.default_rng(seed)
    draws = sum(resampled(len(g), RESAMPLES, generator) @ g / len(g) for g in groups)
    return Interval(sum(float(g.mean()) for g in groups), *interval(np.asarray(draws), [len(g) for g in groups]))


def _exponential(logs: Interval) -> Interval:
    return Interval(math.exp(logs.value), math.exp(logs.low), math.exp(logs.high))


def _t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t by its expansion in 1 / degrees (Abramowitz & Stegun 26.7.5)."""
    z, v = NormalDist().inv_cdf(0.975), degrees
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def slowdown(rounds: Rounds, seed: int = 0) -> float | None:
    """How much slower the second half of the rounds is (0.1 = 10 %), or None when it is not, beyond noise.

    Significant = the interval of the ratio of the halves lies above 1, and the ratio exceeds 1 + SLOWDOWN_LIMIT.
    """
    half = len(rounds) // 2
    if half < 3:  # 3 rounds a half: below, a bootstrap interval means nothing
        return None
    ratio = unpaired_ratio(rounds[-half:], rounds[:half], seed)
    return ratio.value - 1 if ratio.value > 1 + SLOWDOWN_LIMIT and ratio.low > 1 else None


def inter_token_latency(token_times: Samples) -> float:
    """ITL = (last - first) / (tokens - 1), AIPerf's formula: the first token belongs to the TTFT.

    Args:
        token_times: time of arrival of each output token, at least two.
    """
    return (token_times[-1] - token_times[0]) / (len(token_times) - 1)


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
