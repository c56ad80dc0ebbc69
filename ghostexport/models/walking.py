"""The residual stream of many batches on its way through a model: batch after batch, or block after block.

A model that memory holds runs one batch after the other. The weights of one that it does not hold stay in the files
they are mapped from, and every pass would read all of them again. So all batches go through one block before any goes
through the next, and every weight is read once::

    for block in blocks:                  weights: read from disk, used by all batches, left to the system
        for batch in batches:             x: taken from the shelf, run through the block, put back
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
from torch import nn

from ghostexport.files import cannot_write, require_space
from ghostexport.models.blocks import output_states
from ghostexport.models.calls import Call, enter
from ghostexport.models.running import read_residuals
from ghostexport.models.variants import around_operator

if TYPE_CHECKING:
    from ghostexport.calibration import Batch
    from ghostexport.execution import Execution
    from ghostexport.models.loading import LoadedModel

#: Bytes that a shelf keeps in memory; what goes beyond is on disk.
ROOM = 512 << 20

#: ``visit(batch, l, x_l)`` with residual values ``(B, T, C)``.
Visit = Callable[["Batch", int, torch.Tensor], None]


class Shelf:
    """Tensors put away under keys, in memory up to ``room`` bytes and past that in files that vanish with the shelf."""

    def __init__(self, room: int = ROOM) -> None:
        self._left = room
        self._held: dict[Hashable, torch.Tensor] = {}
        self._filed: dict[Hashable, tuple[Path, torch.Tensor]] = {}
        self._folder: Path | None = None
        self._names = itertools.count()

    def put(self, key: Hashable, x: torch.Tensor) -> None:
        """Keeps a copy.

        Raises:
            RunFolderError: the disk is full.
        """
        if x.nbytes <= self._left:
            self._left -= x.nbytes
            self._held[key] = x.detach().clone()
            return
        if self._folder is None:
            folder = Path(tempfile.gettempdir(), f"ghostexport-streams-{uuid4().hex}")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)  # first: a stop leaves nothing behind
            folder.mkdir(mode=0o700)
            self._folder = folder
        require_space(self._folder, x.nbytes, "residual values")
        path = self._folder / str(next(self._names))
        try:
            path.write_bytes(x.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        except OSError as error:
            raise cannot_write(path, error) from error
        self._filed[key] = (path, torch.empty_like(x, device="meta"))

    def look(self, key: Hashable) -> torch.Tensor:
        """What was put there."""
        if key in self._held:
            return self._held[key]
        path, like = self._filed[key]
        return torch.from_file(str(path), size=like.numel(), dtype=like.dtype).view(like.shape)

    def take(self, key: Hashable) -> torch.Tensor:
        """What was put there, and is there no more."""
        x = self.look(key)
        if self._held.pop(key, None) is not None:
            self._left += x.nbytes
        else:
            path, _ = self._filed.pop(key)
            x = x.clone()
            path.unlink()
        return x


def read_streams(
    loaded: LoadedModel,
    batches: Iterable[Batch],
    points: Iterable[int],
    visit: Visit,
    execution: Execution,
    task: str,
    sequences: int,
) -> None:
    """Runs the model on all batches and hands residual values ``x_l`` to ``visit(batch, l, x_l)``.

    As :func:`read_residuals`, for every batch in depth order, right after block ``l - 1`` ran on that batch. Of a model
    that memory holds one batch is finished before the next begins; of one that is walked (``loaded.walked``) all
    batches, in their order, come to a point before any goes on: what is kept per batch belongs on a :class:`Shelf`.

    Args:
        loaded: the model.
        batches: of ``sequences`` sequences, for the progress.
        points: as for :func:`read_residuals`.
        visit: called as ``visit(batch, l, x_l)``; the tensor is the model's own.
        execution: receives the progress of ``task``.
    """
    wanted = set(points)
    if loaded.walked:
        _walk(loaded, list(batches), wanted, visit, execution, task)
        return
    for batch in batches:
        read_residuals(loaded.model, wanted, partial(visit, batch), batch.input_ids, batch.attention_mask)
        execution.progress(task, batch.sequences.stop, sequences)


@torch.no_grad()
def _walk(
    loaded: LoadedModel,
    batches: Sequence[Batch],
    points: set[int],
    visit: Visit,
    execution: Execution,
    task: str,
    start: int = 0,
    entering: Callable[[int], torch.Tensor] | None = None,
) -> None:
    """Brings all batches to the largest point, from ``x_start`` = ``entering(number)`` where that is given."""
    shelf, last = Shelf(), max(points)
    for index in range(start, last) or (start,):
        for number, batch in enumerate(batches):
            x, calls = enter(loaded, batch)
            if index > start:
                x = shelf.take(number).to(x.device)
            elif entering is not None:
                x = entering(number)
            if index == start and start in points:
                visit(batch, start, x)
            if index < last:
                value, x = run_block(loaded.blocks[index], calls[index], x)
                if index + 1 in points:
                    visit(batch, index + 1, value if index + 1 == loaded.num_blocks else x)
            if index + 1 < last:
                shelf.put(number, x)
            done, total = (index - start) * len(batches) + number + 1, max(1, last - start) * len(batches)
            execution.progress(f"{task} · block {index} of {loaded.num_blocks}", done, total)


def walk_to_the_end(
    loaded: LoadedModel,
    batches: Sequence[Batch],
    execution: Execution,
    task: str,
    start: int = 0,
    entering: Callable[[int], torch.Tensor] | None = None,
) -> Shelf:
    """Residual values ``(B, T, C)`` of every batch, by its number, behind all blocks and operators.

    :func:`ghostexport.models.calls.finish` makes logits of them. From ``x_start`` = ``entering(number)`` where given.
    """
    shelf, numbers = Shelf(), itertools.count()

    def keep(batch: Batch, point: int, x: torch.Tensor) -> None:
        shelf.put(next(numbers), around_operator(loaded.blocks, point, x)[1])

    _walk(loaded, batches, {loaded.num_blocks}, keep, execution, task, start, entering)
    return shelf


def run_block(block: nn.Module, call: Call, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A block's own result on ``x`` ``(B, T, C)``, and that with what is inserted behind and inside it."""
    found: list[torch.Tensor] = []
    handle = block.register_forward_hook(lambda module, args, output: found.append(output_states(output)), prepend=True)
    try:
        final = output_states(call.on(block, x))
    finally:
        handle.remove()
    return found[0], final
