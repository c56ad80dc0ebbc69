"""Every command of the README runs, top to bottom in one fresh folder, with a tiny model in the place of SmolLM2."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_folder

ROOT = Path(__file__).parents[2]
#: What makes a command small: the model, how many of its 6 blocks go, and how much is calibrated and measured.
SMALLER = {"smollm2": "tiny", "7": "2", "512": "64", "10:17": "1:3"}


def commands():
    blocks = re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {line.split()[1] for line in commands() if line.startswith("make ")}
    assert named and named <= targets
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").count("make test") == 1


@pytest.mark.slow
def test_every_command_runs(tmp_path):
    tiny_folder(tmp_path / "tiny")
    lines = [line for line in commands() if line.startswith("ghostexport ")]
    assert len(lines) > 8
    for line in lines:
        words = [SMALLER.get(word, word) for word in shlex.split(line, comments=True)]
        done = subprocess.run(
            [sys.executable, "-m", "ghostexport.cli", *words[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=os.environ | {"COLUMNS": "160"},
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
