"""Clocks and power mode from files and outputs recorded on an Orin Nano (JetPack 6) and a Nano (JetPack 4)."""

import pytest

from ghostexport.benchmarking import machine
from ghostexport.benchmarking.machine import jetson_card, jetson_gpu_mhz

ORIN = "nvidia,p3768-0000+p3767-0005-super\0nvidia,p3767-0005\0nvidia,tegra234\0"
NANO = "nvidia,p3449-0000-b00+p3448-0000-b00\0nvidia,jetson-nano\0nvidia,tegra210\0"
#: minimum, maximum and current: CPU in kHz, GPU in Hz
FREE = {"policy0": (729600, 1344000, 729600), "policy4": (729600, 1344000, 1190400)}
FREE |= {"17000000.gpu": (306000000, 918000000, 306000000)}
LOCKED = {"policy0": (1479000,) * 3, "57000000.gpu": (921600000,) * 3}
NVPMODEL = "NVPM WARN: fan mode is not set!\nNV Power Mode: MAXN\n0\n"


@pytest.fixture
def board(tmp_path, monkeypatch):
    """A file tree as the kernel's, and an nvpmodel that prints what it printed there."""

    def make(compatible, clocks, nvpmodel=None):
        root = tmp_path / "root"
        files = {"proc/device-tree/compatible": compatible}
        for name, values in clocks.items():
            cpu = name.startswith("policy")
            folder = f"sys/devices/system/cpu/cpufreq/{name}/scaling_" if cpu else f"sys/class/devfreq/{name}/"
            files |= {f"{folder}{key}_freq": f"{v}\n" for key, v in zip(("min", "max", "cur"), values, strict=True)}
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        (tmp_path / "bin").mkdir()
        if nvpmodel is not None:
            command = tmp_path / "bin" / "nvpmodel"
            command.write_text(f'#!/bin/sh\n[ "$1" = -q ] || exit 1\nprintf "%s" "{nvpmodel}"\n')
            command.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        return root

    return make


def test_free_clocks(board):
    found = jetson_card(board(ORIN, FREE, "NV Power Mode: 25W\n1\n"))
    assert found["power_mode"] == "25W" and found["clocks_locked"] is False
    assert found["clocks"]["policy4"] == {"min": 729.6, "max": 1344.0, "cur": 1190.4}
    assert found["clocks"]["17000000.gpu"] == {"min": 306.0, "max": 918.0, "cur": 306.0}


def test_locked_clocks_and_a_warning_before_the_mode(board):
    found = jetson_card(board(NANO, LOCKED, NVPMODEL))
    assert found["clocks_locked"] is True and found["power_mode"] == "MAXN"


def test_the_gpu_clock_is_read_where_nvidia_smi_does_not_tell_it(board, monkeypatch):
    root = board(ORIN, FREE)
    monkeypatch.setattr(machine, "jetson_gpu_mhz", lambda: jetson_gpu_mhz(root))
    monkeypatch.setattr(machine, "_nvidia_smi", lambda query: ["[N/A]"] * len(query.split(",")))
    watch = machine.MachineWatch("cuda")
    watch.snapshot()
    assert watch.snapshots[0]["gpu_mhz"] == 306.0
    assert not {"gpu_celsius", "gpu_thermal_slowdown"} & watch.snapshots[0].keys()
    assert jetson_gpu_mhz(root / "nothing") is None and machine.card("cuda")["gpu"] == {}


def test_one_free_clock_is_not_locked(board):
    assert jetson_card(board(NANO, LOCKED | {"policy0": FREE["policy0"]}))["clocks_locked"] is False


def test_what_cannot_be_read_is_absent(board):
    assert jetson_card(board(ORIN, {})) == {}


def test_another_board_is_no_jetson(board):
    assert jetson_card(board("raspberrypi,5-model-b\0brcm,bcm2712\0", FREE, NVPMODEL)) == {}


def test_the_card_of_this_machine_claims_no_jetson(monkeypatch):
    if jetson_card():
        pytest.skip("this is a Jetson")
    assert not {"power_mode", "clocks", "clocks_locked"} & machine.card("cpu").keys()
