"""Several processes on one run folder: ``torchrun --nproc-per-node 2 -m ghostexport.cli recover RUN``.

All draw the same windows and share the calibration pass of ``recover`` (``recovery/ranks.py``). Rank 0 writes it,
the others work in a copy that is thrown away. Imports nothing heavy at the top.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ghostexport.errors import RecipeError
from ghostexport.runfolder import RunFolder

#: Stages that several processes may run.
SHARED = ("calibrate", "select", "recover")

#: What those stages never read, and may be large.
_LEFT_OUT = ("onnx", "engines", "bench")


def is_torchrun() -> bool:
    """Whether this process was started as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first() -> bool:
    """Whether this process writes and talks."""
    return int(os.environ.get("RANK", "0")) == 0


def own_device(device: str) -> str:
    """``auto`` becomes this process's GPU where there are several."""
    import torch

    several = is_torchrun() and device == "auto" and torch.cuda.is_available()
    return f"cuda:{os.environ['LOCAL_RANK']}" if several else device


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
                shutil.copytree(folder.path, own.path, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        distributed.barrier()  # nobody writes before everybody has a copy
        try:
            yield own
        finally:
            distributed.destroy_process_group()
