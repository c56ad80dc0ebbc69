import math

import numpy as np
import pytest

from ghostexport.benchmarking.statistics import (
    Interval,
    _t_quantile,
    coefficient_of_variation,
    inter_token_latency,
    paired_difference,
    paired_ratio,
    percentile,
    resampled,
    slowdown,
    summarize,
    unpaired_ratio,
)


@pytest.mark.parametrize(
    ("n", "p", "expected"),
    [
        (10, 90, 9),  # index 10 - 1 - int(1.0) = 8 of 1..10
        (10, 95, 10),  # int(0.5) = 0: the largest
        (100, 95, 95),  # 100 - 1 - 5 = 94
        (200, 90, 180),
        (7, 99, 7),
        (1, 99, 1),
        (150, 99, 149),  # int(1.5) = 1
    ],
)
def test_percentile_follows_trtexec(n, p, expected):
    values = list(range(1, n + 1))[::-1]
    assert percentile(values, p) == expected


def test_summary_by_hand():
    summary = summarize([4.0, 2.0, 1.0, 3.0])
    assert summary["median"] == 2.5  # average of the two middle ones
    assert (summary["n"], summary["min"], summary["max"], summary["mean"]) == (4, 1.0, 4.0, 2.5)
    assert summary["cv"] == pytest.approx((1.25**0.5) / 2.5)
    assert coefficient_of_variation([5.0, 5.0]) == 0


def test_itl_by_hand():
    # first token at 1 s, then 0.2, 0.3, 0.1 s apart: (1.6 - 1.0) / 3, whatever the TTFT
    assert inter_token_latency([1.0, 1.2, 1.5, 1.6]) == pytest.approx(0.2)


def test_paired_ratio_of_exact_costs_is_exact():
    dense, pruned = [(2.0, 2.0)] * 5, [(1.6, 1.6)] * 5
    assert paired_ratio(dense, pruned) == Interval(pytest.approx(1.25), pytest.approx(1.25), pytest.approx(1.25))
    assert paired_difference(pruned, dense).value == pytest.approx(-0.4)


def test_pairing_cancels_drift():
    drift = np.linspace(1, 2, 10)
    ratio = paired_ratio([(2 * d,) for d in drift], [(d,) for d in drift])
    assert ratio.low == pytest.approx(2) and ratio.high == pytest.approx(2)


def test_interval_covers_the_truth_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        a, b = ([(x,) for x in np.exp(0.05 * generator.standard_normal(10))] for _ in range(2))
        hits += 1.0 in paired_ratio(a, b, seed=trial)
    # 95 % nominal: three standard deviations of 200 draws are 4.6 %
    assert 0.90 <= hits / 200 <= 0.995


def test_equal_seeds_give_equal_draws():
    draws = resampled(9, 50, 3)
    assert draws.shape == (50, 9) and (draws.sum(1) == 9).all()
    np.testing.assert_array_equal(draws, resampled(9, 50, 3))


def test_interval_of_two_runs_is_students():
    """Against Welch's two-sample interval with n1 + n2 - 2 degrees: t is 2.101 for 18 of them."""
    generator = np.random.default_rng(7)
    ratios = []
    for trial in range(20):
        one, other = generator.normal(0, 0.02, 10), generator.normal(0, 0.02, 10)
        found = unpaired_ratio([(x,) for x in np.exp(one)], [(x,) for x in np.exp(other)], seed=trial)
        width = 2 * 2.101 * np.sqrt(one.var(ddof=1) / 10 + other.var(ddof=1) / 10)
        ratios.append((np.log(found.high) - np.log(found.low)) / width)
    assert np.mean(ratios) == pytest.approx(1, abs=0.04)


def test_one_wild_round_cannot_blow_the_interval_up():
    rounds = [(1.0,)] * 5 + [(50.0,)]
    interval = paired_ratio(rounds, [(1.0,)] * 6)
    assert 1.0 <= interval.low <= interval.value <= interval.high <= 50.0


@pytest.mark.parametrize(("degrees", "expected"), [(5, 2.5706), (9, 2.2622), (30, 2.0423)])
def test_t_quantiles_of_the_tables(degrees, expected):
    assert _t_quantile(degrees) == pytest.approx(expected, rel=2e-3)


def test_slowdown_half_way_is_seen_and_noise_is_not():
    generator = np.random.default_rng(1)
    steady = [(float(1 + 0.02 * generator.standard_normal()),) for _ in range(20)]
    assert slowdown(steady) is None
    slowed = [(s[0] * (1 if r < 10 else 1.3),) for r, s in enumerate(steady)]
    assert slowdown(slowed) == pytest.approx(0.3, abs=0.05)
    assert slowdown(slowed[8:12]) is None  # too few rounds to say


def test_the_interval_between_two_runs_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(2)
    inside = 0
    for trial in range(300):
        one, other = np.exp(generator.normal((0.2, 0.0), 0.1, (16, 2))).T[..., None]
        interval = unpaired_ratio(one, other, seed=trial)
        inside += math.exp(0.2) in interval
    assert 0.88 <= inside / 300 <= 0.99


def test_a_slow_down_that_may_be_noise_is_none():
    """The second half's median is 19 % higher, of rounds that differ by a factor of four."""
    first, second = (1.0, 2.0, 0.5, 1.1), (1.2, 0.6, 2.2, 1.3)
    assert np.median(second) / np.median(first) > 1.15
    assert slowdown([(v,) for v in (*first, *second)]) is None
