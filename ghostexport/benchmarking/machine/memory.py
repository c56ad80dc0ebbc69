"""Memory of the process and of the device. What cannot be read is None, never zero."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def process_bytes() -> int | None:
    """Resident memory of this process now."""
    return _status("VmRSS")


def reset_peak() -> bool:
    """Starts a new peak measurement (Linux: writes 5 to ``clear_refs``); False where the kernel does not allow it."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def peak_bytes() -> int | None:
    """Peak resident memory since :func:`reset_peak` (since the start of the process where that failed)."""
    return _status("VmHWM")


def release_free_memory() -> None:
    """Gives freed memory back to the system, so that the next variant starts from the same floor (glibc only)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def device_bytes() -> int | None:
    """Memory in use on the CUDA device, by everybody; None without one."""
    import sys

    torch = sys.modules.get("torch")  # a GPU session has imported it; a CPU bench need not
    if torch is None or not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def _status(key: str) -> int | None:
    try:
        match = re.search(rf"^{key}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match.group(1)) * 1024 if match else None
