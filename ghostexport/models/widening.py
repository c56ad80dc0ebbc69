"""Half-precision models computing in float32, a block at a time: no second copy of the model is ever held."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ghostexport.models.blocks import find_blocks

_HALF = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def widened(model: Any) -> Iterator[Any]:
    """Inside, ``model`` computes exactly as ``model.float()`` would, and its weights are as before afterwards.

    What is around the blocks is widened throughout, a block's weights while it runs. So memory holds the model, and
    the embedding, the head and one block once more in float32.
    """
    blocks = find_blocks(model)
    inside = {id(tensor) for tensor in (*blocks.parameters(), *blocks.buffers())}
    around = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in inside]
    narrow: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def widen(block: nn.Module, args: Any) -> None:
        narrow[block] = _widen([*block.parameters(), *block.buffers()])

    def restore(block: nn.Module, args: Any, output: Any) -> None:
        _restore(narrow.pop(block, []))

    kept = _widen(around)
    # before what is inserted at the block's start, and after what is inserted at its end
    handles = [block.register_forward_pre_hook(widen, prepend=True) for block in blocks]
    handles += [block.register_forward_hook(restore) for block in blocks]
    try:
        yield model
    finally:
        for handle in handles:
            handle.remove()
        for own in (*narrow.values(), kept):
            _restore(own)


def _widen(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Makes half-precision tensors float32 in place, each once; returns them with what they were."""
    found = []
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        if tensor.dtype in _HALF:
            found.append((tensor, tensor.data))
            tensor.data = tensor.data.float()
    return found


def _restore(kept: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for tensor, before in kept:
        tensor.data = before
