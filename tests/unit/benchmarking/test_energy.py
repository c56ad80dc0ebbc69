"""Power sensors read from file trees laid out as the kernel's."""

import sys
import time
from types import ModuleType

import pytest

from ghostexport.benchmarking import benchmark
from ghostexport.benchmarking.energy import PERIOD, NvmlMeter, find_meter
from ghostexport.execution import Execution
from ghostexport.recipe import BenchSection
from tests.unit.benchmarking.synthetic import CEILINGS, FakeClock, SyntheticSession, engine, facts


def rail(root, number, name, millivolts, milliamperes):
    hwmon = root / "bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon2"
    hwmon.mkdir(parents=True, exist_ok=True)
    (hwmon / f"in{number}_label").write_text(f"{name}\n")
    (hwmon / f"in{number}_input").write_text(f"{millivolts}\n")
    (hwmon / f"curr{number}_input").write_text(f"{milliamperes}\n")


def test_no_sensor_is_none_and_not_zero(tmp_path):
    assert find_meter("cpu", tmp_path) is None


def test_jetson_module_power_is_integrated(tmp_path):
    rail(tmp_path, 1, "VDD_IN", 5000, 2000)  # 10 W
    rail(tmp_path, 2, "VDD_SOC", 5000, 400)  # a part of it, not to be added
    with find_meter("cuda", tmp_path) as meter:
        start, before = time.monotonic(), meter.joules()
        time.sleep(4 * PERIOD)
        joules, seconds = meter.joules() - before, time.monotonic() - start
    assert meter.source == "INA3221 VDD_IN"
    assert abs(joules - 10 * seconds) < 0.1 * seconds + 0.02


def test_agx_orin_adds_its_three_rails(tmp_path):
    for number, name in enumerate(("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"), 1):
        rail(tmp_path, number, name, 1000, 1000 * number)  # 1, 2 and 3 W
    meter = find_meter("cuda", tmp_path)
    time.sleep(0.05)
    assert 0.05 * 6 <= meter.joules() < 6  # six watts, for a twentieth of a second and the time to read


def test_rapl_counter_wraps(tmp_path):
    zone = tmp_path / "class/powercap/intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0\n")
    (zone / "max_energy_range_uj").write_text("9999999\n")
    (zone / "energy_uj").write_text("9000000\n")
    meter = find_meter("cpu", tmp_path)
    (zone / "energy_uj").write_text("1000000\n")  # 1 J to the end, 1 J after it
    assert meter.joules() == 2.0
    assert meter.source == "RAPL package-0"


@pytest.fixture
def nvml(monkeypatch):
    """The functions of pynvml that are used, as documented: the counter is in millijoules since the driver's start."""
    fake = ModuleType("pynvml")
    fake.NVMLError = type("NVMLError", (Exception,), {})
    fake.supported, fake.millijoules, handles = True, 5_000_000, []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def energy(handle):
        if not fake.supported:
            raise fake.NVMLError("Not Supported")
        return fake.millijoules if handle == "GPU 0" else 7000

    fake.nvmlInit = lambda: handles.extend(["GPU 0", "GPU 1"])
    fake.nvmlDeviceGetHandleByUUID = {"GPU-8a6f": "GPU 1"}.__getitem__
    fake.nvmlDeviceGetHandleByIndex = handles.__getitem__  # fails before nvmlInit, as the library does
    fake.nvmlDeviceGetTotalEnergyConsumption = energy
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_nvml_counts_in_millijoules(tmp_path, nvml):
    with find_meter("cuda", tmp_path) as meter:
        before = meter.joules()
        nvml.millijoules += 1234
        assert meter.joules() - before == pytest.approx(1.234)
    assert meter.source == "NVML total energy, GPU 0"
    assert find_meter("cpu", tmp_path) is None  # a GPU says nothing about a CPU engine


@pytest.mark.parametrize("visible", ["1,0", "GPU-8a6f"])
def test_nvml_reads_the_gpu_that_cuda_uses(tmp_path, nvml, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    meter = find_meter("cuda", tmp_path)
    assert meter.joules() == 7.0 and meter.source == f"NVML total energy, GPU {visible.split(',')[0]}"


def test_a_gpu_without_an_energy_counter_is_none_and_not_zero(tmp_path, nvml):
    nvml.supported = False
    assert find_meter("cuda", tmp_path) is None


def test_joules_per_token_are_those_of_the_visits(nvml, monkeypatch):
    """Every forward pass of the session costs 2 J; warm-up and memory passes are not counted."""
    clock = FakeClock()

    class Hungry(SyntheticSession):
        def timed_forward(self, input_ids, cache):
            nvml.millijoules += 2000
            return super().timed_forward(input_ids, cache)

    monkeypatch.setattr(benchmark, "find_meter", lambda device: NvmlMeter())
    section = BenchSection(prefill_tokens=(8,), decode_past=(4,), decode_steps=4, request=(4, 3), repeats=3)
    loaders = {"dense": lambda: Hungry(clock, lambda t, p: 0.01)}
    report = benchmark.bench(loaders, {"dense": engine("dense")}, {"dense": facts()}, section, Execution(),
                             ceilings=CEILINGS, clock=clock).to_json()  # fmt: skip
    assert report["energy_source"] == "NVML total energy, GPU 0"
    found = {m["workload"]: m["joules_per_token"] for m in report["measurements"]}
    # prefill: one pass for 8 tokens; decode: 5 passes of one token; request: 3 passes, 4 + 2 tokens
    assert found == pytest.approx({"prefill-b1-t8": 2 / 8, "decode-b1-p4": 10 / 5, "request-b1-t4-g3": 6 / 6})
