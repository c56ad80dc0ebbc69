"""Power sensors read from file trees laid out as the kernel's."""

import time

from ghostexport.benchmarking.energy import PERIOD, find_meter


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
