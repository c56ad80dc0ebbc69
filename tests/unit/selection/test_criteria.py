"""Every published criterion against an independent computation from all residual values, gradients or logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import RecipeError
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.selection.choosing import select
from ghostexport.selection.criteria import CRITERIA, best_run, lowest_blocks
from tests.tiny import tiny

NAMES = ("llama-tied", "gemma2", "gpt2", "gpt-neox", "olmo2")


@pytest.fixture(scope="module")
def windows():
    """Seven padded sequences in more than one batch."""
    tokens = np.random.default_rng(0).integers(3, 128, (7, 40))
    mask = np.arange(40) < np.array([40, 40, 30, 40, 25, 40, 40])[:, None]
    return CalibrationSet.from_tokens(np.repeat(tokens, 8, 0), np.repeat(mask, 8, 0))


@pytest.fixture(scope="module", params=NAMES)
def case(request, windows):
    loaded = models.from_memory(tiny(request.param))
    states = {}
    mask = torch.from_numpy(windows.attention_mask)
    ids = torch.from_numpy(windows.tokens)
    models.read_residuals(loaded.model, range(7), lambda point, x: states.__setitem__(point, x.double()), ids, mask)
    return loaded, states, mask.bool()


def choose(loaded, windows, criterion, prune=2, **keys):
    return select(loaded, windows, SelectSection(criterion=criterion, prune=prune, **keys))


def cosine(a, b):
    return (a * b).sum(-1) / a.norm(dim=-1) / b.norm(dim=-1)


def loss(model, windows):
    """Mean next-token loss from Hugging Face's own loss."""
    ids, mask = torch.from_numpy(windows.tokens), torch.from_numpy(windows.attention_mask)
    labels = ids.masked_fill(mask == 0, -100)
    return model(input_ids=ids, attention_mask=mask, labels=labels).loss


def test_streamline_channelwise(case, windows):
    loaded, states, mask = case
    plan = choose(loaded, windows, "streamline-channelwise")
    expected = []
    for s in range(1, 4):
        per_sequence = [cosine(states[s][i][mask[i]].T, states[s + 2][i][mask[i]].T).mean() for i in range(len(mask))]
        expected.append([s, s + 2, float(torch.stack(per_sequence).mean())])
    np.testing.assert_allclose(plan.scores["windows"], expected, rtol=1e-5)
    best = max(expected, key=lambda window: window[2])
    assert [[span.start, span.stop] for span in plan.removed] == [best[:2]]
    assert plan.scores["ranking"]["chosen"][:2] == best[:2] and len(plan.scores["ranking"]["runners_up"]) == 2


def test_shortgpt_and_its_channelwise_port(case, windows):
    loaded, states, mask = case
    bi = [float((1 - cosine(states[b], states[b + 1]))[mask].mean()) for b in range(6)]

    def channelwise(b):
        pairs = [(states[b][i][m].T, states[b + 1][i][m].T) for i, m in enumerate(mask)]
        return 1 - float(torch.stack([cosine(x, y).mean() for x, y in pairs]).mean())

    port = [channelwise(b) for b in range(6)]
    for name, expected, last in (("shortgpt", bi, 6), ("shortgpt-channelwise", port, 5)):
        plan = choose(loaded, windows, name)
        np.testing.assert_allclose(plan.scores["blocks"], expected, rtol=1e-4, atol=1e-6)
        assert removed_blocks(plan) == sorted(np.argsort(expected[:last])[:2])


def removed_blocks(plan):
    return [b for span in plan.removed for b in range(span.start, span.stop)]


def test_angular(case, windows):
    loaded, states, mask = case
    last = mask.sum(1) - 1
    rows = torch.arange(len(mask))
    expected = [
        [s, s + 2, float((cosine(states[s][rows, last], states[s + 2][rows, last]).arccos() / math.pi).mean())]
        for s in range(1, 5)
    ]
    plan = choose(loaded, windows, "angular")
    np.testing.assert_allclose(plan.scores["windows"], expected, rtol=1e-6)
    best = min(expected, key=lambda window: window[2])
    assert [plan.removed[0].start, plan.removed[0].stop] == best[:2]


def test_taylor(case, windows):
    loaded, _, _ = case
    plan = choose(loaded, windows, "taylor", protect_first=0, protect_last=0)
    for parameter in loaded.model.parameters():
        parameter.requires_grad_(True)
    loss(loaded.model, windows).backward()
    expected = [
        sum(float((p * p.grad).detach().abs().sum()) for n, p in block.named_parameters() if "weight" in n)
        for block in loaded.blocks
    ]
    for parameter in loaded.model.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    np.testing.assert_allclose(plan.scores["blocks"], expected, rtol=1e-3)
    assert removed_blocks(plan) == sorted(np.argsort(expected)[:2])


def test_taylor_leaves_no_gradients(case, windows):
    loaded, _, _ = case
    choose(loaded, windows, "taylor", protect_first=1, protect_last=1)
    assert all(p.grad is None and not p.requires_grad for p in loaded.model.parameters())


def test_magnitude(case, windows):
    loaded, _, _ = case
    plan = choose(loaded, windows, "magnitude", protect_first=0, protect_last=0)
    expected = [
        sum(np.abs(v.double().numpy()).sum() for n, v in block.state_dict().items() if "weight" in n)
        for block in loaded.blocks
    ]
    np.testing.assert_allclose(plan.scores["blocks"], expected, rtol=1e-12)


def test_perplexity_and_sleb(case, windows):
    loaded, _, _ = case

    def without(*blocks):
        return float(loss(models.drop_blocks(loaded.model, PrunePlan.from_blocks(6, blocks)), windows))

    plan = choose(loaded, windows, "perplexity", protect_first=0, protect_last=0)
    np.testing.assert_allclose(plan.scores["blocks"], [math.exp(without(b)) for b in range(6)], rtol=1e-4)
    greedy = choose(loaded, windows, "sleb")
    first = min(range(1, 5), key=without)
    second = min((b for b in range(1, 5) if b != first), key=lambda b: without(first, b))
    assert [r["removed"] for r in greedy.scores["rounds"]] == [first, second]
    assert greedy.scores["rounds"][1]["loss"] == pytest.approx(without(first, second), rel=1e-5)
    assert removed_blocks(greedy) == sorted([first, second])
    assert len(greedy.scores["round 1"]) == 4 and len(greedy.scores["round 2"]) == 3


def test_the_papers_plus_protects_four_blocks_and_two(windows):
    loaded = models.from_memory(tiny("llama", num_hidden_layers=9))
    for name in ("taylor", "magnitude", "perplexity"):
        plan = choose(loaded, windows, name)
        assert set(removed_blocks(plan)) <= {4, 5, 6} and len(plan.scores["blocks"]) == 9
        assert sorted(plan.scores["ranking"]["removed"] + plan.scores["ranking"]["runners_up"]) == [4, 5, 6]
        with pytest.raises(RecipeError, match="4 blocks cannot be removed from 9 when the first 4 and the last 2"):
            choose(loaded, windows, name, prune=4)
    worst = choose(loaded, windows, "perplexity", prune=4, protect_first=0, protect_last=0)
    assert len(removed_blocks(worst)) == 4


@pytest.mark.parametrize("criterion", [name for name in CRITERIA if not name.startswith("residual")])
def test_scores_do_not_depend_on_the_batches(criterion, windows, monkeypatch):
    loaded = models.from_memory(tiny("qwen2"))
    keys = {"protect_first": 1, "protect_last": 1}
    few = CalibrationSet.from_tokens(windows.tokens[::8], windows.attention_mask[::8])
    one = choose(loaded, few, criterion, **keys)
    monkeypatch.setattr("ghostexport.calibration.BATCH_TOKENS", 1)
    monkeypatch.setattr(CalibrationSet.batches, "__defaults__", ("cpu", 1))
    other = choose(loaded, few, criterion, **keys)
    assert one.removed == other.removed and one.criterion == criterion
    for key in ("windows", "blocks", "round 1", "round 2"):
        np.testing.assert_allclose(one.scores.get(key, 0), other.scores.get(key, 0), rtol=1e-5, atol=1e-7)


def test_ties_go_to_the_first():
    section = SelectSection(prune=2, protect_first=1, protect_last=1)
    scores = [0.0, 3.0, 1.0, 3.0, 1.0, 1.0, 0.0]
    assert removed_blocks(lowest_blocks("x", scores, section)) == [2, 4]
    assert lowest_blocks("x", scores, section).scores["ranking"] == {"removed": [2, 4], "runners_up": [5, 1, 3]}
    assert removed_blocks(best_run("x", 7, scores[:6], section)) == [1, 2]
    ranking = best_run("x", 7, scores[:6], section, lowest=True).scores["ranking"]
    assert [run[:2] for run in (ranking["chosen"], *ranking["runners_up"])] == [[2, 4], [4, 6], [1, 3], [3, 5]]


def test_of_equal_losses_the_first_block_goes(windows):
    """Blocks 2 and 4 do nothing, so the losses without either are equal to the last bit, and here the lowest."""
    model = tiny("llama")
    for index in (2, 4):
        model.model.layers[index].self_attn.o_proj.weight.data.zero_()
        model.model.layers[index].mlp.down_proj.weight.data.zero_()
    loaded = models.from_memory(model)
    few = CalibrationSet.from_tokens(windows.tokens[::8])
    keys = {"prune": 1, "protect_first": 1, "protect_last": 1}
    for name, base in (("sleb", {}), ("prune-and-comp", {"base": "perplexity"})):
        plan = choose(loaded, few, name, **base, **keys)
        scores = {block: score for block, _, score in plan.scores["round 1"] if 1 <= block <= 4}
        assert scores[2] == scores[4] == min(scores.values())
        assert removed_blocks(plan) == [2]
