"""Measures what the device can do at best: read bandwidth and matrix-product throughput."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ghostexport.benchmarking.ideal import Ceilings

#: Bytes of the matrix read for the bandwidth: far beyond any last-level cache of an edge board or desktop.
READ_BYTES = 256 << 20
#: Side of the square matrix product.
SIDE = 2048
BEST_OF = 5


def measure_ceilings(device: str = "cpu", dtype: str = "float32", *, read_bytes: int = READ_BYTES) -> Ceilings:
    """Best of a few matrix-vector products (bytes/s) and matrix products (FLOP/s) with PyTorch on ``device``.

    The two are what decode and prefill do at best. Threads are PyTorch's default: the physical cores, as
    ONNX Runtime's.
    """
    import torch

    kind = getattr(torch, dtype)
    columns = 4096
    matrix = torch.zeros(read_bytes // kind.itemsize // columns, columns, dtype=kind, device=device)
    vector = torch.ones(columns, dtype=kind, device=device)
    read = _best(lambda: torch.mv(matrix, vector), device)
    square = torch.ones(SIDE, SIDE, dtype=kind, device=device)
    product = _best(lambda: torch.mm(square, square), device)
    return Ceilings(
        bytes_per_second=matrix.numel() * kind.itemsize / read,
        flops_per_second=2 * SIDE**3 / product,
        dtype=dtype,
        method=f"best of {BEST_OF}: {read_bytes >> 20} MiB matrix-vector product, {SIDE}^3 matrix product, "
        f"torch {torch.__version__} on {device}, {torch.get_num_threads()} threads",
    )


def _best(run: Callable[[], Any], device: str) -> float:
    import torch

    def seconds() -> float:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        start = time.perf_counter_ns()
        run()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        return (time.perf_counter_ns() - start) * 1e-9

    seconds()  # warm-up: allocation, kernel selection
    return min(seconds() for _ in range(BEST_OF))
