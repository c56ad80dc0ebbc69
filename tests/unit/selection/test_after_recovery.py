"""Criteria after recovery: errors against dense solves, harmless blocks found, held-out text untouched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import CalibrationError
from ghostexport.execution import Execution
from ghostexport.plan import BlockSpan
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


def test_errors_are_those_of_a_dense_fit(windows):
    loaded = models.from_memory(tiny("llama"))
    judge = Judge(loaded, windows, Execution())
    judge.measure([(1, 3), (1, 4), (0, 6)])
    states = {}
    mask = torch.from_numpy(windows.attention_mask)
    read = (range(7), lambda point, x: states.__setitem__(point, x.double()), torch.from_numpy(windows.tokens), mask)
    models.read_residuals(loaded.model, *read)
    judging = (torch.arange(12) % 4 == 3)[:, None].expand_as(mask)[mask.bool()]
    for (start, stop), repair in judge.repairs.items():
        X, Y = (states[point][mask.bool()] for point in (start, stop))
        w = 1 / (Y.square().mean(1) + 1e-6)
        G = (w[:, None] * X)[~judging].T @ X[~judging]
        M = least_squares(X[~judging], (Y - X)[~judging], w[~judging], RIDGE * float(G.diagonal().median()))
        error = (Y - X - X @ M)[judging].square().sum(1) / Y[judging].square().sum(1)
        assert repair.error == pytest.approx(float(error.mean()), rel=1e-3)


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
