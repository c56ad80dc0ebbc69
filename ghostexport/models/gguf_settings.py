"""What GGUF files say or leave to their readers, and transformers does not read: attention scale, rotary scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ghostexport.errors import ModelLayoutError

#: Depths of Gemma 2 27B and Gemma 3 27B, whose queries are scaled by another number than the head size (llama.cpp).
_LARGE_GEMMAS = (46, 62)

#: Llama 3.1 to 3.3: all have these; the factor is in the file.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

_REMEDY = "Use a Hugging Face checkpoint of the model."


def complete_config(config: Any, file: Path) -> None:
    """Sets in a configuration, as transformers read it from ``file``, what it left out.

    Raises:
        ModelLayoutError: the file scales rotary positions in a way that no setting here says.
    """
    import gguf

    reader = gguf.GGUFReader(file)
    arch = reader.fields["general.architecture"].contents()
    tensors = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name.startswith("rope_")}
    if hasattr(config, "query_pre_attn_scalar"):
        large = config.num_hidden_layers in _LARGE_GEMMAS
        config.query_pre_attn_scalar = (
            config.hidden_size // config.num_attention_heads if large else int(config.head_dim)
        )
    field = reader.fields.get(f"{arch}.rope.scaling.type")
    kind = "none" if field is None else field.contents()
    if "rope_freqs.weight" in tensors:
        _set_rope(config, _llama3(config, np.asarray(tensors["rope_freqs.weight"], np.float64), file))
    elif kind == "linear":
        _set_rope(config, {"rope_type": "linear", "factor": _number(reader, f"{arch}.rope.scaling.factor")})
    elif kind == "yarn" and arch != "gpt-oss":  # transformers reads that one
        length = int(_number(reader, f"{arch}.rope.scaling.original_context_length"))
        factor = _number(reader, f"{arch}.rope.scaling.factor")
        _set_rope(config, {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length})
    elif tensors or kind not in ("none", "yarn"):
        what = sorted(tensors)[0] if tensors else f"{arch}.rope.scaling.type = {kind}"
        raise ModelLayoutError(f"{file} scales rotary positions by {what}, which is not read here.", _REMEDY)


def _number(reader: Any, key: str) -> float:
    return float(reader.fields[key].contents())


def _set_rope(config: Any, values: dict[str, Any]) -> None:
    """In the rotary parameters; where each type of attention has its own, in those of full attention (Gemma 3)."""
    config.rope_parameters.get("full_attention", config.rope_parameters).update(values)


def _llama3(config: Any, divisors: Any, file: Path) -> dict[str, Any]:
    """The settings that give the file's divisors of the frequencies ``[head_dim / 2]``."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {"rope_type": "llama3", "factor": float(divisors.max()), **_LLAMA3}
    plain = dict(config.rope_parameters)
    frequencies = float(plain["rope_theta"]) ** (-np.arange(len(divisors)) / len(divisors))
    config.rope_parameters.update(settings)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    config.rope_parameters = plain
    if len(scaled) != len(divisors) or not np.allclose(frequencies / divisors, scaled.double().numpy(), rtol=1e-4):
        raise ModelLayoutError(f"{file} scales rotary positions by rope_freqs.weight, not as Llama 3 does.", _REMEDY)
    return settings
