"""Statistics of several processes: each reads its share of the batches, then all add up what they found.

Start one process per device with ``torchrun`` and initialise ``torch.distributed``; without it everything here is the
identity. Sums of moments do not depend on who read which batch, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import distributed

from ghostexport.calibration import Batch
from ghostexport.errors import CalibrationError
from ghostexport.moments import BoundaryMoments, MagnitudeRatios, TokenSample


def is_parallel() -> bool:
    """Whether this process is one of several."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def shared_out(batches: Iterable[Batch]) -> Iterable[Batch]:
    """Every world-size-th batch, starting with this process's rank.

    Raises:
        CalibrationError: there are fewer batches than processes.
    """
    if not is_parallel():
        return batches
    found = list(batches)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if len(found) < world:
        raise CalibrationError(
            f"{len(found)} batches of calibration sequences cannot be shared by {world} processes.",
            "Use more or longer sequences, or fewer processes.",
        )
    return found[rank::world]


def add_up(sums: Sequence[BoundaryMoments | MagnitudeRatios], samples: Sequence[TokenSample]) -> None:
    """Replaces every sum by the total over all processes and joins the samples, in rank order."""
    if not is_parallel():
        return
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
