"""Tiny random models of every decoder family of transformers: what ``architectures.py`` runs through the pipeline.

``build("qwen3_next")`` makes four blocks of width 64 with all weights random, norms and biases included:
exporters merge equal tensors, and untouched ones would hide faults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 264

#: What every configuration gets; each takes what it knows.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_NO_HEAD_DIM = {key: value for key, value in COMMON.items() if key not in ("head_dim", "num_key_value_heads")}
_MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
}
#: Compressed attention (MLA).
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
}
_SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_NOT_A_CONFIG = "only"

#: Name -> model type, and what its configuration gets beside :data:`COMMON` (alone, where it says so).
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    # dense, pre-norm
    "llama": ("llama", {}),
    "llama-rope-llama3": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
    "llama-rope-yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 128}}),
    "llama-rope-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "biogpt": ("biogpt", {}),
    "bitnet": ("bitnet", {}),
    "bloom": ("bloom", {"n_head": 4}),
    "codegen": ("codegen", {_NOT_A_CONFIG: _NO_HEAD_DIM, "rotary_dim": 8, "n_ctx": 512}),
    "cwm": ("cwm", _SLIDING),
    "diffllama": ("diffllama", {}),
    "doge": ("doge", {}),
    "ernie4_5": ("ernie4_5", {}),
    "falcon": ("falcon", {_NOT_A_CONFIG: _NO_HEAD_DIM, "ffn_hidden_size": 96, "multi_query": True, "alibi": False}),
    "falcon-alibi": ("falcon", {_NOT_A_CONFIG: _NO_HEAD_DIM, "ffn_hidden_size": 96, "alibi": True, "bias": True,
        "multi_query": False, "parallel_attn": False}),
    "fuyu-text": ("persimmon", {}),
    "gemma": ("gemma", {}),
    "glm": ("glm", {"partial_rotary_factor": 0.5}),
    "gpt2": ("gpt2", {}),
    "gpt_bigcode": ("gpt_bigcode", {"multi_query": True}),
    "gpt_neo": ("gpt_neo", {_NOT_A_CONFIG: {k: v for k, v in _NO_HEAD_DIM.items() if "num_" not in k}, "num_layers": 4,
        "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 16}),
    "gpt_neox": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox-parallel": ("gpt_neox", {"use_parallel_residual": True}),
    "gpt_neox_japanese": ("gpt_neox_japanese", {}),
    "gptj": ("gptj", {_NOT_A_CONFIG: _NO_HEAD_DIM, "rotary_dim": 8}),
    "helium": ("helium", {}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "jais2": ("jais2", {}),
    "ministral": ("ministral", _SLIDING),
    "ministral3": ("ministral3", {}),
    "mistral": ("mistral", {"sliding_window": 16}),
    "modernbert-decoder": ("modernbert-decoder", {}),
    "mpt": ("mpt", {"expansion_ratio": 2}),
    "nanochat": ("nanochat", {}),
    "nemotron": ("nemotron", {}),
    "olmo": ("olmo", {}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "phi": ("phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    "phi3": ("phi3", {}),
    "phi3-sliding": ("phi3", {"sliding_window": 16}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25}),
    "stablelm-parallel": ("stablelm", {"partial_rotary_factor": 0.25, "use_parallel_residual": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 16}),
    "xglm": ("xglm", {"d_model": 64, "ffn_dim": 96, "attention_heads": 4, "num_layers": 4}),
    # post-norm, residual multipliers, parallel
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "cohere2": ("cohere2", _SLIDING),
    "exaone4": ("exaone4", _SLIDING),
    "gemma2": ("gemma2", {**_SLIDING, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {**_SLIDING, "query_pre_attn_scalar": 16}),
    "gemma3n": ("gemma3n_text", {**_SLIDING, "intermediate_size": [96] * 4, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 4,
        "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4}),
    "gemma4": ("gemma4_text", {**_SLIDING, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
        "global_head_dim": 32}),
    "gemma4-kv-shared": ("gemma4_text", {**_SLIDING, "num_hidden_layers": 6, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 32}),
    "gemma4-per-layer-inputs": ("gemma4_text", {**_SLIDING, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 32}),
    "glm4": ("glm4", {"partial_rotary_factor": 0.5}),
    "granite": ("granite", {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0625,
        "logits_scaling": 8.0}),
    "granite_swa": ("granite_swa", {"residual_multiplier": 0.22}),
    "minicpm3": ("minicpm3", {**_MLA, "head_dim": 24, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _SLIDING),
    "openai-gpt": ("openai-gpt", {}),
    "vaultgemma": ("vaultgemma", _SLIDING),
    # mixtures of experts
    "afmoe": ("afmoe", {**_MOE, "num_dense_layers": 1, "num_shared_experts": 1, "sliding_window": 16}),
    "aria": ("aria_text", {**_MOE, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}),
    "beam": ("beam", {**_MOE, "sliding_window": 16}),
    "cohere2_moe": ("cohere2_moe", {**_MOE, **_SLIDING}),
    "dbrx": ("dbrx", {_NOT_A_CONFIG: {"vocab_size": VOCABULARY}, "d_model": 64, "n_heads": 4, "n_layers": 4,
        "max_seq_len": 512, "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}}),
    "deepseek_v2": ("deepseek_v2", {**_MOE, **_MLA, "first_k_dense_replace": 1}),
    "deepseek_v3": ("deepseek_v3", {**_MOE, **_MLA, "first_k_dense_replace": 1}),
    "dots1": ("dots1", {**_MOE, "first_k_dense_replace": 1}),
    "ernie4_5_moe": ("ernie4_5_moe", {**_MOE, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1, "moe_layer_interval": 1}),
    "exaone_moe": ("exaone_moe", {**_MOE, **_SLIDING, "num_shared_experts": 1}),
    "flex_olmo": ("flex_olmo", _MOE),
    "glm4_moe": ("glm4_moe", {**_MOE, "first_k_dense_replace": 1}),
    "glm4_moe_lite": ("glm4_moe_lite", {**_MOE, **_MLA, "first_k_dense_replace": 1}),
    "gpt_oss": ("gpt_oss", {**_MOE, **_SLIDING}),
    "granitemoe": ("granitemoe", {**_MOE, "residual_multiplier": 0.22}),
    "granitemoeshared": ("granitemoeshared", {**_MOE, "shared_intermediate_size": 48}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {**_MOE, "moe_topk": 2}),
    "hy_v3": ("hy_v3", {**_MOE, "num_shared_experts": 1}),
    "jetmoe": ("jetmoe", {**_MOE, "kv_channels": 16}),
    "laguna": ("laguna", {**_MOE, **_SLIDING}),
    "llama4": ("llama4_text", {**_MOE, "num_experts_per_tok": 1, "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 64, "no_rope_layers": [1, 1, 1, 0]}),
    "mellum": ("mellum", {**_MOE, **_SLIDING}),
    "mimo_v2_flash": ("mimo_v2_flash", {**_MOE, **_SLIDING}),
    "minimax_m2": ("minimax_m2", _MOE),
    "mixtral": ("mixtral", _MOE),
    "olmoe": ("olmoe", _MOE),
    "phimoe": ("phimoe", _MOE),
    "qwen2_moe": ("qwen2_moe", {**_MOE, "decoder_sparse_step": 1, "mlp_only_layers": [1]}),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "decoder_sparse_step": 1, "mlp_only_layers": [1]}),
    "solar_open": ("solar_open", _MOE),
    "zaya": ("zaya", {**_MOE, "num_experts_per_tok": 1, "router_hidden_size": 32}),
    # compressed, indexed or hyper-connected attention
    "axk1": ("axk1", {**_MOE, **_MLA}),
    "deepseek_v32": ("deepseek_v32", {**_MOE, **_MLA, "first_k_dense_replace": 1, "index_n_heads": 2,
        "index_head_dim": 16, "index_topk": 8}),
    "glm_moe_dsa": ("glm_moe_dsa", {**_MOE, **_MLA, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}),
    "longcat_flash": ("longcat_flash", {**_MOE, **_MLA, "num_layers": 4, "ffn_hidden_size": 96, "moe_topk": 2,
        "zero_expert_num": 2, "expert_ffn_hidden_size": 48}),
    "youtu": ("youtu", _MLA),
    # hybrid and recurrent
    "bailing_hybrid": ("bailing_hybrid", {**_MOE, **_MLA, "head_dim": 16, "first_k_dense_replace": 1,
        "layer_types": ["linear_attention", "full_attention"] * 2, "q_lora_rank": None}),
    "bamba": ("bamba", {**_MAMBA, "attn_layer_indices": [1, 3]}),
    "falcon_h1": ("falcon_h1", {**_MAMBA, "mamba_d_ssm": 128, "mamba_chunk_size": 16}),
    "falcon_mamba": ("falcon_mamba", {"state_size": 8}),
    "granitemoehybrid": ("granitemoehybrid", {**_MAMBA, "num_local_experts": 0, "shared_intermediate_size": 96,
        "layer_types": ["mamba", "attention"] * 2, "residual_multiplier": 0.22}),
    "granitemoehybrid-experts": ("granitemoehybrid", {**_MAMBA, **_MOE, "shared_intermediate_size": 48,
        "layer_types": ["mamba", "attention"] * 2}),
    "jamba": ("jamba", {**_MOE, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 8}),
    "kimi_linear": ("kimi_linear", {**_MOE, **_MLA, "q_lora_rank": None, "head_dim": 16, "linear_head_dim": 16,
        "linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention"] * 2}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "lfm2_moe": ("lfm2_moe", {**_MOE, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1}),
    "mamba": ("mamba", {"state_size": 8}),
    "mamba2": ("mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16}),
    "minimax": ("minimax", {**_MOE, "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 16}),
    "nemotron_h": ("nemotron_h", {**_MOE, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8,
        "n_groups": 1, "chunk_size": 16, "layers_block_type": ["mamba", "attention", "mamba", "mlp"]}),
    "olmo_hybrid": ("olmo_hybrid", _LINEAR),
    "qwen3_5": ("qwen3_5_text", _LINEAR),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**_LINEAR, **_MOE}),
    "qwen3_next": ("qwen3_next", {**_LINEAR, **_MOE}),
    "recurrent_gemma": ("recurrent_gemma", {"block_types": ["recurrent", "attention"], "lru_width": 64,
        "attention_window_size": 16}),
    "rwkv": ("rwkv", {"attention_hidden_size": 64}),
    "xlstm": ("xlstm", {_NOT_A_CONFIG: {k: v for k, v in COMMON.items() if k != "head_dim"}, "num_heads": 4,
        "qk_dim_factor": 1.0, "chunk_size": 16}),
    "zamba": ("zamba", {"num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid"] * 2,
        "attention_head_dim": 32, "n_mamba_heads": 2, "mamba_d_state": 8, "use_mamba_kernels": False}),
    "zamba2": ("zamba2", {"num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid", "mamba"] * 2,
        "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 16, "mamba_ngroups": 1, "chunk_size": 16,
        "use_mamba_kernels": False, "num_mem_blocks": 1, "adapter_rank": 8}),
    # not decoder-only: refused
    "bert": ("bert", {}),
    "t5": ("t5", {"d_model": 64, "num_layers": 4, "num_heads": 4, "d_ff": 96, "d_kv": 16}),
}  # fmt: skip


def configuration(name: str) -> Any:
    """The configuration of decoder ``name``, a key of :data:`DECODERS`."""
    kind, own = DECODERS[name]
    values = dict(own.get(_NOT_A_CONFIG, COMMON))
    values |= {key: value for key, value in own.items() if key != _NOT_A_CONFIG}
    return transformers.AutoConfig.for_model(kind, **values)


def build(name: str, seed: int = 0) -> Any:
    """The model in float32 and evaluation mode, every weight random from ``seed``."""
    config = configuration(name)
    torch.manual_seed(seed)
    model = _kind(config).from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if any(part in key for part in ("A_log", "dt_bias", "dt_proj", "recurrent_param")):
                continue  # recurrences are only stable in the range their initialisation gives
            if parameter.ndim == 1:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


def save(name: str, folder: Path, dtype: str = "float32") -> None:
    """Writes the model and a byte-level tokenizer as a Hugging Face folder."""
    build(name).to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def tokenizer() -> Any:
    """Bytes, and three special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special, alphabet = ["<pad>", "<s>", "</s>"], pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([], trainers.BpeTrainer(vocab_size=259, special_tokens=special, initial_alphabet=alphabet))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def _kind(config: Any) -> Any:
    return {"t5": transformers.AutoModelForSeq2SeqLM, "bert": transformers.AutoModelForMaskedLM}.get(
        config.model_type, transformers.AutoModelForCausalLM
    )
