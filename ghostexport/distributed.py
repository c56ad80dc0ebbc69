"""Several processes on one run folder: ``torchrun --nproc-per-node 2 -m ghostexport.cli recover RUN``.

All draw the same windows and share the calibration pass of ``recover``: each reads its share of the batches, then all
add up what they found. Sums of moments do not depend on who read which batch, up to rounding. The first process writes
the folder, the others work in a copy that is thrown away. Without an initialised ``torch.distributed`` everything here
is the identity. Imports nothing heavy at the top.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ghostexport.errors import CalibrationError, RecipeError
from ghostexport.runfolder import AFTER_RECOVERY, RunFolder

if TYPE_CHECKING:
    from ghostexport.calibration import Batch
    from ghostexport.moments import BoundaryMoments, MagnitudeRatios, TokenSample

#: Stages that several processes may run.
SHARED = ("calibrate", "select", "recover")


def is_torchrun() -> bool:
    """Whether this process was started as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first() -> bool:
    """Whether this process writes and talks."""
    return int(os.environ.get("RANK", "0")) == 0


def own_device(device: str) -> str:
    """``auto`` becomes this process's GPU where there are several."""
    if not is_torchrun() or device != "auto":
        return device
    import torch

    return f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else device


@contextlib.contextmanager
def joined(folder: RunFolder, goal: str) -> Iterator[RunFolder]:
    """The folder to work in; the process group is open meanwhile.

    Raises:
        RecipeError: the goal is no stage that processes can share.
    """
    if not is_torchrun():
        yield folder
        return
    if goal not in SHARED:
        raise RecipeError(f"{goal} runs in one process.", f"Start it without torchrun; shared: {', '.join(SHARED)}.")
    from torch import distributed

    distributed.init_process_group()
    with tempfile.TemporaryDirectory(prefix="ghostexport-rank-") as scratch:
        own = folder
        if not is_first():
            own = RunFolder(Path(scratch) / "run")
            if folder.path.exists():
                shutil.copytree(folder.path, own.path, ignore=shutil.ignore_patterns(*AFTER_RECOVERY))
        distributed.barrier()  # nobody writes before everybody has a copy
        try:
            yield own
        finally:
            distributed.destroy_process_group()


def is_shared() -> bool:
    """Whether this process shares its passes with others."""
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def shared_out(batches: Iterable[Batch]) -> Iterable[Batch]:
    """Every world-size-th batch, starting with this process's number.

    Raises:
        CalibrationError: there are fewer batches than processes.
    """
    if not is_shared():
        return batches
    from torch import distributed

    found = list(batches)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if len(found) < world:
        raise CalibrationError(
            f"{len(found)} batches of calibration sequences cannot be shared by {world} processes.",
            "Use more or longer sequences, or fewer processes.",
        )
    return found[rank::world]


def add_up(sums: Sequence[BoundaryMoments | MagnitudeRatios], samples: Sequence[TokenSample]) -> None:
    """Replaces every sum by the total over all processes and joins the samples, in process order."""
    if not is_shared():
        return
    import torch
    from torch import distributed

    for item in sums:
        device = next(value.device for value in vars(item).values() if isinstance(value, torch.Tensor))
        for name, value in vars(item).items():
            if name == "basis":
                continue
            is_tensor = isinstance(value, torch.Tensor)
            total = value.clone() if is_tensor else torch.tensor(value, dtype=torch.float64, device=device)
            distributed.all_reduce(total)
            setattr(item, name, total if is_tensor else type(value)(total.item()))
    for sample in samples:
        parts: list[list[torch.Tensor]] = [[] for _ in range(distributed.get_world_size())]
        # copies: a view is sent with all of its buffer
        distributed.all_gather_object(parts, [column.clone() for column in sample.columns])
        sample.columns = [torch.cat(column) for column in zip(*parts, strict=True)]
