"""Any weight of a kept block in an operator set: read off a model, through the file, and into a cut model."""

import numpy as np
import pytest
import torch

from ghostexport import models
from ghostexport.errors import ModelLayoutError, RecoveryError, RunFolderError
from ghostexport.files import write_bytes
from ghostexport.models.reweighting import changed_weights
from ghostexport.new_weights import COMPARED, NewWeight, places
from ghostexport.operators import Operator, OperatorSet, load_operators
from ghostexport.plan import PrunePlan
from tests.tiny import tiny

PLAN = PrunePlan.from_spans(6, [(1, 2), (3, 5)])
IDS = torch.arange(24).reshape(2, 12) % 128


def moved(model, seed=0):
    """The model with every parameter moved, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    return model


def bare(weights, plan=PLAN):
    return OperatorSet("tuned", tuple(Operator(b, "none") for b in plan.boundaries), plan, weights=weights)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "mixtral"])
def test_a_cut_and_moved_model_comes_back_through_the_file(tmp_path, name):
    dense = tiny(name)
    cut = moved(models.drop_blocks(tiny(name), PLAN))
    weights = changed_weights(dense, PLAN, cut)
    assert len(weights) == len(list(cut.parameters()))
    write_bytes(tmp_path / "o.safetensors", bare(weights).to_bytes())
    read = load_operators(tmp_path / "o.safetensors")
    assert list(read.weights) == list(weights) and read.to_bytes() == bare(weights).to_bytes()
    before = {key: value.clone() for key, value in dense.state_dict().items()}
    patched = models.insert_operators(models.drop_blocks(dense, PLAN), read)
    with torch.no_grad():
        assert torch.equal(patched(IDS).logits, cut(IDS).logits)
    assert all(torch.equal(dense.state_dict()[key], value) for key, value in before.items())


def test_only_what_changed_is_kept_with_its_dense_name_and_the_dense_numbers():
    dense = tiny("llama")
    cut = models.drop_blocks(tiny("llama"), PLAN)
    with torch.no_grad():
        cut.model.layers[2].mlp.up_proj.weight[3, 5] += 1
        cut.model.norm.weight[0] += 1
    weights = changed_weights(dense, PLAN, cut)
    assert list(weights) == ["model.layers.5.mlp.up_proj.weight", "model.norm.weight"]
    up, norm = weights.values()
    assert (up.block, norm.block) == (5, None)
    flat = dense.model.layers[5].mlp.up_proj.weight.detach().numpy().reshape(-1)
    assert len(up.known) == COMPARED and np.array_equal(up.known, flat[places((96, 64))])
    assert np.array_equal(norm.known, dense.model.norm.weight.detach().numpy())
    assert changed_weights(dense, PLAN, models.drop_blocks(dense, PLAN)) == {}


def test_equal_parameters_of_a_block_are_counted_in_the_order_in_which_they_run():
    dense = tiny("llama")
    with torch.no_grad():
        for block in dense.model.layers:
            block.input_layernorm.weight.fill_(1)
            block.post_attention_layernorm.weight.fill_(1)
    weights = changed_weights(dense, PLAN, moved(models.drop_blocks(tiny("llama"), PLAN)))
    found = {name: (w.twin, w.twins) for name, w in weights.items() if name.startswith("model.layers.2.")}
    assert found.pop("model.layers.2.input_layernorm.weight") == (0, 2)
    assert found.pop("model.layers.2.post_attention_layernorm.weight") == (1, 2)
    assert set(found.values()) == {(0, 1)}


def test_what_does_not_belong_together_is_refused(tmp_path):
    dense, other = tiny("llama"), tiny("llama", intermediate_size=64)
    with pytest.raises(ModelLayoutError, match=r"is \[96, 64\] in the dense model; the cut model has \[64, 64\]"):
        changed_weights(dense, PLAN, models.drop_blocks(other, PLAN))
    weights = changed_weights(dense, PLAN, moved(models.drop_blocks(tiny("llama"), PLAN)))
    with pytest.raises(RecoveryError, match="another shape"):
        models.insert_operators(models.drop_blocks(other, PLAN), bare(weights))
    with pytest.raises(RecoveryError, match="no parameter of this"):
        models.insert_operators(models.drop_blocks(tiny("gpt2"), PLAN), bare(weights))
    cropped = {"model.norm.weight": NewWeight(np.ones(64, np.float32), np.ones(3, np.float32), None)}
    write_bytes(tmp_path / "o.safetensors", bare(cropped).to_bytes())
    with pytest.raises(RunFolderError, match="has 3 known numbers"):
        load_operators(tmp_path / "o.safetensors")
