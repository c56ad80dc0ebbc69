"""Paired bootstrap: known differences, coverage of the truth, and what pairing is for."""

from __future__ import annotations

import numpy as np
import pytest

from ghostexport.benchmarking.statistics import differences, paired_average, paired_mean
from ghostexport.evaluation.quality_meter import WindowSums


def windows(losses, tokens=100):
    return [
        WindowSums(nll=float(v) * tokens, kl=0.1 * v * tokens, agree=50, tokens=tokens, compared=tokens) for v in losses
    ]


def test_a_constant_difference_has_no_width_however_different_the_sequences():
    hard = np.random.default_rng(0).uniform(1, 9, 12)
    found = differences(windows(hard + 0.25), windows(hard), 500, 0)
    assert found["loss"]["difference"] == pytest.approx(0.25)
    np.testing.assert_allclose(found["loss"]["interval"], [0.25, 0.25])
    assert found["loss"]["claimed"] and not found["top1"]["claimed"]
    assert found["kl"]["difference"] == pytest.approx(0.025)


def test_windows_count_by_their_tokens():
    one = [WindowSums(nll=10, tokens=10), WindowSums(nll=300, tokens=100)]
    other = [WindowSums(nll=0, tokens=10), WindowSums(nll=0, tokens=100)]
    found = differences(one, other, 100, 0)
    assert found["loss"]["difference"] == pytest.approx(310 / 110) and set(found) == {"loss"}


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    random = np.random.default_rng(1)
    inside = 0
    for trial in range(200):
        values = random.normal(0.3, 1.0, 40)
        low, high = paired_mean(values, np.zeros(40), 400, trial)["interval"]
        inside += low <= 0.3 <= high
    assert 0.88 <= inside / 200 <= 0.99


def test_few_windows_are_covered_as_often_as_many():
    """Five windows in each of three groups: plain percentiles would hold the truth in 87 of 100 trials."""
    random = np.random.default_rng(2)
    inside = 0
    for trial in range(300):
        groups = [(random.normal(0.2, 1.0, 5), np.zeros(5)) for _ in range(3)]
        low, high = paired_average(groups, 400, trial)["interval"]
        inside += low <= 0.2 <= high
    assert 0.91 <= inside / 300 <= 0.985
