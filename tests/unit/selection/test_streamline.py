"""Streamline scores against a direct computation from all residual values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import CalibrationError, RecipeError
from ghostexport.plan import BlockSpan
from ghostexport.recipe import SelectSection
from ghostexport.selection.choosing import select
from ghostexport.selection.criteria import CRITERIA, function
from tests.tiny import CONFIGS, tiny


@pytest.fixture
def windows():
    tokens = np.random.default_rng(0).integers(3, 128, (7, 40))
    mask = np.arange(40) < np.array([40, 40, 30, 40, 25, 40, 40])[:, None]
    return CalibrationSet.from_tokens(tokens, mask)


def direct_scores(model, windows, count):
    mask = torch.from_numpy(windows.attention_mask)
    states = {}
    models.read_residuals(
        model, range(7), lambda point, x: states.__setitem__(point, x.double()), torch.from_numpy(windows.tokens), mask
    )
    cosine = [
        torch.nn.functional.cosine_similarity(states[s], states[s + count], dim=-1)[mask.bool()].mean()
        for s in range(7 - count)
    ]
    return [0.5 + 0.5 * float(c) for c in cosine]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("count", [1, 3])
def test_scores_and_choice(name, count, windows):
    loaded = models.from_memory(tiny(name))
    plan = select(loaded, windows, SelectSection(prune=count))
    expected = direct_scores(loaded.model, windows, count)
    scores = [score for _, _, score in plan.scores["windows"]]
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
    best = int(np.argmax(expected))
    assert plan.removed == (BlockSpan(best, best + count),) and plan.criterion == "streamline"


def test_protected_blocks_are_not_removed(windows):
    loaded = models.from_memory(tiny("llama"))
    plan = select(loaded, windows, SelectSection(prune=2, protect_first=1, protect_last=2))
    assert [(start, stop) for start, stop, _ in plan.scores["windows"]] == [(1, 3), (2, 4)]
    with pytest.raises(RecipeError, match="first 3 and the last 2 are protected"):
        select(loaded, windows, SelectSection(prune=2, protect_first=3, protect_last=2))


def test_spans_of_the_recipe_win(windows):
    loaded = models.from_memory(tiny("llama"))
    plan = select(loaded, windows, SelectSection(spans=((4, 6), (0, 1))))
    assert plan.removed == (BlockSpan(0, 1), BlockSpan(4, 6)) and plan.criterion == "manual"
    for spans, message in [(((2, 2),), "empty"), (((4, 2),), "reversed"), (((5, 7),), "reaches past")]:
        with pytest.raises(RecipeError, match=message):
            select(loaded, windows, SelectSection(spans=spans))


def test_bad_input(windows):
    loaded = models.from_memory(tiny("llama"))
    with pytest.raises(RecipeError, match="6 of 6 decoder blocks cannot be removed"):
        select(loaded, windows, SelectSection(prune=6))
    with pytest.raises(RecipeError, match="Did you mean 'streamline'"):
        select(loaded, windows, SelectSection(prune=2, criterion="streamlin"))
    with pytest.raises(CalibrationError, match="outside the model's vocabulary"):
        select(loaded, CalibrationSet.from_tokens([[500]]), SelectSection(prune=2))
    with torch.no_grad():
        models.find_blocks(loaded.model)[2].mlp.down_proj.weight.mul_(float("nan"))
    with pytest.raises(CalibrationError, match="before block 3 holds NaN"):
        select(loaded, windows, SelectSection(prune=2))


def test_every_row_of_the_registry_names_a_function():
    for name in CRITERIA:
        assert callable(function(name)), name
