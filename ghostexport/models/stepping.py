"""One step of a decoder with its KV cache, whatever this transformers version calls the cache."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def cache_argument(model: Any) -> str:
    """The name under which ``model.forward`` takes the KV cache: ``cache``, in older releases ``past_key_values``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def accepts(model: Any, argument: str) -> bool:
    """Whether ``model.forward`` takes ``argument`` (not every decoder takes ``position_ids``)."""
    return argument in inspect.signature(model.forward).parameters


@torch.no_grad()
def step(
    model: Any, input_ids: torch.Tensor, cache: Any = None, attention_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, Any]:
    """Runs ``(B, T)`` token ids after ``cache``.

    Args:
        model: a causal LM in evaluation mode.
        input_ids: ``(B, T)`` int64.
        cache: what an earlier step returned; None for an empty one.
        attention_mask: ``(B, past + T)`` of 0 and 1; all ones when None. Positions count its ones.

    Returns:
        logits ``(B, T, V)`` in the model's dtype, and the cache, which is the given one, longer.
    """
    arguments: dict[str, Any] = {"input_ids": input_ids, "use_cache": True}
    if attention_mask is not None:
        arguments["attention_mask"] = attention_mask
        if accepts(model, "position_ids"):
            arguments["position_ids"] = positions(attention_mask)[:, -input_ids.shape[1] :]
    if cache is not None:
        arguments[cache_argument(model)] = cache
    output = model(**arguments)
    return output.logits, output[cache_argument(model)]


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Position of every token of ``attention_mask`` ``(B, T)``, counting attended tokens only; 0 for padding."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def cache_tensors(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values ``[B, heads, length, head_dim]`` of every block.

    Raises:
        TypeError: the model keeps something else (recurrent state, compressed KV).
    """
    pairs = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not (isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.ndim == values.ndim == 4):
            raise TypeError(f"{type(layer).__name__} holds no keys and values [batch, heads, length, head_dim]")
        pairs.append((keys, values))
    return pairs
