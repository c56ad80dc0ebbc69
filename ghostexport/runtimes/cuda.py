"""What a TensorRT session needs of CUDA, through PyTorch: buffers, one stream, timing, graph capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ghostexport.errors import RuntimeUnavailableError


class Cuda:
    """The current CUDA device and a stream of its own (the default stream would synchronise everything).

    Raises:
        RuntimeUnavailableError: PyTorch cannot use CUDA.
    """

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeUnavailableError(
                f"PyTorch {torch.__version__} cannot use CUDA here, and sessions keep their buffers in it.",
                "Install a PyTorch build with CUDA, and a driver that nvidia-smi can see.",
            )
        self._torch = torch
        self._stream = torch.cuda.Stream()

    @property
    def handle(self) -> int:
        """The stream's CUDA handle."""
        return int(self._stream.cuda_stream)

    def empty(self, nbytes: int) -> Any:
        """A buffer of ``nbytes`` (at least one, so that its address is never null)."""
        return self._torch.empty(max(nbytes, 1), dtype=self._torch.uint8, device="cuda")

    def zero(self, buffer: Any) -> None:
        """Sets a buffer to zero, in stream order."""
        with self._torch.cuda.stream(self._stream):
            buffer.zero_()

    def upload(self, buffer: Any, values: NDArray[Any]) -> None:
        """Copies ``values`` to the start of ``buffer``, in stream order."""
        raw = self._torch.from_numpy(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        with self._torch.cuda.stream(self._stream):
            buffer[: raw.numel()].copy_(raw)

    def download(self, buffer: Any, shape: tuple[int, ...], dtype: str) -> NDArray[np.float32]:
        """The start of ``buffer`` as a float32 array of ``shape``; waits for the stream."""
        torch = self._torch
        with torch.cuda.stream(self._stream):
            kind = getattr(torch, dtype)
            nbytes = int(np.prod(shape)) * kind.itemsize
            values = buffer[:nbytes].view(kind).float().cpu()
        self.synchronize()
        result: NDArray[np.float32] = values.numpy().reshape(shape)
        return result

    def synchronize(self) -> None:
        """Waits for the stream."""
        self._stream.synchronize()

    def timed(self, work: Callable[[], None]) -> float:
        """Seconds of the device between events before and after ``work``; waits for it."""
        start, stop = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self._stream)
        work()
        stop.record(self._stream)
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Captures what ``work`` enqueues as a CUDA graph; the result replays it on the stream."""
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=self._stream):
            work()

        def replay() -> None:
            with self._torch.cuda.stream(self._stream):
                graph.replay()

        return replay
