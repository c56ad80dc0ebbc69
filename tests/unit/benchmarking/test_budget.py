"""What fits a device: amounts, the arithmetic of memory and speed, and the choice."""

from __future__ import annotations

import pytest

from ghostexport.benchmarking.budget import REACHED, Budget, Candidate, amount, choose, retained
from ghostexport.errors import RecipeError
from ghostexport.hardware import HARDWARE


def candidate(removed, variant, speed, keeps, memory=1e9, model="m"):
    return Candidate(model, removed, variant, f"prune-{removed}", int(memory), memory, speed, 20 / keeps, keeps)


FOUND = [
    candidate(0, "dense", 20, 1.0, 4e9),
    candidate(0, "dense.int4", 60, 0.97, 1e9),
    candidate(4, "best", 25, 0.9, 3.4e9),
    candidate(4, "best.int4", 80, 0.88, 0.8e9),
    candidate(8, "best.int4", 100, 0.7, 0.7e9),
]


def test_amounts():
    assert amount("4GB") == 4e9 and amount("512 MiB") == 512 * 2**20 and amount("40tok/s") == 40 and amount("7") == 7
    assert amount(None) is None
    for wrong in ("four", "4 GB/s", "1.2.3GB", "-4GB"):
        with pytest.raises(RecipeError, match="no amount"):
            amount(wrong)


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ({}, (0, "dense")),  # nothing asked: the best there is
        ({"memory": 2e9}, (0, "dense.int4")),
        ({"decode": 70}, (4, "best.int4")),
        ({"decode": 90}, (8, "best.int4")),
        ({"keep": 0.85}, (4, "best.int4")),  # the fastest that keeps it
        ({"keep": 0.95}, (0, "dense.int4")),
        ({"decode": 22, "memory": 3.5e9, "keep": 0.89}, (0, "dense.int4")),
    ],
)
def test_the_choice(asked, chosen):
    fit = choose(Budget(1e9, 1024, **asked), FOUND)
    assert (fit.chosen.removed, fit.chosen.variant) == chosen and fit.require_chosen() is fit.chosen


def test_the_frontier_and_what_is_missed():
    fit = choose(Budget(1e9, 1024, decode=90, keep=0.8), FOUND)
    assert {(c.removed, c.variant) for c in fit.frontier} == {
        (0, "dense"), (0, "dense.int4"), (4, "best.int4"), (8, "best.int4")
    }  # fmt: skip
    assert fit.chosen is None
    assert fit.budget.misses(FOUND[3]) == {"reaches 80.0 of 90 tokens/s": pytest.approx(9 / 8)}
    with pytest.raises(RecipeError, match=r"best.int4 with 4 blocks removed comes nearest: it reaches 80.0 of 90"):
        fit.require_chosen()


def test_a_sibling_may_win_and_is_counted_once():
    sibling = candidate(0, "dense", 90, 0.92, 0.9e9, model="smaller")
    fit = choose(Budget(1e9, 1024, decode=70), [*FOUND, sibling, FOUND[0]])
    assert fit.chosen == sibling and len(fit.candidates) == len(FOUND) + 1
    assert fit.lines()["smaller dense"] == [(90, pytest.approx(20 / 0.92))]


def test_what_is_left_of_the_dense_model():
    dense = {"perplexity": 20.0, "tasks": {"average": {"acc": 0.5, "acc_norm": 0.6}}}
    own = {"perplexity": 25.0, "tasks": {"average": {"acc": 0.4, "acc_norm": 0.54}}}
    assert retained({"perplexity": 25.0}, dense) == 0.8
    assert retained(own, dense) == pytest.approx(0.9)
    assert retained({"perplexity": 25.0, "tasks": {"average": {"acc": 0.45}}}, dense) == pytest.approx(0.9)


def test_every_named_device_has_a_bandwidth_or_is_measured():
    assert 0 < REACHED < 1
    for name, device in HARDWARE.items():
        if name == "cpu":
            assert device.bandwidth is None and device.bytes_per_second(25.6) == 25.6e9
        else:
            assert device.bytes_per_second() == device.bandwidth * 1e9 and device.bandwidth_of
