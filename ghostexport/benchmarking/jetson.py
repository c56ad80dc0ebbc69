"""Jetson's power mode and whether its clocks are locked, as ``nvpmodel -q`` and ``sudo jetson_clocks --show`` tell it.

The clocks are read from sysfs, where ``jetson_clocks`` sets the minimum of every clock to its maximum: that needs no
root, unlike the command itself. The memory clock is only readable by root and left out.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

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
