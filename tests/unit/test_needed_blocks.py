"""Blocks that a model cannot be without: their keys and values serve others, or no configuration ends otherwise."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import ModelLayoutError, RecipeError
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.selection.choosing import select

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import tiny_decoders

IDS = torch.arange(1, 25).view(2, 12)


@pytest.fixture(scope="module")
def shared():
    """Six blocks of alternating types; 4 and 5 take the keys and values of 2 and 3."""
    return tiny_decoders.build("gemma4-kv-shared")


def test_donors_and_an_end_that_the_configuration_forces_are_needed(shared):
    assert set(models.needed_blocks(shared)) == {2, 3, 5}
    assert set(models.needed_blocks(tiny_decoders.build("gemma4"))) == {3}
    assert models.needed_blocks(tiny_decoders.build("gemma3")) == {}
    assert set(models.needed_blocks(tiny_decoders.build("nemotron_h"))) == {1}  # its only attention
    assert models.needed_blocks(tiny_decoders.build("lfm2")) == {}


@pytest.mark.parametrize("removed", [[0], [0, 1], [4], [1, 4]])
def test_dropping_others_is_skipping_them_also_after_a_reload(shared, tmp_path, removed):
    pruned = models.drop_blocks(shared, PrunePlan.from_blocks(6, removed))
    skipped = [
        models.find_blocks(shared)[block].register_forward_hook(lambda block, args, output: args[0])
        for block in removed
    ]
    try:
        expected = shared(IDS).logits
    finally:
        for hook in skipped:
            hook.remove()
    torch.testing.assert_close(pruned(IDS).logits, expected)
    models.save_checkpoint(pruned, None, tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    torch.testing.assert_close(again(IDS).logits, expected)
    assert again.config.num_kv_shared_layers == 2 - removed.count(4)


def test_a_donor_is_never_dropped(shared):
    with pytest.raises(ModelLayoutError, match=r"read the keys and values of blocks \[3\]"):
        models.drop_blocks(shared, PrunePlan.from_blocks(6, [3]))


def test_selection_leaves_needed_blocks_out_and_refuses_spans_with_them(shared):
    loaded = models.from_memory(shared)
    tokens = CalibrationSet.from_tokens(np.random.default_rng(0).integers(3, 128, (4, 32)))
    for criterion, gone in (("streamline", [0, 1]), ("shortgpt", [0, 1]), ("angular", [1]), ("sleb", [1])):
        plan = select(loaded, tokens, SelectSection(prune=len(gone), criterion=criterion))
        assert sorted(set(range(6)) - set(plan.kept)) == gone, criterion
    plan = select(loaded, tokens, SelectSection(prune=1, criterion="perplexity", protect_first=0, protect_last=0))
    assert [block for block, score in enumerate(plan.scores["blocks"]) if score is None] == [2, 3, 5]
    assert set(range(6)) - set(plan.kept) < {0, 1, 4}
    with pytest.raises(RecipeError, match="block 3 cannot be removed: later blocks read its keys and values"):
        select(loaded, tokens, SelectSection(spans=[(3, 5)]))
    with pytest.raises(RecipeError, match="cannot be removed"):
        select(loaded, tokens, SelectSection(prune=3, protect_first=2, protect_last=0))
