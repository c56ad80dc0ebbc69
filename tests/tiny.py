"""Tiny random causal LMs built from Hugging Face configs: no downloads, a few hundred kB each.

Norm weights are randomised: exporters merge equal tensors, and untouched norms (all ones) would hide bugs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

_COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GQA = _COMMON | {"num_key_value_heads": 2, "head_dim": 16}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GQA | {"tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", _GQA | {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", _GQA | {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", _GQA | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", _GQA | {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", _GQA | {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3TextConfig", _GQA | {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gpt-neox": ("GPTNeoXConfig", _COMMON | {"use_parallel_residual": True}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 128, "n_embd": 64, "n_layer": 6, "n_head": 4, "n_positions": 256}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "phi": ("PhiConfig", _COMMON | {"partial_rotary_factor": 0.5}),
    "olmo2": ("Olmo2Config", _GQA),
}

#: Shapes of blocks beside those: multipliers, additions in place, parallel blocks, experts, transposed inner norms.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "granite": ("GraniteConfig", _GQA | {"residual_multiplier": 0.22}),
    "falcon": ("FalconConfig", _COMMON | {"parallel_attn": False, "alibi": False, "bias": False}),
    "falcon-parallel": ("FalconConfig", _COMMON | {"parallel_attn": True, "alibi": False, "bias": False}),
    "llama4": (  # complex rotary factors, attention in chunks
        "Llama4TextConfig",
        _GQA | {"intermediate_size_mlp": 96, "moe_layers": [], "attention_chunk_size": 16, "no_rope_layers": [1, 0]},
    ),
    "cohere": ("CohereConfig", _GQA),
    "persimmon": ("PersimmonConfig", _COMMON),
    "mixtral": ("MixtralConfig", _GQA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        _GQA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]},
    ),
}


def tiny(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Builds the tiny model ``name`` of :data:`CONFIGS` or :data:`SHAPES`, float32, evaluation mode, from ``seed``."""
    config_class, values = (CONFIGS | SHAPES)[name]
    config = getattr(transformers, config_class)(**(values | overrides))
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


def tiny_folder(path: Path, name: str = "llama-tied", **overrides: Any) -> Path:
    """Saves a tiny model with a byte-level tokenizer as a Hugging Face folder and returns the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=259, special_tokens=special, initial_alphabet=alphabet)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tiny(name, **({"vocab_size": 264} | overrides)).save_pretrained(path)
    fast.save_pretrained(path)
    return path
