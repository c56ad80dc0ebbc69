"""Statistics gathered in the criterion's pass against those of a pass of their own, bit for bit, and passes counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import RecipeError
from ghostexport.execution import Execution
from ghostexport.recipe import RecoverSection, SelectSection
from ghostexport.recovery.gathering import Request, gather
from ghostexport.recovery.recover import recover
from ghostexport.selection.choosing import GUESSING, select, select_and_gather
from ghostexport.selection.criteria import CRITERIA
from tests.tiny import tiny

OPERATORS = ("ghost", "ghost-weighted", "ghost-affine", "linearpatch-diag", "linearpatch-rotate", "prune-and-comp")
RECOVER = RecoverSection(operators=OPERATORS)
WATCHABLE = tuple(name for name, criterion in CRITERIA.items() if criterion.watchable)


def windows(repeats, seed=0):
    """Seven padded sequences, all of them again and again: every eighth part tells the same as the whole."""
    tokens = np.random.default_rng(seed).integers(3, 128, (7, 40))
    mask = np.arange(40) < np.array([40, 40, 30, 40, 25, 40, 40])[:, None]
    return CalibrationSet.from_tokens(np.tile(tokens, (repeats, 1)), np.tile(mask, (repeats, 1)))


CALIBRATION, HELD_OUT = windows(GUESSING), windows(1, seed=1)


@pytest.fixture(scope="module")
def loaded():
    return models.from_memory(tiny("llama"))


def shared(loaded, calibration=CALIBRATION, section=RECOVER, **keys):
    return select_and_gather(loaded, calibration, SelectSection(**({"prune": 2} | keys)), section, Execution())


def sequences_through(loaded, work):
    """How many sequences went through the model meanwhile."""
    seen = []
    hook = loaded.blocks[0].register_forward_pre_hook(lambda block, args: seen.append(len(args[0])))
    try:
        work()
    finally:
        hook.remove()
    return sum(seen)


def test_the_criteria_of_one_plain_pass_can_be_watched():
    assert WATCHABLE == ("streamline", "streamline-channelwise", "shortgpt", "shortgpt-channelwise", "angular")


@pytest.mark.parametrize("criterion", WATCHABLE)
@pytest.mark.parametrize("name", ("llama", "gemma2"))
def test_plan_and_operators_are_those_of_separate_passes(name, criterion):
    loaded = models.from_memory(tiny(name))
    plan, statistics = shared(loaded, criterion=criterion)
    assert plan == select(loaded, CALIBRATION, SelectSection(criterion=criterion, prune=2))
    assert statistics is not None and len(list(CALIBRATION.batches())) > 1
    for section in (RECOVER, RecoverSection(operators=OPERATORS, ridge=1e-3, rank=8, ratio="ratio-of-means")):
        apart = recover(loaded, plan, CALIBRATION, HELD_OUT, section)
        given = recover(loaded, plan, CALIBRATION, HELD_OUT, section, gathered=statistics)
        assert [s.to_bytes() for s in given.values()] == [s.to_bytes() for s in apart.values()]


def test_a_ridge_by_cross_validation_and_trained_operators_start_from_them_too(loaded):
    section = RecoverSection(operators=("ghost", "ghost-weighted", "ghost-distilled"), ridge="cv", epochs=1)
    plan, statistics = shared(loaded, section=section)
    assert [len(s.folds) for s in statistics] == [4] * len(plan.removed)
    apart = recover(loaded, plan, CALIBRATION, HELD_OUT, section)
    given = recover(loaded, plan, CALIBRATION, HELD_OUT, section, gathered=statistics)
    assert [s.to_bytes() for s in given.values()] == [s.to_bytes() for s in apart.values()]


def test_both_stages_together_take_one_pass_and_an_eighth(loaded):
    section = RecoverSection(operators=OPERATORS[:-1])  # prune-and-comp tries its fold on a few tokens besides

    def both():
        plan, statistics = shared(loaded, section=section)
        recover(loaded, plan, CALIBRATION, HELD_OUT, section, gathered=statistics)

    count = len(CALIBRATION)
    assert sequences_through(loaded, both) == count // 8 + count + len(HELD_OUT)
    plan = select(loaded, CALIBRATION, SelectSection(prune=2))
    alone = sequences_through(loaded, lambda: recover(loaded, plan, CALIBRATION, HELD_OUT, section))
    assert alone == count + len(HELD_OUT)


def test_a_wrong_guess_leaves_no_statistics_and_the_same_plan(loaded):
    """Seven sequences that the whole set outvotes."""
    section = SelectSection(prune=1)
    plans = {seed: select(loaded, windows(1, seed), section).removed for seed in range(4)}
    other = next(seed for seed in plans if plans[seed] != plans[0])
    tokens = np.concatenate([windows(1).tokens, *[windows(1, other).tokens] * (GUESSING - 1)])
    mixed = CalibrationSet.from_tokens(tokens, CALIBRATION.attention_mask)
    plan, statistics = shared(loaded, mixed, prune=1)
    assert plan.removed == plans[other] and statistics is None
    assert plan == select(loaded, mixed, section)


@pytest.mark.parametrize(
    "chosen, recover",
    [
        ({"spans": ((2, 4),)}, {}),
        ({"criterion": "magnitude", "protect_first": 0, "protect_last": 0}, {}),
        ({"criterion": "lorp"}, {}),
        ({}, {"operators": ("ghost-weighted+refit",)}),
        ({}, {"operators": ("ghost", "ghost-split")}),
        ({}, {"operators": ("replaceme-lstsq",)}),
    ],
)
def test_nothing_is_guessed_or_gathered_where_nobody_could_use_it(loaded, chosen, recover):
    section = RecoverSection(**recover)
    counted = SelectSection(**({"prune": 2} | chosen))
    plain = sequences_through(loaded, lambda: select(loaded, CALIBRATION, counted))
    found = []
    assert sequences_through(loaded, lambda: found.append(shared(loaded, section=section, **chosen))) == plain
    assert found[0][1] is None


@pytest.mark.parametrize("apart", ({"statistics": "sequential"}, {"per_block": True}))
def test_cuts_that_are_not_fitted_on_the_dense_model_share_only_as_a_single_one(loaded, apart):
    section = RecoverSection(operators=("ghost",), **apart)
    model = tiny("llama")
    for index in (1, 3):  # add next to nothing: two cuts
        model.model.layers[index].self_attn.o_proj.weight.data.mul_(0.01)
        model.model.layers[index].mlp.down_proj.weight.data.mul_(0.01)
    two_cuts = models.from_memory(model)
    plan, statistics = shared(two_cuts, section=section, criterion="shortgpt")
    assert len(plan.removed) == 2 and statistics is None
    plan, statistics = shared(two_cuts, criterion="shortgpt")
    assert [s.boundary for s in statistics] == list(plan.boundaries)
    plan, statistics = shared(loaded, section=section)
    own = gather(loaded, plan.boundaries, CALIBRATION, Request(), Execution())
    assert torch.equal(statistics[0].moments.gram, own[0].moments.gram)


@pytest.mark.parametrize("name", ("gost", "ghost-distilled+refit"))
def test_an_operator_that_recovery_will_refuse_is_refused_before_the_pass(loaded, name):
    with pytest.raises(RecipeError, match=name.partition("+")[0]):
        shared(loaded, section=RecoverSection(operators=(name,)))


def test_a_single_sequence_is_guess_and_set_at_once(loaded):
    one = CalibrationSet.from_tokens(CALIBRATION.tokens[:1])
    plan, statistics = shared(loaded, one)
    assert statistics[0].boundary == plan.boundaries[0] and statistics[0].moments.tokens == 40
