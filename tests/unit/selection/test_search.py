"""The plan search: the best of all repaired plans, the same each time, within its time, going on where it stopped."""

from __future__ import annotations

import itertools
import math
import types

import numpy as np
import pytest
import torch

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import RecipeError
from ghostexport.execution import Execution
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.recovery.refit.judging import STRIDE
from ghostexport.selection import search as module
from ghostexport.selection.choosing import select
from tests.tiny import tiny
from tests.unit.selection.test_after_recovery import Dense, harmless, spoken

SECTION = SelectSection(criterion="search", prune=2, protect_first=0, protect_last=0)


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    monkeypatch.setattr(module, "has_bfloat16", lambda device: False)


@pytest.fixture
def windows():
    return CalibrationSet.from_tokens(np.random.default_rng(0).integers(3, 128, (12, 40)))


class Exhaustive(Dense):
    """Mean KL of every repaired plan on the judging sequences, from whole logits."""

    @torch.no_grad()
    def kl(self, blocks):
        plan = PrunePlan.from_blocks(6, blocks)
        deltas = [self.repair(span.start, span.stop)[0].float().numpy() for span in plan.removed]
        operators = tuple(Operator(b, "x", delta=M) for b, M in zip(plan.boundaries, deltas, strict=True))
        model = models.patch(self.loaded, plan, OperatorSet("x", operators, plan)).model
        rows = self.tokens[3::4]
        log_p, log_q = (m(rows).logits[:, ::STRIDE].double().log_softmax(-1) for m in (self.loaded.model, model))
        return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_finds_the_best_of_all_repaired_plans(windows, seed):
    loaded = models.from_memory(tiny("llama", seed=seed))
    plan = select(loaded, windows, SECTION)
    dense = Exhaustive(loaded, windows)
    losses = {blocks: dense.kl(blocks) for blocks in itertools.combinations(range(6), 2)}
    best = min(losses, key=losses.get)
    assert plan.removed == PrunePlan.from_blocks(6, best).removed and plan.criterion == "search"
    assert plan.scores["finished"] and plan.scores["kl"] == pytest.approx(losses[best], rel=2e-3)
    for blocks, loss in plan.scores["best"]:
        assert loss == pytest.approx(losses[tuple(blocks)], rel=2e-3)
    assert min(losses[tuple(blocks)] for blocks, _ in plan.scores["starts"].values()) >= losses[best]


def test_it_finds_harmless_blocks_and_leaves_protected_ones():
    loaded = harmless((1, 4))
    plan = select(loaded, spoken(loaded), SECTION)
    assert [(span.start, span.stop) for span in plan.removed] == [(1, 2), (4, 5)]
    kept = select(loaded, spoken(loaded), SECTION.model_copy(update={"protect_first": 2}))
    assert all(span.start >= 2 for span in kept.removed)


class Clock:
    """A second for every plan that is judged."""

    def __init__(self, monkeypatch, stop=math.inf):
        self.now, self.judged = 0.0, []
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: self.now))
        real = module.Search.score

        def score(search, blocks, whole=False):
            if len(self.judged) >= stop:
                raise KeyboardInterrupt
            self.judged.append(blocks)
            self.now += 1
            real(search, blocks, whole)

        monkeypatch.setattr(module.Search, "score", score)


def test_it_ends_in_time_and_says_so(windows, monkeypatch):
    clock = Clock(monkeypatch)
    plan = select(models.from_memory(tiny("llama")), windows, SECTION.model_copy(update={"search_minutes": 8 / 60}))
    assert clock.now <= 8 and not plan.scores["finished"] and len(clock.judged) == 8
    ranked = sorted(plan.scores["best"], key=lambda entry: entry[1])
    assert [list(range(s.start, s.stop)) for s in plan.removed] and plan.scores["kl"] == ranked[0][1]


def test_an_interrupted_search_goes_on_and_ends_like_one_in_one_go(windows, monkeypatch, tmp_path):
    loaded = models.from_memory(tiny("llama", seed=1))
    with monkeypatch.context() as patched:
        whole = Clock(patched)
        expected = select(loaded, windows, SECTION)
    with monkeypatch.context() as patched:
        first = Clock(patched, stop=6)
        with pytest.raises(KeyboardInterrupt):
            select(loaded, windows, SECTION, Execution(scratch=tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
    with monkeypatch.context() as patched:
        second = Clock(patched)
        found = select(loaded, windows, SECTION, Execution(scratch=tmp_path))
    assert found.removed == expected.removed and found.scores == expected.scores | {"seconds": found.scores["seconds"]}
    assert set(second.judged) - set(first.judged) == set(whole.judged) - set(first.judged)
    assert not list(tmp_path.iterdir())  # another search begins anew


def test_several_processes_are_refused(windows, monkeypatch):
    monkeypatch.setattr(module, "is_shared", lambda: True)
    with pytest.raises(RecipeError, match="one process"):
        select(models.from_memory(tiny("llama")), windows, SECTION)
