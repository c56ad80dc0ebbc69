"""Blocks run alone give what they give inside their model, for every architecture, with padding."""

import numpy as np
import pytest
import torch
import transformers

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.models.calls import block_calls, go_on
from ghostexport.recovery.refit.parts import SingleBlock
from ghostexport.recovery.refit.streams import open_streams
from tests.tiny import CONFIGS, tiny


@pytest.mark.parametrize("name", CONFIGS)
def test_block_by_block_is_the_model(name):
    loaded = models.from_memory(tiny(name))
    random = np.random.default_rng(0)
    tokens = CalibrationSet.from_tokens(random.integers(3, 128, (3, 30)), np.arange(30) < np.array([[30], [20], [25]]))
    (batch,) = tokens.batches()
    values = {}
    models.read_residuals(loaded.model, range(7), values.__setitem__, batch.input_ids, batch.attention_mask)
    calls = block_calls(loaded, batch)
    assert len(calls) == 6 and all("forward" not in vars(block) for block in loaded.blocks)
    for index in range(6):
        output = calls[index].on(loaded.blocks[index], values[index])
        output = output if isinstance(output, torch.Tensor) else output[0]
        torch.testing.assert_close(output[batch.mask], values[index + 1][batch.mask], rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        logits = loaded.model(batch.input_ids, attention_mask=batch.attention_mask).logits
    for point in (1, 4, 6):
        went_on = go_on(loaded, batch, point, values[point])
        torch.testing.assert_close(went_on[batch.mask], logits[batch.mask], rtol=1e-4, atol=1e-4)
    assert all("forward" not in vars(block) for block in loaded.blocks)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi"])
def test_the_inside_of_a_block(name):
    """x + c O (+ b) = mid and mid + h V (+ b) = output; blocks without a mid run whole."""
    loaded = models.from_memory(tiny(name))
    (batch,) = CalibrationSet.from_tokens(np.arange(3, 33)[None]).batches()
    x = torch.randn(1, 30, 64, generator=torch.Generator().manual_seed(0))
    block = SingleBlock(loaded, 2)
    ran = block.run(block_calls(loaded, batch)[2], x)
    middle = x + block.attention_output(ran.context)
    if ran.mid is not None:
        torch.testing.assert_close(ran.mid, middle)
        early = block.run(block_calls(loaded, batch)[2], x, until_mid=True)
        assert early.output is None and torch.equal(early.mid, ran.mid)
    torch.testing.assert_close(ran.output, middle + block.mlp_output(ran.inner), rtol=1e-4, atol=1e-5)
    assert (ran.mid is None) == (name == "phi")


def test_streams_are_files_that_vanish(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    loaded = models.from_memory(tiny("llama").to(torch.bfloat16))
    with open_streams(loaded, CalibrationSet.from_tokens(np.ones((5, 7)))) as streams:
        assert streams.dense.shape == (5, 7, 64) and streams.dense.dtype == torch.bfloat16
        streams.repaired.fill_(3)
        sizes = [file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()]
        assert sizes == [5 * 7 * 64 * 2] * 2
    assert not list(tmp_path.iterdir())


def test_blocks_that_return_more_than_the_stream_are_stood_in_for():
    """Bamba's blocks return attention weights beside the stream, its model unpacks both."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attn_layer_indices": [1]}
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
    config = transformers.BambaConfig(**sizes, **heads, **mamba)
    loaded = models.from_memory(transformers.AutoModelForCausalLM.from_config(config).eval())
    tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    (batch,) = CalibrationSet.from_tokens(tokens).batches()
    assert len(block_calls(loaded, batch)) == 3
    seen = {}
    models.read_residuals(loaded.model, [2], lambda index, x: seen.update({index: x.clone()}), tokens)
    with torch.no_grad():
        expected = loaded.model(tokens, use_cache=False).logits
    torch.testing.assert_close(go_on(loaded, batch, 2, seen[2]), expected)
