import subprocess
import sys
import time

import numpy as np
import pytest

from ghostexport.benchmarking.ideal import measure_ceilings
from ghostexport.benchmarking.machine import (
    MachineWatch,
    card,
    condition_flags,
    peak_bytes,
    process_bytes,
    release_free_memory,
    reset_peak,
)


def snapshots(key, values):
    return [{key: float(v)} for v in values]


def test_steady_machine_has_no_flag():
    assert condition_flags(snapshots("gpu_mhz", [1500] * 9)) == []
    assert condition_flags([]) == []


@pytest.mark.parametrize("key", ["cpu_mhz", "gpu_mhz", "probe_seconds"])
def test_clock_drift_is_flagged(key):
    (flag,) = condition_flags(snapshots(key, [1500] * 5 + [1200] * 5))
    assert flag.startswith("clocks drifted") and "-20%" in flag


def test_throttling_is_flagged():
    assert "throttled 3 times" in condition_flags(snapshots("throttle_count", [10, 10, 13]))[0]
    assert "GPU reported" in condition_flags(snapshots("gpu_thermal_slowdown", [0, 1, 0]))[0]


@pytest.mark.parametrize("priority", [0, 10])
def test_load_of_another_process_is_seen(priority):
    watch = MachineWatch("cpu")
    busy = subprocess.Popen([sys.executable, "-c", f"import os\nos.nice({priority})\nwhile True: pass"])
    try:
        time.sleep(1.5)
        assert watch.other_load() > 0.1
        assert any(flag.startswith("other load") for flag in watch.flags())
    finally:
        busy.kill()
        busy.wait()


def test_snapshot_holds_only_what_can_be_read():
    watch = MachineWatch("cpu")
    watch.snapshot()
    (reading,) = watch.snapshots
    assert reading["probe_seconds"] > 0 and all(isinstance(v, float) for v in reading.values())
    assert card("cpu")["threads"] >= 1 and "gpu" not in card("cpu")


def test_peak_memory_of_an_allocation():
    release_free_memory()
    if not reset_peak():
        pytest.skip("this kernel does not let a process reset its peak")
    floor = process_bytes()
    block = np.ones(64 << 20, np.uint8)
    del block
    assert 60 << 20 < peak_bytes() - floor < 80 << 20


def test_ceilings_are_plausible():
    ceilings = measure_ceilings(read_bytes=32 << 20)
    # a machine that runs this reads between 1 GB/s and 10 TB/s and multiplies at 1 GFLOP/s to 1 PFLOP/s
    assert 1e9 < ceilings.bytes_per_second < 1e13
    assert 1e9 < ceilings.flops_per_second < 1e15
    assert ceilings.dtype == "float32" and "32 MiB" in ceilings.method
