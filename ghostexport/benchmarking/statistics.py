"""The statistics of the benchmark: trtexec's percentiles, paired ratios with bootstrap intervals, steadiness.

Names and thresholds follow trtexec (``samples/common/sampleReporting.cpp``), so that numbers can be held against its.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


def paired_ratio(numerator: Rounds, denominator: Rounds, seed: int = 0) -> Interval:
    """Geometric mean over rounds of ``numerator / denominator``, with its interval.

    The two visits of a round are neighbours in time, so slow drift of the machine cancels.
    """
    log_ratio = np.log(round_medians(numerator)) - np.log(round_medians(denominator))
    interval = _bootstrap_mean(log_ratio, seed)
    return Interval(math.exp(interval.value), math.exp(interval.low), math.exp(interval.high))


def unpaired_ratio(numerator: Rounds, denominator: Rounds, seed: int = 0) -> Interval:
    """As :func:`paired_ratio` for two separate runs: geometric means, their rounds resampled independently."""
    generator = np.random.default_rng(seed)
    means = []
    for rounds in (numerator, denominator):
        logs = np.log(round_medians(rounds))
        draws = logs[generator.integers(0, len(logs), (RESAMPLES, len(logs)))].mean(axis=1)
        means.append((float(logs.mean()), draws))
    (one, one_draws), (two, two_draws) = means
    low, high = np.quantile(one_draws - two_draws, (0.025, 0.975))
    return Interval(math.exp(one - two), math.exp(float(low)), math.exp(float(high)))


def paired_difference(a: Rounds, b: Rounds, seed: int = 0) -> Interval:
    """Mean over rounds of ``a - b``, with its interval; unit of the samples."""
    return _bootstrap_mean(round_medians(a) - round_medians(b), seed)


def _bootstrap_mean(values: NDArray[np.float64], seed: int) -> Interval:
    """Expanded percentile bootstrap of the mean (Hesterberg 2015, "What Teachers Should Know About the Bootstrap").

    The plain percentile interval is too narrow for the ten rounds we have: it lacks Student's t and the n - 1. Taking
    wider percentiles repairs that, and unlike a studentized interval it cannot leave the range of the data.
    """
    n, mean = len(values), float(values.mean())
    if n < 2:
        return Interval(mean, mean, mean)
    resampled = values[np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))].mean(axis=1)
    tail = NormalDist().cdf(-math.sqrt(n / (n - 1)) * _t_quantile(n - 1))
    low, high = np.quantile(resampled, (tail, 1 - tail))
    return Interval(mean, float(low), float(high))


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

    Significant = the 99 % bootstrap interval of the ratio of the halves' medians lies above 1, and the ratio
    exceeds 1 + :data:`SLOWDOWN_LIMIT`.
    """
    medians = round_medians(rounds)
    half = len(medians) // 2
    if half < 3:  # 3 rounds a half: below, a bootstrap interval means nothing
        return None
    first, second = medians[:half], medians[-half:]
    excess = float(np.median(second) / np.median(first)) - 1
    generator = np.random.default_rng(seed)
    draws = [np.median(h[generator.integers(0, half, (RESAMPLES, half))], axis=1) for h in (second, first)]
    significant = float(np.quantile(draws[0] / draws[1], 0.005)) > 1
    return excess if excess > SLOWDOWN_LIMIT and significant else None


def inter_token_latency(token_times: Samples) -> float:
    """ITL = (last - first) / (tokens - 1), AIPerf's formula: the first token belongs to the TTFT.

    Args:
        token_times: time of arrival of each output token, at least two.
    """
    return (token_times[-1] - token_times[0]) / (len(token_times) - 1)
