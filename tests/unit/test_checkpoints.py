"""A checkpoint is loaded whole or refused: no weight is ever random, no block tensor left out unsaid."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ghostexport import models
from ghostexport.errors import ModelLayoutError
from ghostexport.execution import Execution
from tests.tiny import tiny


@pytest.fixture
def folder(tmp_path):
    tiny("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    return tmp_path


def configure(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def test_a_checkpoint_with_fewer_blocks_than_its_configuration_is_refused(folder):
    configure(folder, num_hidden_layers=6)
    with pytest.raises(ModelLayoutError, match=r"lacks tensors .*model\.layers\.4\.input_layernorm.* and 14 more"):
        models.load_model(folder, "float32")


def test_a_missing_tensor_is_refused_by_name(folder):
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelLayoutError, match=r"lacks tensors .*: lm_head\.weight\."):
        models.load_model(folder, "float32")


def test_a_tied_head_may_be_missing(tmp_path):
    model = tiny("llama-tied")
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = models.load_model(tmp_path, "float32")
    tokens = torch.tensor([[1, 5, 9]])
    torch.testing.assert_close(loaded.model(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_block_tensors_without_a_place_are_refused(folder, prefix):
    rewrite(folder, lambda t: t.update({f"{prefix}layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    with pytest.raises(ModelLayoutError, match=r"does not name: .*layers\.0\.self_attn\.q_proj\.bias"):
        models.load_model(folder, "float32")


def test_a_block_too_many_is_refused_unless_it_predicts_further_tokens(folder):
    configure(folder, num_hidden_layers=3)
    with pytest.raises(ModelLayoutError, match=r"does not name: model\.layers\.3\."):
        models.load_model(folder, "float32")
    configure(folder, num_nextn_predict_layers=1)
    said = []
    assert models.load_model(folder, "float32", Execution(say=said.append)).num_blocks == 3
    assert "9 tensors of the checkpoint are left out (multi-token prediction): model.layers.3." in said[0]


def test_other_tensors_without_a_place_are_said(folder):
    rewrite(folder, lambda tensors: tensors.update({"value_head.weight": torch.ones(3)}))
    said = []
    models.load_model(folder, "float32", Execution(say=said.append))
    assert said == ["1 tensors of the checkpoint are left out (no use here): value_head.weight"]


def test_shapes_that_differ_are_refused_with_both(folder):
    configure(folder, intermediate_size=80)
    with pytest.raises(ModelLayoutError, match=r"layers\.0\.mlp\.down_proj\.weight \[64, 96\] for \[64, 80\]"):
        models.load_model(folder, "float32")
