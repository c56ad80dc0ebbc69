"""What this machine has: memory that a process may take, free disk, memory of the GPU, and how fast it multiplies."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

#: Bytes per second taken for disks, which nothing here measures: a SATA SSD; NVMe drives are faster.
DISK_RATE = 500e6

_CGROUPS = (  # version 2, version 1: limit and use of a container
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True)
class Machine:
    """Bytes that are there.

    Attributes:
        memory: that this process may still take, swap not counted.
        total_memory: of the machine, or of the container it is in.
        disk: free where the run folder is.
        gpu: free on the GPU that PyTorch would use; None without one.
    """

    memory: int
    total_memory: int
    disk: int
    gpu: int | None = None


def measure_machine(folder: Path, device: str = "auto") -> Machine:
    """Looks at this machine; ``folder`` may not exist yet."""
    system = psutil.virtual_memory()
    memory, total = system.available, system.total
    for limit_file, used_file in _CGROUPS:
        try:
            limit, used = int(Path(limit_file).read_text("utf-8")), int(Path(used_file).read_text("utf-8"))
        except (OSError, ValueError):  # no such version, or "max"
            continue
        total, memory = min(total, limit), min(memory, max(0, limit - used))
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    return Machine(memory, total, shutil.disk_usage(there).free, _gpu(device))


def has_gpu(device: str = "auto") -> bool:
    """Whether PyTorch would run on a GPU."""
    if device == "cpu":
        return False
    import torch

    return torch.cuda.is_available()


def _gpu(device: str) -> int | None:
    if not has_gpu(device):
        return None
    import torch

    free, _ = torch.cuda.mem_get_info(device if device.startswith("cuda") else None)
    return int(free)


def multiplications_per_second(dtype: str, device: str = "auto", side: int = 512) -> float:
    """Multiply-adds per second of one matrix product here, in ``dtype``; a tenth of a second of work."""
    import torch

    place = "cuda" if has_gpu(device) else "cpu"
    x = torch.ones(side, side, dtype=getattr(torch, dtype), device=place)
    float((x @ x)[0, 0])  # the first one of a shape is slower
    done, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < 0.05:
        float((x @ x)[0, 0])  # a number: a GPU has finished
        done += 1
    return done * side**3 / (time.perf_counter() - begun)
