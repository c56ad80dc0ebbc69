"""Criteria after recovery: errors against dense solves, harmless blocks found, held-out text untouched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import CalibrationError
from ghostexport.execution import Execution
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import BlockSpan, PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.selection.after_recovery import RIDGE, Judge
from ghostexport.selection.choosing import select
from tests.tiny import tiny
from tests.unit.recovery.synthetic import least_squares


@pytest.fixture
def windows():
    random = np.random.default_rng(0)
    mask = np.arange(40) < random.integers(30, 41, (12, 1))
    return CalibrationSet.from_tokens(random.integers(3, 128, (12, 40)), mask)


def harmless(blocks):
    """A model in which these blocks add nothing, a loss that no operator need undo."""
    model = tiny("llama")
    for index in blocks:
        block = model.model.layers[index]
        block.self_attn.o_proj.weight.data.zero_()
        block.mlp.down_proj.weight.data.zero_()
    return models.from_memory(model)


class Dense:
    """Errors and perplexities of repaired spans from all residual values at once."""

    def __init__(self, loaded, windows):
        self.loaded, self.tokens = loaded, torch.from_numpy(windows.tokens)
        self.states, mask = {}, torch.from_numpy(windows.attention_mask)
        read = (range(7), lambda point, x: self.states.__setitem__(point, x.double()), self.tokens, mask)
        models.read_residuals(loaded.model, *read)
        self.mask = mask.bool()
        self.judging = (torch.arange(len(mask)) % 4 == 3)[:, None].expand_as(mask)[self.mask]

    def repair(self, start, stop):
        X, Y = (self.states[point][self.mask] for point in (start, stop))
        w = 1 / (Y.square().mean(1) + 1e-6)
        fit = ~self.judging
        G = (w[:, None] * X)[fit].T @ X[fit]
        M = least_squares(X[fit], (Y - X)[fit], w[fit], RIDGE * float(G.diagonal().median()))
        error = (Y - X - X @ M)[self.judging].square().sum(1) / Y[self.judging].square().sum(1)
        return M, float(error.mean())

    def error(self, plan):
        return sum(self.repair(span.start, span.stop)[1] for span in plan.removed)

    def perplexity(self, plan):
        """Of the sequences that judge, by Hugging Face's own loss."""
        deltas = [self.repair(span.start, span.stop)[0].float().numpy() for span in plan.removed]
        operators = tuple(Operator(b, "x", delta=M) for b, M in zip(plan.boundaries, deltas, strict=True))
        model = models.patch(self.loaded, plan, OperatorSet("x", operators, plan)).model
        rows = self.tokens[3::4]
        return float(model(input_ids=rows, labels=rows).loss.exp())


@pytest.fixture
def full():
    return CalibrationSet.from_tokens(np.random.default_rng(0).integers(3, 128, (12, 40)))


def test_errors_are_those_of_a_dense_fit(windows):
    loaded = models.from_memory(tiny("llama"))
    judge = Judge(loaded, windows, Execution())
    judge.measure([(1, 3), (1, 4), (0, 6)])
    dense = Dense(loaded, windows)
    for span, repair in judge.repairs.items():
        assert repair.error == pytest.approx(dense.repair(*span)[1], rel=1e-3)


@pytest.mark.parametrize("seed", [0, 2, 5])
def test_of_the_runs_of_least_error_the_one_of_least_perplexity_goes(full, seed):
    loaded = models.from_memory(tiny("llama", seed=seed))
    plan = select(loaded, full, SelectSection(criterion="residual", prune=2))
    dense = Dense(loaded, full)
    plans = sorted((PrunePlan.from_spans(6, [(s, s + 2)]) for s in range(5)), key=dense.error)
    expected = {p.removed[0].start: dense.perplexity(p) for p in plans[:4]}
    assert [start for start, _, _ in plan.scores["perplexity"]] == list(expected)
    found = {start: perplexity for start, _, perplexity in plan.scores["perplexity"]}
    assert found == pytest.approx(expected, rel=1e-3)
    best = min(expected, key=expected.get)
    assert plan.removed == (BlockSpan(best, best + 2),) and plan.scores["best"] == found[best]
    assert plan.removed != plans[0].removed  # the error alone would have chosen another run


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_greedy_ranks_by_error_and_again_by_perplexity(full, seed):
    loaded = models.from_memory(tiny("llama", seed=seed))
    plan = select(loaded, full, SelectSection(criterion="residual-greedy", prune=2))
    dense = Dense(loaded, full)
    beam, steps = [()], []
    for _ in range(2):
        grown = {tuple(sorted((*blocks, b))) for blocks in beam for b in set(range(6)) - set(blocks)}
        plans = {blocks: PrunePlan.from_blocks(6, blocks) for blocks in grown}
        finalists = sorted(grown, key=lambda blocks: dense.error(plans[blocks]))[:4]
        beam = sorted(finalists, key=lambda blocks: dense.perplexity(plans[blocks]))[:2]
        steps.append(plans[beam[0]])
    assert plan.removed == steps[-1].removed
    for step, expected in zip(plan.scores["steps"], steps, strict=True):
        assert step["removed"] == [[span.start, span.stop] for span in expected.removed]
        assert step["perplexity"] == pytest.approx(dense.perplexity(expected), rel=1e-3)
        assert step["error"] == pytest.approx(dense.error(expected), rel=1e-3)
    alone = min(range(6), key=lambda b: dense.repair(b, b + 1)[1])
    assert steps[0].removed != (BlockSpan(alone, alone + 1),)  # the error alone would have begun elsewhere


def test_residual_finds_the_harmless_run(windows):
    plan = select(harmless((2, 3)), windows, SelectSection(criterion="residual", prune=2))
    assert plan.removed == (BlockSpan(2, 4),) and plan.criterion == "residual"
    assert len(plan.scores["windows"]) == 5 and len(plan.scores["perplexity"]) == 4
    best = min(plan.scores["windows"], key=lambda window: window[2])
    assert best[:2] == [2, 4] and best[2] < 1e-6


def spoken(loaded):
    """Windows sampled from the model itself: no other model predicts them better."""
    torch.manual_seed(0)
    ids = torch.randint(3, 128, (16, 1))
    with torch.no_grad():
        while ids.shape[1] < 40:
            ids = torch.cat([ids, loaded.model(ids).logits[:, -1].softmax(1).multinomial(1)], dim=1)
    return CalibrationSet.from_tokens(ids.numpy())


def test_residual_greedy_finds_harmless_blocks_apart():
    loaded = harmless((1, 4))
    plan = select(loaded, spoken(loaded), SelectSection(criterion="residual-greedy", prune=2))
    assert plan.removed == (BlockSpan(1, 2), BlockSpan(4, 5)) and plan.criterion == "residual-greedy"
    assert [len(step["removed"]) for step in plan.scores["steps"]] == [1, 2]


def test_protected_blocks_stay(windows):
    loaded = harmless((0, 5))
    for criterion in ("residual", "residual-greedy"):
        section = SelectSection(criterion=criterion, prune=2, protect_first=1, protect_last=1)
        plan = select(loaded, windows, section)
        assert all(span.start >= 1 and span.stop <= 5 for span in plan.removed)


def test_too_little_text_is_refused(windows):
    few = CalibrationSet.from_tokens(windows.tokens[:3].repeat(2, 1))
    with pytest.raises(CalibrationError, match="at least 4 calibration sequences"):
        select(harmless(()), few, SelectSection(criterion="residual", prune=2))
