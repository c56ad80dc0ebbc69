"""The first NVIDIA GPU, asked of the driver library itself: no torch, no subprocess."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass


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
