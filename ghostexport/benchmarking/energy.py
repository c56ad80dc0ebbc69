"""Energy where the board tells it: NVML on discrete GPUs, INA3221 rails on Jetson, RAPL on x86. Otherwise absent."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol

from typing_extensions import Self

SYSFS = Path("/sys")
#: Seconds between two readings of a power rail; Jetson's sensor averages over about as long.
PERIOD = 0.05
#: Rails that make up a whole Jetson module: Orin NX and Nano measure it as one, AGX Orin as three.
MODULE_RAILS = (("VDD_IN",), ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"))


class EnergyMeter(Protocol):
    """A counter of joules that only goes up. Used as a context manager around the whole measurement."""

    source: str

    def joules(self) -> float: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...


class _Counter:
    """A hardware counter needs no thread."""

    source = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        return None


class RaplMeter(_Counter):
    """Package energy of an x86 CPU from ``powercap``; the counter wraps at ``max_energy_range_uj``."""

    def __init__(self, zone: Path) -> None:
        self.zone = zone
        self.source = f"RAPL {(zone / 'name').read_text().strip()}"
        self._range = int((zone / "max_energy_range_uj").read_text())
        self._last = self._read()
        self._total = 0

    def joules(self) -> float:
        now = self._read()
        self._total += (now - self._last) % (self._range + 1)
        self._last = now
        return self._total * 1e-6

    def _read(self) -> int:
        return int((self.zone / "energy_uj").read_text())


class NvmlMeter(_Counter):
    """Total energy of the GPU in use since the driver was loaded (Volta and later)."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, gpu = pynvml, visible_gpu()
        self.source = f"NVML total energy, GPU {gpu}"
        by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        self._handle = by_index(int(gpu)) if gpu.isdigit() else by_uuid(gpu)
        self.joules()

    def joules(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) * 1e-3


class RailMeter:
    """Integrates the power rails of an INA3221 (Jetson) in a thread, by the trapezoid rule.

    Args:
        rails: label -> (file of millivolts, file of milliamperes); their powers are added.
    """

    def __init__(self, rails: Mapping[str, tuple[Path, Path]]) -> None:
        self.source = f"INA3221 {' + '.join(rails)}"
        self._rails = rails
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._total = 0.0
        self._last = (time.monotonic(), self._watts())
        self._thread = threading.Thread(target=self._run, name="rail-meter", daemon=True)

    def joules(self) -> float:
        with self._lock:
            now = (time.monotonic(), self._watts())
            self._total += (now[0] - self._last[0]) * (now[1] + self._last[1]) / 2
            self._last = now
            return self._total

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD):
            self.joules()

    def _watts(self) -> float:
        return sum(float(mv.read_text()) * float(ma.read_text()) for mv, ma in self._rails.values()) * 1e-6


def visible_gpu() -> str:
    """Index or UUID of the GPU that CUDA calls 0, for NVML and ``nvidia-smi``, which count all of the machine's.

    CUDA puts the fastest first; with GPUs of several kinds set ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, NVML's order.
    """
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def find_meter(device: str, sysfs: Path = SYSFS) -> EnergyMeter | None:
    """The meter of the device that computes; None when nothing here can be read.

    Args:
        device: ``cuda`` or ``cpu``: where the sessions run.
    """
    rails = _jetson_rails(sysfs)
    if rails is not None:
        return rails
    if device == "cuda":
        return _nvml()
    return _rapl(sysfs)


def _nvml() -> NvmlMeter | None:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        return NvmlMeter()
    except pynvml.NVMLError:
        return None


def _rapl(sysfs: Path) -> RaplMeter | None:
    try:
        return RaplMeter(sysfs / "class/powercap/intel-rapl:0")
    except OSError:  # no such zone, or readable by root only
        return None


def _jetson_rails(sysfs: Path) -> RailMeter | None:
    rails = {}
    for label in sorted(sysfs.glob("bus/i2c/drivers/ina3221/*/hwmon/hwmon*/in*_label")):
        number = label.name.removeprefix("in").removesuffix("_label")
        files = (label.with_name(f"in{number}_input"), label.with_name(f"curr{number}_input"))
        rails[label.read_text().strip()] = files
    for module in MODULE_RAILS:
        if all(name in rails for name in module):
            return RailMeter({name: rails[name] for name in module})
    return None
