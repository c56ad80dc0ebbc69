"""How a model calls its decoder blocks, so that one runs by itself, or the model goes on from the middle."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ghostexport.calibration import Batch
from ghostexport.models.blocks import (
    StopForwardError,
    find_blocks,
    hidden_states,
    input_device,
    output_states,
    probe_tokens,
)

if TYPE_CHECKING:
    from ghostexport.models.loading import LoadedModel


@dataclass(frozen=True, eq=False)
class Call:
    """How the model calls a block on one batch: masks, rotary tables, and the rest, without the residual values."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """From all of a block's inputs."""
        return cls(args[1:], kwargs if args else kwargs | {"hidden_states": None})

    def on(self, block: Callable[..., Any], x: torch.Tensor) -> Any:
        """What a block returns on the residual values ``x`` ``(B, T, C)``."""
        if "hidden_states" in self.kwargs:
            return block(*self.args, **(self.kwargs | {"hidden_states": x}))
        return block(x, *self.args, **self.kwargs)


def block_calls(loaded: LoadedModel, batch: Batch) -> list[Call]:
    """The calls of all blocks on a batch; no block is run."""
    return enter(loaded, batch)[1]


def enter(loaded: LoadedModel, batch: Batch) -> tuple[torch.Tensor, list[Call]]:
    """``x_0`` ``(B, T, C)``, and the calls of all blocks, from a forward pass whose blocks hand their input on."""
    blocks, count = loaded.blocks, loaded.outputs
    calls: list[Call] = []
    entered: list[torch.Tensor] = []

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        entered.append(hidden_states(args, kwargs))
        calls.append(Call.of(args, kwargs))
        if len(calls) == len(blocks):
            raise StopForwardError
        return _returned(entered[0], count)

    with _instead(blocks, stand_in), torch.no_grad(), contextlib.suppress(StopForwardError):
        loaded.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    return entered[0], calls


def go_on(loaded: LoadedModel, batch: Batch, point: int = 0, x: torch.Tensor | None = None) -> torch.Tensor:
    """Logits ``(B, T, V)`` of a model, its stream at a ``point`` >= 1 replaced by ``x`` ``(B, T, C)``.

    An operator inserted at the point is applied, those of the blocks before it are left out with them.
    """
    count = len(loaded.blocks)
    before, last = loaded.blocks[: min(point, count - 1)], loaded.blocks[-1:] if point == count else nn.ModuleList()
    handed_on = None if x is None else _returned(x, loaded.outputs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return handed_on

    with _instead(before, forward), _instead(last, forward, hooks=True):
        output = loaded.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    logits: torch.Tensor = output.logits
    return logits


@torch.no_grad()
def finish(loaded: LoadedModel, batch: Batch, x: torch.Tensor) -> torch.Tensor:
    """Logits ``(B, T, V)`` from the stream ``x`` ``(B, T, C)`` behind all blocks and operators."""
    handed_on = _returned(x, loaded.outputs)
    with _instead(loaded.blocks, lambda *args, **kwargs: handed_on):
        output = loaded.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    logits: torch.Tensor = output.logits
    return logits


def _returned(x: torch.Tensor, count: int) -> Any:
    return (x, *[None] * (count - 1)) if count else x


@contextlib.contextmanager
def _instead(blocks: nn.ModuleList, forward: Callable[..., Any], hooks: bool = False) -> Iterator[None]:
    """Blocks that do something else meanwhile, without their hooks; a forward of their own (accelerate) comes back."""
    names = ("forward", "_forward_hooks", "_forward_pre_hooks")
    own = [{name: vars(block)[name] for name in names if name in vars(block)} for block in blocks]
    for block in blocks:
        vars(block).update(forward=forward)
        if not hooks:
            vars(block).update(_forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict())
    try:
        yield
    finally:
        for block, before in zip(blocks, own, strict=True):
            del block.forward
            vars(block).update(before)


@contextlib.contextmanager
def run_alone(loaded: LoadedModel) -> Iterator[list[bool]]:
    """While open, every block of a forward pass of :func:`probe_tokens` runs once more, by itself, before its turn.

    Yields:
        whether each gave the same: where one did not, it reads something else of other blocks than the stream.
    """
    ids = probe_tokens(loaded.model)
    batch = Batch(range(len(ids)), ids, torch.ones_like(ids, dtype=torch.bool))
    calls = iter([block_calls(loaded, batch)[index] for index in range(loaded.num_blocks)])  # nothing shared
    alone: list[torch.Tensor | None] = []
    same: list[bool] = []

    def before(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            alone.append(output_states(next(calls).on(block.forward, hidden_states(args, kwargs).clone())))
        except Exception:  # whatever a block raises that lacks a value of another
            alone.append(None)

    def after(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        own = alone.pop()
        same.append(own is not None and torch.equal(own, output_states(output)))

    handles = [block.register_forward_pre_hook(before, with_kwargs=True) for block in loaded.blocks]
    handles += [block.register_forward_hook(after) for block in loaded.blocks]
    try:
        yield same
    finally:
        for handle in handles:
            handle.remove()


def num_outputs(model: Any) -> int:
    """How many values a block returns as a tuple; 0 where it returns the stream itself."""
    counts: list[int] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        counts.append(0 if isinstance(output, torch.Tensor) else len(output))
        raise StopForwardError

    handle = find_blocks(model)[0].register_forward_hook(look)
    try:
        with torch.no_grad(), contextlib.suppress(StopForwardError):
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=input_device(model)))
    finally:
        handle.remove()
    return counts[0]
