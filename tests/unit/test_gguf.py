"""GGUF files of several architectures, written here tensor by tensor as llama.cpp lays them out, and their origin."""

import gguf
import numpy as np
import pytest
import torch

from ghostexport import models
from ghostexport.errors import ModelLayoutError
from tests.tiny import tiny

#: Ends of GGUF names -> of transformers'.
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PLAIN = {"ffn_norm": "post_attention_layernorm"}
GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
#: Architecture in the file -> names of its own beside those.
OWN = {"llama": PLAIN, "qwen2": PLAIN, "gemma2": GEMMA, "gemma3": GEMMA | QK_NORMS}


def interleaved(weight, heads):
    """llama.cpp rotates neighbouring channels of Llama's heads, transformers the two halves."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def scale_rope(file, arch, rope, head_dim):
    """As llama.cpp's converter writes it: Llama 3's divisors as a tensor, other kinds as settings."""
    if rope.get("rope_type", "default") == "default":
        return
    if rope["rope_type"] != "llama3":
        file.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        file.add_rope_scaling_factor(rope["factor"])
        file.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 0))
        return
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    long, short = (rope["original_max_position_embeddings"] / rope[f"{key}_freq_factor"] for key in ("low", "high"))
    smooth = (rope["original_max_position_embeddings"] / wavelengths - 1) / 3  # from 1 to 4
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    divisors = np.where(wavelengths > long, rope["factor"], np.where(wavelengths < short, 1.0, between))
    file.add_tensor("rope_freqs.weight", divisors.astype(np.float32))


def write_gguf(model, path, arch, without=()):
    config, state = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    file = gguf.GGUFWriter(path, arch)
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    file.add_key_length(head_dim)
    file.add_value_length(head_dim)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    file.add_rope_freq_base(rope["rope_theta"])
    scale_rope(file, arch, rope, head_dim)
    if "gemma" in arch:
        file.add_sliding_window(config.sliding_window)
    tokens = ["<unk>", "<s>", "</s>", *(f"t{number}" for number in range(config.vocab_size - 3))]
    file.add_tokenizer_model("llama")
    file.add_token_list(tokens)
    file.add_token_scores([0.0] * len(tokens))
    file.add_token_types([2, 3, 3] + [1] * (len(tokens) - 3))
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    tensors = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not config.tie_word_embeddings:
        tensors["output.weight"] = "lm_head.weight"
    for block in range(config.num_hidden_layers):
        for short, long in (NAMES | OWN[arch]).items():
            for part in ("weight", "bias"):
                if (name := f"model.layers.{block}.{long}.{part}") in state:
                    tensors[f"blk.{block}.{short}.{part}"] = name
    for short, long in tensors.items():
        value = state[long]
        if arch == "llama" and ".attn_q." in short:
            value = interleaved(value, config.num_attention_heads)
        if arch == "llama" and ".attn_k." in short:
            value = interleaved(value, config.num_key_value_heads)
        if "gemma" in arch and short.endswith("norm.weight"):
            value = value + 1  # transformers adds 1 to the gain when it runs
        if short not in without:
            file.add_tensor(short, np.ascontiguousarray(value, dtype=np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
GLOBAL = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
SCALED = [
    ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192}}),
    ("qwen2", {"rope_parameters": YARN}),
    (
        "gemma3",
        {
            "rope_parameters": {"full_attention": GLOBAL, "sliding_attention": {"rope_theta": 1e4}},
            "num_hidden_layers": 6,  # the sixth is the first of full attention, in every Gemma 3
        },
    ),
]


@pytest.mark.parametrize(("arch", "own"), [*((arch, {}) for arch in OWN), *SCALED])
def test_a_gguf_file_is_the_model_it_was_written_from(arch, own, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tiny(arch, **{"num_hidden_layers": 3} | own)
    write_gguf(model, tmp_path / "model.gguf", arch)
    loaded = models.load_model(tmp_path / "model.gguf", "float32")
    assert type(loaded.model) is type(model) and loaded.num_blocks == model.config.num_hidden_layers
    ids = torch.arange(3, 33).view(2, 15)  # past the sliding window of 8
    torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert loaded.tokenizer.convert_tokens_to_ids("t5") == 8


def test_a_gguf_file_without_one_of_its_tensors_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tiny("qwen2", num_hidden_layers=2), tmp_path / "m.gguf", "qwen2", without=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelLayoutError, match=r"lacks tensors .*model\.layers\.1\.mlp\.up_proj\.weight"):
        models.load_model(tmp_path / "m.gguf", "float32")
    assert not list((tmp_path / "cache" / "ghostexport" / "gguf").iterdir())
