"""Two residual streams of a whole calibration set, on disk, for a walk that changes blocks on its way."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.execution import Execution
from ghostexport.files import require_space
from ghostexport.models import LoadedModel, read_streams
from ghostexport.moments import require_finite


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
    folder = Path(tempfile.gettempdir(), f"ghostexport-streams-{uuid4().hex}")
    try:  # named before it is made: a stop between the two leaves nothing behind
        folder.mkdir(mode=0o700)
        require_space(folder, 2 * count * dtype.itemsize, "the residual streams of the refit")
        dense, repaired = (
            torch.from_file(str(folder / name), shared=True, size=count, dtype=dtype).view(shape)
            for name in ("dense", "repaired")
        )
        yield Streams(dense, repaired)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fill(
    loaded: LoadedModel, calibration: CalibrationSet, point: int, stream: torch.Tensor, execution: Execution
) -> None:
    """Writes ``x_point`` of the dense model into ``stream``."""

    def visit(batch: Batch, index: int, x: torch.Tensor) -> None:
        require_finite(x[batch.mask], index)
        stream[batch.sequences.start : batch.sequences.stop] = x.cpu()

    read_streams(
        loaded, calibration.batches(loaded.device), [point], visit, execution, "refit: stream", len(calibration)
    )
