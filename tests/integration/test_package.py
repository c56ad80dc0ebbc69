"""What is built for others: wheel and sdist, checked, and imported from where only the wheel lies."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def done(*command, **options):
    result = subprocess.run(command, capture_output=True, text=True, **options)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.slow
def test_wheel_and_sdist(tmp_path):
    pytest.importorskip("build")
    listed = done("git", "ls-files", "ghostexport", "pyproject.toml", "README.md", "LICENSE", cwd=ROOT).splitlines()
    for name in listed:  # a build leaves folders behind; not in the checkout
        if (ROOT / name).is_file():
            (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "tree" / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist")]
    done(*build, cwd=tmp_path / "tree")
    wheel, sdist = sorted((tmp_path / "dist").iterdir(), key=lambda path: path.suffix != ".whl")
    done(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    assert {name for name in listed if name.startswith("ghostexport/")} <= names  # template and py.typed, too
    assert not [name for name in names if name.startswith(("tests", "tools", "benchmarks"))]
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/ghostexport/report/report.html.j2") for name in archive.getnames())
    alone = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    where = done(sys.executable, "-c", "import ghostexport; print(ghostexport.__file__)", cwd=tmp_path, env=alone)
    assert Path(where.strip()).is_relative_to(tmp_path / "installed")
    assert "engine" in done(sys.executable, "-m", "ghostexport.cli", "build", "--help", cwd=tmp_path, env=alone)
