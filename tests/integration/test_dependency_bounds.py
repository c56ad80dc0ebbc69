"""The oldest dependencies that pyproject.toml allows, and the newest: each in an environment of its own.

It installs gigabytes, so only ``GHOSTEXPORT_BOUNDS=1`` runs it; ``uv`` must be on the path. uv's own variables hold:
``UV_TORCH_BACKEND=cpu``, ``UV_FIND_LINKS``, ``UV_CONSTRAINT``.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import write_text

ROOT = Path(__file__).parents[2]
EXTRAS = ("cpu", "tensorrt-rtx", "report", "serve", "data", "peft", "eval")
RECIPE = """
calibration: {source: text.txt, sequences: 24, length: 64, held_out_sequences: 4}
recover: {operators: [ghost, ghost-zero+refit]}
quantize: {format: [int8]}
build: {runtimes: [onnxruntime, tensorrt-rtx]}
bench: {preset: quick, repeats: 2, eval_tokens: 64}
"""
EVERY_MODULE = """
import importlib, pkgutil, ghostexport
names = [found.name for found in pkgutil.walk_packages(ghostexport.__path__, "ghostexport.")]
for name in names: importlib.import_module(name)
print(ghostexport.__file__, len(names))
"""
TINY = "import sys, pathlib; from tests.tiny import tiny_folder; tiny_folder(pathlib.Path(sys.argv[1]))"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not os.environ.get("GHOSTEXPORT_BOUNDS"), reason="installs gigabytes: GHOSTEXPORT_BOUNDS=1 runs it")
@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
def test_it_works_with_the_dependencies_it_asks_for(tmp_path, resolution):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"VIRTUAL_ENV": str(tmp_path / "venv")}
    programs = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin")

    def done(*command, where=tmp_path):
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=where, env=environment)
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    uv = shutil.which("uv")
    assert uv, "pip install uv"
    extras = [part for extra in EXTRAS for part in ("--extra", extra)]
    pins = tmp_path / "pins.txt"
    done(uv, "pip", "compile", "--quiet", "--resolution", resolution, *extras, "-o", pins, "pyproject.toml", where=ROOT)
    done(uv, "venv", "--quiet", "--python", sys.executable, programs.parent)
    done(uv, "pip", "install", "--quiet", "-r", pins)
    done(uv, "pip", "install", "--quiet", "--no-deps", ROOT)
    assert "site-packages" in done(programs / "python", "-c", EVERY_MODULE)
    done(programs / "python", "-c", TINY, tmp_path / "tiny", where=ROOT)
    write_text(tmp_path / "text.txt")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    ghostexport = programs / "ghostexport"
    done(ghostexport, "build", "engine", "tiny", "-o", "run", "--prune", "2", "--recipe", "recipe.yaml")
    assert (tmp_path / "run" / "engines" / "tensorrt-rtx" / "ghost.int8.engine").exists()
    for verb in ("bench", "eval", "show", "explain", "report", "pack"):
        done(ghostexport, verb, "run")
    assert "<svg" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    done(ghostexport, "generate", "run", "the river", "--max-new-tokens", "4")
    done(ghostexport, "deploy", "run", "--target", "transformers", "-o", "served")
