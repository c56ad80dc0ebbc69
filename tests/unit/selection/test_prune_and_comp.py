"""Prune&Comp: rounds against a direct loop with the published fold of embeddings and projections before j."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import RecipeError, RecoveryError
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.selection.choosing import select
from ghostexport.selection.trials import compensated
from tests.tiny import tiny

TOKENS = np.random.default_rng(3).integers(3, 128, (6, 30))
WINDOWS = CalibrationSet.from_tokens(TOKENS)


def states(model):
    found = {}
    models.read_residuals(
        model,
        range(len(models.find_blocks(model)) + 1),
        lambda point, x: found.__setitem__(point, x.double()),
        torch.from_numpy(TOKENS),
    )
    return found


def score(model, base):
    blocks = models.find_blocks(model)
    ids = torch.from_numpy(TOKENS)
    if base == "shortgpt":
        x = states(model)
        return [
            float(1 - torch.nn.functional.cosine_similarity(x[b], x[b + 1], dim=-1).mean()) for b in range(len(blocks))
        ]
    if base == "magnitude":
        return [sum(float(p.abs().sum()) for n, p in b.named_parameters() if "weight" in n) for b in blocks]
    if base == "perplexity":
        count = len(blocks)
        rest = (models.drop_blocks(model, PrunePlan.from_blocks(count, [b])) for b in range(count))
        return [math.exp(float(m(input_ids=ids, labels=ids).loss)) for m in rest]
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return [
        sum(float((p * p.grad).detach().abs().sum()) for n, p in block.named_parameters() if "weight" in n)
        for block in blocks
    ]


def published(model, base, count):
    """The loop of the paper on an untied copy: delete j, scale embeddings, o_proj and down_proj before it."""
    model = copy.deepcopy(model)
    alive, removed, scales = list(range(6)), [], []
    for _ in range(count):
        ranked = score(model, base)
        j = min((p for p, b in enumerate(alive) if 1 <= b <= 4), key=lambda p: ranked[p])
        x = states(model)
        alpha = float((x[j + 1].abs().mean(1) / x[j].abs().mean(1)).mean())
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(alpha)
            for block in list(models.find_blocks(model))[:j]:
                block.self_attn.o_proj.weight.mul_(alpha)
                block.mlp.down_proj.weight.mul_(alpha)
        model = models.drop_blocks(model, PrunePlan.from_blocks(len(alive), [j]))
        removed.append(alive.pop(j))
        scales.append(alpha)
    return removed, scales


@pytest.mark.parametrize("base", ["shortgpt", "taylor", "magnitude", "perplexity"])
def test_rounds_equal_the_published_loop(base):
    model = tiny("llama", rms_norm_eps=1e-9)
    loaded = models.from_memory(copy.deepcopy(model))
    section = SelectSection(criterion="prune-and-comp", base=base, prune=3, protect_first=1, protect_last=1)
    plan = select(loaded, WINDOWS, section)
    removed, scales = published(model, base, 3)
    assert [r["removed"] for r in plan.scores["rounds"]] == removed
    np.testing.assert_allclose([r["scale"] for r in plan.scores["rounds"]], scales, rtol=1e-4)
    assert len(plan.scores["round 3"]) == 4 and plan.scores["base"] == base


def test_protection_is_that_of_the_base_and_refusals():
    loaded = models.from_memory(tiny("llama"))
    with pytest.raises(RecipeError, match="first 4 and the last 2 are protected"):
        select(loaded, WINDOWS, SelectSection(criterion="prune-and-comp", base="taylor", prune=1))
    with pytest.raises(RecipeError, match="Did you mean 'taylor'"):
        select(loaded, WINDOWS, SelectSection(criterion="prune-and-comp", base="tailor", prune=1))
    with pytest.raises(RecoveryError, match="its blocks read the stream without a norm"):
        select(models.from_memory(tiny("olmo2")), WINDOWS, SelectSection(criterion="prune-and-comp", prune=2))


def test_the_scale_at_a_cut_is_the_product_over_its_blocks():
    """Blocks 1, 2 and 4 of six: the stream is multiplied by 1.5 x 0.5 where block 3 begins, and by 3 before block 5."""
    model = tiny("llama")
    current = compensated(models.from_memory(model), PrunePlan.from_blocks(6, [1, 2, 4]), {4: 3.0, 1: 1.5, 2: 0.5})
    by_hand = models.drop_blocks(model, PrunePlan.from_blocks(6, [1, 2, 4]))
    for position, scale in ((1, 0.75), (2, 3.0)):
        models.find_blocks(by_hand)[position].register_forward_pre_hook(
            lambda module, args, kwargs, scale=scale: ((args[0] * scale, *args[1:]), kwargs), with_kwargs=True
        )
    ids = torch.from_numpy(TOKENS)
    with torch.no_grad():
        expected = by_hand(input_ids=ids).logits
        torch.testing.assert_close(current.model(input_ids=ids).logits, expected, rtol=1e-3, atol=1e-4)
    assert len(current.blocks) == 3
