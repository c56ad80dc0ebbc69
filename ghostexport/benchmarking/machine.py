"""The machine while it is measured: card, clocks, temperature, throttling, load by others, and memory.

Of a Jetson also what ``nvpmodel -q`` and ``sudo jetson_clocks --show`` tell: power mode, and whether clocks are locked.
The clocks are read from sysfs, where ``jetson_clocks`` sets the minimum of every clock to its maximum: that needs no
root, unlike the command itself. The memory clock is only readable by root and left out.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ghostexport.benchmarking.energy import visible_gpu

#: Share of the machine's CPU time used by other processes above which a run is flagged.
OTHER_LOAD_LIMIT = 0.05
#: Change of the clock between the first and last third of the run above which it is flagged.
CLOCK_DRIFT_LIMIT = 0.05
_PROBE = bytes(1 << 18)


def card(device: str) -> dict[str, Any]:
    """Who measures: host CPU, memory, OS, power mode, GPU where there is one. Missing facts are left out."""
    facts: dict[str, Any] = {
        "device": device,
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "os": platform.platform(),
        "python": platform.python_version(),
        "environment": {k: os.environ[k] for k in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES") if k in os.environ},
    }
    governor = file_text(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"))
    board = file_text(Path("/proc/device-tree/model"))
    extra = {"board": board.strip("\0") if board else None, "cpu_governor": governor}
    facts |= {key: value for key, value in extra.items() if value} | jetson_card()
    if device == "cuda":
        facts["gpu"] = _gpu_card()
    return facts


@dataclass
class MachineWatch:
    """Takes a snapshot before every round; :meth:`flags` reads the run's conditions out of them.

    Attributes:
        device: ``cpu`` or ``cuda``.
        snapshots: one per round: seconds of a fixed probe computation, clocks, temperatures, throttle count.
    """

    device: str
    snapshots: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start = (time.monotonic(), _busy_seconds(), _own_seconds())

    def snapshot(self) -> None:
        """Reads everything that is readable here; a missing sensor is left out of the snapshot."""
        reading: dict[str, float | None] = {"probe_seconds": _probe()}
        frequency = psutil.cpu_freq()
        reading["cpu_mhz"] = frequency.current if frequency else None
        temperatures = [s.current for sensors in _temperatures().values() for s in sensors]
        reading["celsius"] = max(temperatures) if temperatures else None
        reading["throttle_count"] = _throttle_count()
        if self.device == "cuda":
            reading |= {"gpu_mhz": jetson_gpu_mhz()} | _gpu_state()
        self.snapshots.append({key: float(value) for key, value in reading.items() if value is not None})

    def other_load(self) -> float:
        """Share of the machine's CPU time since the start that other processes used."""
        elapsed = time.monotonic() - self._start[0]
        others = (_busy_seconds() - self._start[1]) - (_own_seconds() - self._start[2])
        return max(0.0, others / (elapsed * (psutil.cpu_count() or 1))) if elapsed else 0.0

    def summary(self) -> dict[str, Any]:
        return {"other_load": self.other_load(), "snapshots": self.snapshots}

    def flags(self) -> list[str]:
        """What makes this run less trustworthy, as sentences; empty when nothing does."""
        found = []
        if (load := self.other_load()) > OTHER_LOAD_LIMIT:
            found.append(f"other load: {load:.0%} of the CPU time went to other processes")
        return found + condition_flags(self.snapshots)


def condition_flags(snapshots: list[dict[str, float]]) -> list[str]:
    """Clock drift and throttling in a series of snapshots."""
    found = []
    for key, what in (("cpu_mhz", "CPU clock"), ("gpu_mhz", "GPU clock"), ("probe_seconds", "probe computation")):
        values = [s[key] for s in snapshots if key in s]
        third = len(values) // 3
        if third:
            change = float(np.median(values[-third:]) / np.median(values[:third])) - 1
            if abs(change) > CLOCK_DRIFT_LIMIT:
                found.append(f"clocks drifted: {what} changed by {change:+.0%} during the run")
    counts = [s["throttle_count"] for s in snapshots if "throttle_count" in s]
    if counts and counts[-1] > counts[0]:
        found.append(f"thermal throttling: the CPU throttled {counts[-1] - counts[0]:.0f} times")
    if any(s.get("gpu_thermal_slowdown") for s in snapshots):
        found.append("thermal throttling: the GPU reported a thermal slowdown")
    return found


def _probe() -> float:
    """Seconds of a fixed small computation: follows the clock where no frequency can be read (virtual machines).

    One thread, so that it does not wait for a core that an engine's threads still spin on.
    """
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter_ns()
        hashlib.sha256(_PROBE).digest()
        best = min(best, (time.perf_counter_ns() - start) * 1e-9)
    return best


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(getattr(times, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal")))


def _own_seconds() -> float:
    own = psutil.Process().cpu_times()
    return float(own.user + own.system)


def _temperatures() -> Mapping[str, Any]:
    sensors = getattr(psutil, "sensors_temperatures", None)  # Linux only
    return sensors() if sensors else {}


def _throttle_count() -> int | None:
    counters = list(Path("/sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count"))
    return sum(int(path.read_text()) for path in counters) if counters else None


def _cpu_name() -> str:
    for line in (file_text(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu_state() -> dict[str, float | None]:
    row = _nvidia_smi("clocks.sm,temperature.gpu,clocks_event_reasons.sw_thermal_slowdown")
    if row is None:
        return {}
    clock, celsius, slowdown = row
    found = {"gpu_mhz": clock, "gpu_celsius": celsius}
    state: dict[str, float | None] = {k: float(v) for k, v in found.items() if v.replace(".", "").isdigit()}
    return state | ({"gpu_thermal_slowdown": float(slowdown == "Active")} if "Active" in slowdown else {})


def _gpu_card() -> dict[str, str]:
    keys = ("name", "driver_version", "compute_cap", "clocks.max.sm", "power.limit", "memory.total")
    row = _nvidia_smi(",".join(keys))
    return {k: v for k, v in zip(keys, row, strict=True) if "N/A" not in v} if row else {}


def _nvidia_smi(query: str) -> list[str] | None:
    """One row of values of the GPU in use, ``[N/A]`` where it does not tell (Jetson); None without the command."""
    command = ["nvidia-smi", "-i", visible_gpu(), f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [cell.strip() for cell in done.stdout.strip().split(",")]


#: Clock files: CPU policies (kHz) and GPUs (Hz; 17000000.gpu, 17000000.ga10b, 57000000.gpu, gpu-gpc-0 by release).
_CPU = "sys/devices/system/cpu/cpufreq/policy*"
_GPU = ("sys/class/devfreq/*gpu*", "sys/class/devfreq/*.g[av]1*b")


def jetson_card(root: Path = Path("/")) -> dict[str, Any]:
    """``power_mode``, ``clocks`` (name -> min, max, cur in MHz) and ``clocks_locked``; empty when not a Jetson.

    What cannot be read is left out: without clocks there is no ``clocks_locked``.
    """
    compatible = file_text(root / "proc/device-tree/compatible")
    if compatible is None or "nvidia,tegra" not in compatible:
        return {}
    clocks = {path.name: _clock(path, "scaling_{}_freq", 1e3) for path in sorted(root.glob(_CPU))}
    known = {name: clock for name, clock in clocks.items() if clock is not None} | _gpu_clocks(root)
    mode = power_mode()
    facts: dict[str, Any] = {} if mode is None else {"power_mode": mode}
    if known:
        facts |= {"clocks": known, "clocks_locked": all(c["min"] == c["max"] for c in known.values())}
    return facts


def jetson_gpu_mhz(root: Path = Path("/")) -> float | None:
    """The GPU's clock now, which ``nvidia-smi`` does not tell on a Jetson; None elsewhere."""
    return max((clock["cur"] for clock in _gpu_clocks(root).values()), default=None)


def power_mode() -> str | None:
    """The mode of ``nvpmodel -q``, such as ``MAXN``; None without the command."""
    try:
        done = subprocess.run(["nvpmodel", "-q"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next((line.partition(":")[2].strip() for line in done.stdout.splitlines() if "Power Mode" in line), None)


def _gpu_clocks(root: Path) -> dict[str, dict[str, float]]:
    folders = [path for pattern in _GPU for path in sorted(root.glob(pattern))]
    clocks = {path.name: _clock(path, "{}_freq", 1e6) for path in folders}
    return {name: clock for name, clock in clocks.items() if clock is not None}


def _clock(folder: Path, name: str, divisor: float) -> dict[str, float] | None:
    """MHz; None when one of the three files is missing or holds no number."""
    texts = {key: file_text(folder / name.format(key)) or "" for key in ("min", "max", "cur")}
    return {k: int(text) / divisor for k, text in texts.items()} if all(map(str.isdigit, texts.values())) else None


def file_text(path: Path) -> str | None:
    """The content of a file of the system, stripped; None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def process_bytes() -> int | None:
    """Resident memory of this process now."""
    return _status("VmRSS")


def reset_peak() -> bool:
    """Starts a new peak measurement (Linux: writes 5 to ``clear_refs``); False where the kernel does not allow it."""
    try:
        _CLEAR.write_text("5", encoding="utf-8")
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
    found = device_memory()
    return None if found is None else found[1] - found[0]


def device_memory() -> tuple[int, int] | None:
    """Free and total memory of the CUDA device; None without one, or while no session has opened it."""
    import sys

    torch, bindings = sys.modules.get("torch"), sys.modules.get("cuda.bindings.runtime")
    if torch is not None and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return int(free), int(total)
    if bindings is not None:
        status, free, total = bindings.cudaMemGetInfo()
        return None if int(status) else (int(free), int(total))
    return None


def _status(key: str) -> int | None:
    try:
        match = re.search(rf"^{key}:\s+(\d+) kB$", _STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return int(match.group(1)) * 1024 if match else None
