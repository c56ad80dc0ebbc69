"""Workflows and Dockerfile pass their linters, where those are installed (hadolint comes with the extra ``[dev]``)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


@pytest.mark.parametrize("command", ["actionlint", "hadolint Dockerfile"])
def test_the_linter_finds_nothing(command):
    name, *arguments = command.split()
    program = shutil.which(name, path=PROGRAMS)
    if program is None:
        pytest.skip(f"{name} is not installed")
    files = arguments or sorted(map(str, (ROOT / ".github" / "workflows").glob("*.yml")))
    done = subprocess.run([program, *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
