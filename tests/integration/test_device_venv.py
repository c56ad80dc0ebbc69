"""The environment of a device: Python 3.10 where there is one, no torch, no transformers; from a pack to an answer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ghostexport.packing import pack
from tests.integration.conftest import PROMPT, answer_of

REPOSITORY = Path(__file__).parents[2]


def _interpreter():
    """Python 3.10, of the system or of pyenv; else the one that runs this."""
    places = [shutil.which("python3.10"), *Path.home().glob(".pyenv/versions/3.10.*/bin/python")]
    for place in filter(None, places):
        if subprocess.run([place, "--version"], capture_output=True, check=False).returncode == 0:
            return str(place)
    return sys.executable


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device") / "venv"
    subprocess.run([_interpreter(), "-m", "venv", folder], check=True)
    wanted = [f"{REPOSITORY}[device,device-rtx]"]
    done = subprocess.run([folder / "bin" / "pip", "install", "--quiet", *wanted], capture_output=True, text=True)
    if done.returncode and "No matching distribution" in done.stderr + done.stdout:
        pytest.skip("no package index here")
    assert done.returncode == 0, done.stderr

    def run(*arguments, said=None):
        command = [folder / "bin" / "ghostexport", *map(str, arguments)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"COLUMNS": "200"}
        done = subprocess.run(command, capture_output=True, text=True, input=said, env=environment, cwd=folder)
        return done.returncode, done.stdout, done.stderr

    run.python = folder / "bin" / "python"
    return run


@pytest.mark.slow
def test_a_device_builds_measures_and_answers(device, built_run, tmp_path):
    for package in ("torch", "transformers"):
        missing = subprocess.run([device.python, "-c", f"import {package}"], capture_output=True, text=True)
        assert "ModuleNotFoundError" in missing.stderr
    archive = pack(built_run.path, tmp_path / "tiny.zip", ["dense", "ghost"])
    run = tmp_path / "run"
    both = ("--runtime", "onnxruntime", "--runtime", "tensorrt-rtx")
    code, _, err = device("build", "engine", archive, "-o", run, *both)
    assert code == 0, err
    assert (run / "engines" / "tensorrt-rtx" / "ghost.json").is_file()
    code, _, err = device("bench", run)
    assert code == 0 and (run / "bench" / "onnxruntime.json").is_file(), err
    code, out, err = device("generate", run, PROMPT, "--variant", "ghost", "--max-new-tokens", "8")
    assert code == 0 and out.rstrip("\n") == answer_of(built_run, 8).rstrip("\n"), err
    code, _, err = device("chat", run, "--max-new-tokens", "4", said="hello\n\n")
    assert code == 0, err
    code, _, err = device("eval", run)
    assert code == 2 and "ghostexport[host]" in err
