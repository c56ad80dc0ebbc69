"""The CUDA device through NVIDIA's own Python bindings, where PyTorch is not: what :class:`gpu.Cuda` is with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ghostexport.errors import RuntimeUnavailableError


class Buffer:
    """Device memory; freed with the object."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self._device, self.nbytes = device, nbytes
        self._address = int(device.call("cudaMalloc", nbytes))

    def data_ptr(self) -> int:
        """Its address."""
        return self._address

    def __del__(self) -> None:
        if getattr(self, "_address", 0):
            self._device.call("cudaFree", self._address)


class CudaDevice:
    """See :class:`ghostexport.runtimes.gpu.Cuda`, whose methods these are.

    Args:
        runtime: the module ``cuda.bindings.runtime``.

    Raises:
        RuntimeUnavailableError: the driver refuses.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._stream = self.call("cudaStreamCreateWithFlags", 1)  # 1: not in step with the default stream

    def call(self, name: str, *arguments: Any) -> Any:
        """What a CUDA function returns behind its status.

        Raises:
            RuntimeUnavailableError: the status is an error.
        """
        status, *values = getattr(self._runtime, name)(*arguments)
        if int(status):
            text = self._runtime.cudaGetErrorString(status)[1].decode()
            raise RuntimeUnavailableError(f"{name} failed: {text}.", "Check nvidia-smi, and free memory.")
        return values[0] if values else None

    @property
    def handle(self) -> int:
        return int(self._stream)

    def empty(self, nbytes: int) -> Buffer:
        return Buffer(self, max(nbytes, 1))

    def zero(self, buffer: Buffer) -> None:
        self.call("cudaMemsetAsync", buffer.data_ptr(), 0, buffer.nbytes, self._stream)

    def upload(self, buffer: Buffer, values: NDArray[Any]) -> None:
        raw = np.ascontiguousarray(values)
        self._copy(buffer.data_ptr(), raw.ctypes.data, raw.nbytes, "cudaMemcpyHostToDevice")

    def download(self, buffer: Buffer, shape: tuple[int, ...], dtype: str) -> NDArray[np.float32]:
        kind: Any = np.uint16 if dtype == "bfloat16" else dtype
        values = np.empty(shape, kind)
        self._copy(values.ctypes.data, buffer.data_ptr(), values.nbytes, "cudaMemcpyDeviceToHost")
        self.synchronize()
        if dtype == "bfloat16":  # NumPy has none; its 16 bits are the upper half of a float32
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)

    def _copy(self, target: int, source: int, nbytes: int, kind: str) -> None:
        way = getattr(self._runtime.cudaMemcpyKind, kind)
        self.call("cudaMemcpyAsync", target, source, nbytes, way, self._stream)

    def synchronize(self) -> None:
        self.call("cudaStreamSynchronize", self._stream)

    def timed(self, work: Callable[[], None]) -> float:
        start, stop = self.call("cudaEventCreate"), self.call("cudaEventCreate")
        try:
            self.call("cudaEventRecord", start, self._stream)
            work()
            self.call("cudaEventRecord", stop, self._stream)
            self.call("cudaEventSynchronize", stop)
            return float(self.call("cudaEventElapsedTime", start, stop)) / 1e3
        finally:
            self.call("cudaEventDestroy", start)
            self.call("cudaEventDestroy", stop)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.call("cudaStreamBeginCapture", self._stream, mode)
        try:
            work()
        finally:
            graph = self.call("cudaStreamEndCapture", self._stream)
        executable = self.call("cudaGraphInstantiate", graph, 0)

        def replay() -> None:
            self.call("cudaGraphLaunch", executable, self._stream)

        return replay


def open_device() -> CudaDevice:
    """The current device.

    Raises:
        RuntimeUnavailableError: the bindings are not installed, or the driver refuses.
    """
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"Neither PyTorch nor NVIDIA's bindings can be imported: {error}.", "pip install cuda-bindings"
        ) from None
    return CudaDevice(runtime)
