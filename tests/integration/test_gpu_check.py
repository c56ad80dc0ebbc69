"""The GPU check itself, on whatever is here: its report, its exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ghostexport.runtimes.gpu import find_gpu
from tests.exports import FOLDER

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu_check.py"
SHELL = SCRIPT.with_suffix(".sh")


def check(folder, *arguments):
    command = [sys.executable, str(SCRIPT), "--output", str(folder / "check.json"), *arguments]
    alone = {name: value for name, value in os.environ.items() if name != FOLDER}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=alone)


@pytest.mark.skipif(not isinstance(find_gpu(), str), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path):
    command = [str(SHELL), "-", "--output", str(tmp_path / "check.json")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHON": sys.executable}
    )
    assert done.returncode == 2 and "Nothing to check: " in done.stdout and not (tmp_path / "check.json").exists()


@pytest.mark.parametrize("wheels", [[], ["."], ["nowhere"]])
def test_a_folder_without_our_wheel_is_refused_in_one_line(wheels, tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [str(SHELL), *wheels], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())
    assert ("pip wheel -w" if wheels else "usage: ") in done.stderr


@pytest.mark.slow
def test_every_step_passes_on_onnxruntime(tmp_path):
    done = check(tmp_path, "--runtime", "onnxruntime")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "check.json").read_text())
    steps = report["results"]["onnxruntime"]
    assert report["passed"] and [s["step"] for s in steps][-2:] == ["swap operator", "timing"] and len(steps) == 10
    assert set(steps[-1]["median_seconds"]) == {"dense", "pruned", "ghost", "linearpatch-diag"}
    assert all(s["same_tokens"] == 1.0 for s in steps if "same_tokens" in s)
