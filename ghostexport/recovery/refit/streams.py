"""Two residual streams of a whole calibration set, on disk, and decoder blocks run on them one at a time."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.files import require_space
from ghostexport.models import LoadedModel, read_residuals
from ghostexport.models.blocks import hidden_states
from ghostexport.moments import require_finite


class _StopBlockError(Exception):
    """Leaves a block early; never seen outside this file."""


@dataclass(eq=False)
class Streams:
    """Residual values of every calibration token in the dense and in the repaired model.

    Attributes:
        dense, repaired: ``(N, T, C)`` in the model's dtype, mapped from files: pages of memory come and go as needed.
    """

    dense: torch.Tensor
    repaired: torch.Tensor


@contextmanager
def open_streams(loaded: LoadedModel, calibration: CalibrationSet) -> Iterator[Streams]:
    """Streams in a temporary folder that is removed at the end: ``2 N T C`` numbers of the model's dtype."""
    shape = (*calibration.tokens.shape, loaded.hidden_size)
    dtype = next(loaded.model.parameters()).dtype
    count = shape[0] * shape[1] * shape[2]
    folder = Path(tempfile.mkdtemp(prefix="ghostexport-streams-"))
    try:
        require_space(folder, 2 * count * dtype.itemsize, "the residual streams of the refit")
        dense, repaired = (
            torch.from_file(str(folder / name), shared=True, size=count, dtype=dtype).view(shape)
            for name in ("dense", "repaired")
        )
        yield Streams(dense, repaired)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fill(loaded: LoadedModel, calibration: CalibrationSet, point: int, stream: torch.Tensor) -> None:
    """Writes ``x_point`` of the dense model into ``stream``."""
    for batch in calibration.batches(loaded.device):

        def visit(index: int, x: torch.Tensor, batch: Batch = batch) -> None:
            require_finite(x[batch.mask], index)
            stream[batch.sequences.start : batch.sequences.stop] = x.cpu()

        read_residuals(loaded.model, [point], visit, batch.input_ids, batch.attention_mask)


@dataclass(frozen=True, eq=False)
class Call:
    """How the model calls a block on one batch: masks, rotary tables, and the rest, without the residual values."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, block: nn.Module, x: torch.Tensor) -> Any:
        if "hidden_states" in self.kwargs:
            return block(*self.args, **(self.kwargs | {"hidden_states": x}))
        return block(x, *self.args, **self.kwargs)


def block_calls(loaded: LoadedModel, batch: Batch) -> list[Call]:
    """The calls of all blocks on a batch, from one forward pass in which every block hands its input on unchanged."""
    blocks = loaded.blocks
    count = num_outputs(loaded.model, blocks)
    calls: list[Call] = []

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        x = hidden_states(args, kwargs)
        calls.append(Call(args[1:], kwargs))
        if len(calls) == len(blocks):
            raise _StopBlockError
        return (x, *[None] * (count - 1)) if count else x

    with _instead(blocks, stand_in), torch.no_grad(), contextlib.suppress(_StopBlockError):
        loaded.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    return calls


def go_on(
    loaded: LoadedModel, batch: Batch, point: int = 0, x: torch.Tensor | None = None, count: int | None = None
) -> torch.Tensor:
    """Logits ``(B, T, V)`` of a model, its stream at a ``point`` >= 1 replaced by ``x`` ``(B, T, C)``.

    ``count`` is that of :func:`num_outputs`, where the caller knows it.
    """
    before = loaded.blocks[:point]
    if count is None:
        count = num_outputs(loaded.model, loaded.blocks) if before else 0
    handed_on = (x, *[None] * (count - 1)) if count else x
    with _instead(before, lambda *args, **kwargs: handed_on):
        output = loaded.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    logits: torch.Tensor = output.logits
    return logits


@contextmanager
def _instead(blocks: nn.ModuleList, forward: Callable[..., Any]) -> Iterator[None]:
    """Blocks that do something else meanwhile; a forward of their own (accelerate gives them one) comes back."""
    own = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        block.forward = forward
    try:
        yield
    finally:
        for block, before in zip(blocks, own, strict=True):
            del block.forward
            if before is not None:
                block.forward = before


def num_outputs(model: Any, blocks: nn.ModuleList) -> int:
    """How many values a block returns as a tuple; 0 where it returns the stream itself."""
    counts: list[int] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        counts.append(0 if isinstance(output, torch.Tensor) else len(output))
        raise _StopBlockError

    handle = blocks[0].register_forward_hook(look)
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device))
    except _StopBlockError:
        pass
    finally:
        handle.remove()
    return counts[0]
