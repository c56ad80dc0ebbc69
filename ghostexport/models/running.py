"""Running a model: reading its residual stream on the way, and stepping it with a KV cache whatever that is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ghostexport.models.blocks import StopForwardError, find_blocks, hidden_states, output_states

#: States of recurrent and convolutional blocks, as caches of transformers call them.
STATES = ("conv_states", "recurrent_states")

#: Tokens of more than one chunk of any mixer (the largest is 256), and of no whole number of them.
MANY = 333


def read_residuals(
    model: Any,
    points: Iterable[int],
    visit: Callable[[int, torch.Tensor], None],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> None:
    """Runs the model and hands residual values ``x_l`` ``(B, T, C)`` to ``visit`` as they appear, in depth order.

    ``x_l`` is the input of block ``l``; ``x_L`` (L blocks) is the output of the last block, before the final norm
    (``output_hidden_states`` of Hugging Face shows it after that norm). The pass ends at the largest point: later
    blocks and the output head never run.

    Args:
        model: a causal LM.
        points: the ``l`` wanted, each in ``[0, L]``.
        visit: called as ``visit(l, x_l)``; the tensor is the model's own and must be copied to be kept
            (moved to the device of ``input_ids`` where a split model computes elsewhere).
        input_ids: ``(B, T)`` int64.
        attention_mask: ``(B, T)``, 1 = real token; None when nothing is padded.
    """
    wanted = sorted(set(points))
    blocks = find_blocks(model)
    last = wanted[-1]

    def before(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            visit(index, hidden_states(args, kwargs).to(input_ids.device))
            if index == last:
                raise StopForwardError

        return hook

    def after_last_block(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        visit(len(blocks), output_states(output).to(input_ids.device))
        raise StopForwardError

    # Prepended: a value is read before an operator inserted at the same place changes it.
    handles = [
        blocks[index].register_forward_pre_hook(before(index), with_kwargs=True, prepend=True)
        for index in wanted
        if index < len(blocks)
    ]
    if last == len(blocks):
        handles.append(blocks[-1].register_forward_hook(after_last_block, prepend=True))
    try:
        with torch.no_grad():
            model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    except StopForwardError:
        pass
    finally:
        for handle in handles:
            handle.remove()


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


def holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or a dictionary that holds one."""
    found = value.values() if isinstance(value, dict) else [value]
    return any(isinstance(tensor, torch.Tensor) for tensor in found)


def whole_cache(model: Any) -> Any:
    """An empty cache that keeps every token in every block, sliding-window ones included, and the states of others."""
    from transformers import cache_utils

    named = cache_utils.DynamicCache(config=model.config)
    if not any(isinstance(layer, cache_utils.LinearAttentionLayer) for layer in named.layers):
        return cache_utils.DynamicCache()  # without the configuration it knows no window
    for index, layer in enumerate(named.layers):
        if isinstance(layer, cache_utils.LinearAttentionAndSlidingWindowAttentionLayer):
            named.layers[index] = cache_utils.LinearAttentionAndFullAttentionLayer(layer.number_of_states)
        elif isinstance(layer, cache_utils.DynamicSlidingWindowLayer):
            named.layers[index] = cache_utils.DynamicLayer()
    return named


def keeps_states(cache: Any) -> bool:
    """Whether a block keeps a state of fixed size; see :func:`cache_tensors`."""
    return any(key.startswith(STATES) for tensors in cache_tensors(cache) for key in tensors)


def cache_tensors(cache: Any) -> list[dict[str, torch.Tensor]]:
    """What every block keeps: ``keys`` and ``values`` ``[B, heads, length, head_dim]``, states ``conv_states.0`` ....

    Raises:
        TypeError: the model keeps something else (compressed KV).
    """
    found = []
    for layer in cache.layers:
        own = {key: getattr(layer, key) for key in ("keys", "values") if holds_tensors(getattr(layer, key, None))}
        if len(own) == 1 or any(tensor.ndim != 4 for tensor in own.values()):
            raise TypeError(f"{type(layer).__name__} holds no keys and values [batch, heads, length, head_dim]")
        for kind in STATES:
            states = getattr(layer, kind, None) or {}
            own |= {f"{kind}.{index}": tensor for index, tensor in states.items() if isinstance(tensor, torch.Tensor)}
        if not own:
            raise TypeError(f"{type(layer).__name__} holds no keys, values or states")
        found.append(own)
    return found
