"""The parts of a decoder block that repairs touch, found by what they compute, not by their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ghostexport.errors import ModelLayoutError
from ghostexport.models.blocks import find_blocks, probe_tokens

#: Relative agreement of one sum with another order of the same additions in float32; halved digits in 16-bit formats.
SUM_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8, torch.float16: 2e-2, torch.bfloat16: 1e-1}


#: A module, what it read and what it returned.
Call = tuple[nn.Module, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Projections:
    """The two linear layers of a block whose results are added to the residual stream.

    Attributes:
        attention_output, mlp_output: ``nn.Linear`` (weight ``[out, in]``) or GPT-2's ``Conv1D`` (weight ``[in, out]``).
        additive: whether the block's output is exactly its input plus the two results. False for post-norm blocks
            (Gemma 2 and 3, OLMo 2), where a norm stands between a projection and the addition.
    """

    attention_output: Any
    mlp_output: Any
    additive: bool


def right_multiply(projection: Any) -> torch.Tensor:
    """The weight ``[in, out]`` of a linear layer, a view of its own, whichever way round the layer keeps it."""
    weight: torch.Tensor = projection.weight
    return weight.T if isinstance(projection, nn.Linear) else weight


def set_right_multiply(projection: Any, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Gives a linear layer new parameters: ``weight`` ``[in, out]`` and, unless None, ``bias`` ``[out]``."""
    weight = weight.T.contiguous() if isinstance(projection, nn.Linear) else weight
    projection.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        projection.bias = nn.Parameter(bias, requires_grad=False)


def find_projections(model: Any, index: int) -> Projections:
    """Finds them by one probe pass: of the linear layers that run, the last of width C inside and outside attention.

    Raises:
        ModelLayoutError: the block has none, or a mixture of experts instead of one MLP.
    """
    return find_all_projections(model, [index])[index]


def find_all_projections(model: Any, indices: Iterable[int]) -> dict[int, Projections]:
    """:func:`find_projections` of several blocks, in one probe pass.

    Raises:
        ModelLayoutError: a block has none, or a mixture of experts instead of one MLP.
    """
    indices = list(indices)
    if not indices:
        return {}
    blocks = find_blocks(model)
    modules: set[nn.Module] = set()
    for index in indices:
        modules |= {blocks[index], *(m for m in blocks[index].modules() if isinstance(m, nn.Linear | Conv1D))}
    calls = probe_calls(model, modules)
    return {index: _projections(model, index, blocks[index], calls) for index in indices}


def _projections(model: Any, index: int, block: nn.Module, calls: Sequence[Call]) -> Projections:
    width = int(model.config.get_text_config().hidden_size)
    attention, own = _attention_modules(block), set(block.modules())
    entered, left = next((entered, left) for module, entered, left in calls if module is block)
    wide = [call for call in calls if call[0] in own and call[0] is not block and call[2].shape[-1] == width]
    inside = [call for call in wide if call[0] in attention]
    outside = [call for call in wide if call[0] not in attention]
    experts = any("expert" in name for name, _ in block.named_modules())
    if not inside or not outside or experts:
        raise ModelLayoutError(
            f"Block {index} of {type(model).__name__} has no single attention output and MLP output projection.",
            "Use an operator that does not fold weights, such as ghost.",
        )
    added = (entered + inside[-1][2].view_as(entered) + outside[-1][2].view_as(entered)).float()
    return Projections(inside[-1][0], outside[-1][0], agree(added, left.float(), left.dtype))


def find_mid(model: Any, index: int, flattened: bool = False) -> nn.Module:
    """The module that reads the stream between attention and MLP: block output minus MLP output (its second norm).

    ``flattened`` also finds one that reads ``(B T, C)`` (OPT).

    Raises:
        ModelLayoutError: there is none, as in blocks whose attention and MLP are parallel, or post-norm blocks.
    """
    block = find_blocks(model)[index]
    projections = find_projections(model, index)
    *calls, (_, entered, left) = probe_calls(model, set(block.modules()))  # the block itself ends last
    added = next(output for module, _, output in reversed(calls) if module is projections.mlp_output)
    mid = (left - added.view_as(left)).float()
    for module, value, _ in calls:
        if flattened and value.numel() == mid.numel():
            value = value.view_as(mid)
        same = value.shape == mid.shape and agree(value.float(), mid, left.dtype)
        if same and not agree(value.float(), entered.float(), left.dtype):
            return module
    raise ModelLayoutError(
        f"Block {index} of {type(model).__name__} has no module that reads the stream between attention and MLP as "
        "[batch, tokens, hidden]: they run in parallel, or the block flattens its tokens.",
        "Use an operator that acts at the boundary, such as ghost.",
    )


def find_post_norms(model: Any, index: int) -> tuple[nn.Module, nn.Module]:
    """The two modules with a gain ``[C]`` whose results are added to the stream."""
    block = find_blocks(model)[index]
    gains = {m for m in block.children() if [p.ndim for p in m.parameters()] == [1]}
    *calls, (_, entered, left) = probe_calls(model, {*gains, block})  # the block itself ends last
    wanted = (left - entered).float()
    for first in range(len(calls)):
        for second in range(first + 1, len(calls)):
            if agree((calls[first][2] + calls[second][2]).float(), wanted, left.dtype):
                return calls[first][0], calls[second][0]
    raise ModelLayoutError(
        f"Block {index} of {type(model).__name__} adds something else than two projections or norms to its stream.",
        "Use an operator that acts at the boundary, such as ghost.",
    )


def _attention_modules(block: nn.Module) -> set[nn.Module]:
    return {
        inner
        for module in block.modules()
        if module is not block and "attention" in type(module).__name__.lower() and any(True for _ in module.children())
        for inner in module.modules()
    }


def probe_calls(model: Any, modules: Iterable[nn.Module]) -> list[Call]:
    """Every call of the modules in one forward pass, in the order of their ends; calls without tensors are left out."""
    calls: list[Call] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        entered = args[0] if args else kwargs.get("hidden_states")
        left = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(entered, torch.Tensor) and isinstance(left, torch.Tensor):
            calls.append((module, entered, left))

    handles = [module.register_forward_hook(keep, with_kwargs=True) for module in modules]
    try:
        with torch.no_grad():
            model(input_ids=probe_tokens(model), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def agree(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((a - b).abs().max() <= SUM_TOLERANCE[dtype] * b.abs().max())
