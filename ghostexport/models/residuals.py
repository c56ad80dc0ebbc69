"""Reading the residual stream while a model runs, and stopping it after the last value that is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ghostexport.models.blocks import find_blocks, hidden_states, output_states


class _StopForwardError(Exception):
    """Raised inside a hook to leave a forward pass; never seen outside this file."""


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
                raise _StopForwardError

        return hook

    def after_last_block(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        visit(len(blocks), output_states(output).to(input_ids.device))
        raise _StopForwardError

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
    except _StopForwardError:
        pass
    finally:
        for handle in handles:
            handle.remove()
