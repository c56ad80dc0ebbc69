"""What a block adds to its stream is told from what its modules compute, in any dtype."""

import pytest
import torch
import transformers
from torch import nn

from ghostexport import models
from ghostexport.errors import ModelLayoutError
from ghostexport.models.anatomy import probe_calls
from tests.tiny import tiny


def recomputed(model, index):
    """A block's input, output, and its input plus what its anatomy says it adds, from one probe."""
    block = models.find_blocks(model)[index]
    anatomy = models.find_anatomies(model, [index])[index]
    calls = {module: (entered, left) for module, entered, left in probe_calls(model, set(block.modules()))}
    entered, left = calls[block]
    additions = [a for a in (anatomy.mixer, anatomy.mlp, *anatomy.others) if a is not None]
    return left, entered + sum(a.multiplier * calls[a.module][1].view_as(entered) for a in additions)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt2", "gpt-neox", "phi", "olmo2"])
def test_a_block_is_its_input_plus_its_additions(name):
    torch.testing.assert_close(*recomputed(tiny(name), 3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2"])
def test_post_norms_and_the_projections_before_them(name):
    model = tiny(name)
    block = models.find_blocks(model)[2]
    found = models.find_anatomies(model, [2])[2]
    assert (found.mixer.norm, found.mixer.projection) == (block.post_attention_layernorm, block.self_attn.o_proj)
    assert (found.mlp.norm, found.mlp.projection) == (block.post_feedforward_layernorm, block.mlp.down_proj)
    assert found.complete and not found.additive
    assert found.mid is (block.mlp.gate_proj if name == "olmo2" else block.pre_feedforward_layernorm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_massive_channel_hides_nothing(dtype):
    """One channel of the stream is 10^4 times the others; what is added is still told apart."""
    model = tiny("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 7] = 1e4
    model = model.to(dtype)
    block = models.find_blocks(model)[1]
    found = models.find_anatomies(model, [1])[1]
    assert found.additive and found.mid is block.post_attention_layernorm


def test_a_constant_multiplier_is_exact():
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = transformers.GraniteConfig(num_hidden_layers=3, residual_multiplier=0.22, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    found = models.find_anatomies(model, [1])[1]
    assert not found.additive and found.complete
    assert (found.mixer.multiplier, found.mlp.multiplier) == (0.22, 0.22)
    assert found.mid is models.find_blocks(model)[1].post_attention_layernorm


def test_values_changed_in_place_are_seen_as_they_were():
    """Falcon adds attention's result to the MLP's in place, then the stream."""
    model = tiny("phi")

    def forward(self, hidden_states, **kwargs):
        x = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=x, **kwargs)
        output = self.mlp(x)
        output += attended
        output += hidden_states
        return output

    block = models.find_blocks(model)[3]
    block.forward = forward.__get__(block)
    found = models.find_anatomies(model, [3])[3]
    assert found.additive and (found.attention_output, found.mlp_output) == (block.self_attn.dense, block.mlp.fc2)


def test_a_block_that_adds_once_has_no_mlp():
    model = tiny("llama")
    block = models.find_blocks(model)[2]

    class Silent(nn.Module):
        def forward(self, x):
            return torch.zeros_like(x)

    block.mlp = Silent()
    found = models.find_anatomies(model, [2])[2]
    assert found.mlp is None and found.mixer.projection is block.self_attn.o_proj and found.complete
    with pytest.raises(ModelLayoutError, match="no single attention output and MLP output"):
        models.find_projections(model, 2)
