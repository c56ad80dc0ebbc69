"""The NVIDIA GPU: which one, asked of the driver library itself, and what a TensorRT session needs of CUDA."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ghostexport.errors import RuntimeUnavailableError


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU.

    Attributes:
        name: as the driver says.
        compute_capability: such as ``8.7``.
        driver: the highest CUDA version the driver supports, such as ``13.0``.
        memory_bytes: total device memory.
    """

    name: str
    compute_capability: str
    driver: str
    memory_bytes: int

    @property
    def sm(self) -> str:
        """``SM87`` for 8.7."""
        return "SM" + self.compute_capability.replace(".", "")


_REASONS = {
    35: "the NVIDIA driver is older than the CUDA libraries: update it",
    100: "the driver sees no GPU: check nvidia-smi, and --gpus all for a container",
    101: "the device number is invalid: check CUDA_VISIBLE_DEVICES",
    803: "driver and CUDA libraries do not match: reboot after the driver update",
    999: "the driver is in an unknown state: reboot, or reload the nvidia_uvm module",
}


def find_gpu() -> Gpu | str:
    """The first GPU, or one line that says why there is none."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return f"no NVIDIA driver here ({library} is not installed)"
    status = cuda.cuInit(0)
    if status:
        return f"CUDA does not start (error {status}): {_REASONS.get(status, 'check nvidia-smi')}"
    count, version, device = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    if not count.value:
        return "the driver sees no GPU: check CUDA_VISIBLE_DEVICES"
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuDeviceGetName(name, 256, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    # 75 and 76 are CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return Gpu(name.value.decode(), f"{major.value}.{minor.value}", driver, memory.value)


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
