"""The GPU check itself, on whatever is here: its report, its exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ghostexport.runtimes.gpu import find_gpu

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu_check.py"


def check(folder, *arguments):
    command = [sys.executable, str(SCRIPT), "--output", str(folder / "check.json"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not isinstance(find_gpu(), str), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path):
    done = check(tmp_path)
    assert done.returncode == 2 and "Nothing to check: " in done.stdout and not (tmp_path / "check.json").exists()


@pytest.mark.slow
def test_every_step_passes_on_onnxruntime(tmp_path):
    done = check(tmp_path, "--runtime", "onnxruntime")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "check.json").read_text())
    steps = report["results"]["onnxruntime"]
    assert report["passed"] and [s["step"] for s in steps][-2:] == ["swap operator", "timing"] and len(steps) == 10
    assert set(steps[-1]["median_seconds"]) == {"dense", "pruned", "ghost", "linearpatch-diag"}
    assert all(s["same_tokens"] == 1.0 for s in steps if "same_tokens" in s)
