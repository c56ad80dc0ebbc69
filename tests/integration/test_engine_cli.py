"""Engines through the command line: build, show, swap, targets, refusals, the lock of a run folder."""

import dataclasses
import json

import numpy as np
import pytest

from ghostexport.cli import resolve
from ghostexport.execution import Execution
from ghostexport.files import write_bytes
from ghostexport.operators import load_operators
from ghostexport.pipeline import run as run_pipeline
from ghostexport.runfolder import RunFolder
from ghostexport.runtimes import RUNTIMES, load_engine

pytestmark = pytest.mark.slow
needs_rtx = pytest.mark.skipif(not RUNTIMES["tensorrt-rtx"].availability().build, reason="no TensorRT-RTX")
no_gpu = pytest.mark.skipif(RUNTIMES["tensorrt-rtx"].availability().run, reason="there is a GPU")


@pytest.fixture(scope="module")
def run(tiny_model, exported_run, text_file, tmp_path_factory):
    """A run with ONNX Runtime engines and one operator."""
    flags = {
        "calibration": {"source": str(text_file), "sequences": 24, "length": 64},
        "select": {"prune": 2},
        "recover": {"operators": ["ghost"]},
        "build": {"runtimes": ["onnxruntime"], "max_tokens": 16, "max_past": 31},
    }
    recipe, folder = resolve(str(tiny_model), tmp_path_factory.mktemp("runs") / "run", None, flags)
    folder.adopt("export", exported_run)
    run_pipeline(recipe, folder, goal="build")
    return folder.path


@pytest.fixture(autouse=True)
def recipe(run):
    """The recipe as the run was made with; a test's flags end with it."""
    path = run / "recipe.yaml"
    before = path.read_bytes()
    yield before
    path.write_bytes(before)


def other_operators(run, folder):
    """The run's operators with half their effect, under a name of their own."""
    known = load_operators(run / "operators" / "ghost.safetensors")
    halved = tuple(dataclasses.replace(o, delta=o.delta / 2) for o in known.operators)
    path = folder / "half.safetensors"
    write_bytes(path, dataclasses.replace(known, name="half", operators=halved).to_bytes())
    return path


def test_swap_writes_another_engine_and_shows_its_sidecar(run, cli, tmp_path):
    engines = run / "engines" / "onnxruntime"
    code, out, _ = cli("swap", engines / "ghost.json", "--operator", other_operators(run, tmp_path), "--json")
    assert code == 0 and json.loads(out) == json.loads((engines / "half.json").read_text())
    assert json.loads(out)["variant"] == "half"
    logits = {}
    for name in ("pruned", "ghost", "half"):
        _, session = load_engine(engines / f"{name}.json", Execution(device="cpu"))
        logits[name] = session.forward(np.array([[5, 6, 7]]), session.new_cache(1))[0]
    assert np.abs(logits["half"] - logits["ghost"]).max() > 1e-4 < np.abs(logits["half"] - logits["pruned"]).max()


def test_show_prints_a_sidecar(run, cli):
    path = run / "engines" / "onnxruntime" / "ghost.json"
    code, out, _ = cli("show", path, "--json")
    facts = json.loads(path.read_text())
    assert code == 0 and json.loads(out) == facts
    code, out, _ = cli("show", path)
    assert code == 0 and "takes any batch, tokens and past" in out and "for: cpu" in out
    assert f": ghost on onnxruntime {facts['version']}" in out and f"{facts['plan_bytes'] / 1e6:.1f} MB from" in out
    code, _, err = cli("show", path.with_name("none.json"))
    assert code != 0 and "none.json" in err


@needs_rtx
def test_rtx_targets_are_built_and_their_swap_is_refused(run, cli, tmp_path):
    arguments = ("--runtime", "tensorrt-rtx", "--profiles", "single", "--opt-level", "1")
    code, _, err = cli("build", "engine", run, *arguments, "--compute-capability", "SM86")
    assert code == 0, err
    path = run / "engines" / "tensorrt-rtx" / "ghost.json"
    sidecar = json.loads(path.read_text())
    assert sidecar["flags"]["compute_capability"] == ["SM86"] and list(sidecar["profiles"]) == ["single"]
    code, out, _ = cli("show", path)
    assert code == 0 and "for: SM86" in out and "1 to 16" in out and "0 to 31" in out
    before = sorted(path.parent.iterdir())
    code, _, err = cli("swap", path, "--operator", other_operators(run, tmp_path))
    assert code != 0 and "refittable" in err and "Traceback" not in err
    assert sorted(path.parent.iterdir()) == before


@needs_rtx
@no_gpu
def test_a_refittable_rtx_engine_is_refused_without_a_gpu(run, cli):
    code, _, err = cli("build", "engine", run, "--runtime", "tensorrt-rtx", "--refittable", "--max-past", "30")
    assert code != 0 and "refittable needs a GPU" in err and "Traceback" not in err


@needs_rtx
def test_a_timing_cache_reaches_the_runtime_and_not_the_recipe(run, cli, tmp_path):
    arguments = ("--runtime", "tensorrt-rtx", "--timing-cache", tmp_path / "timings", "--max-past", "29")
    code, _, err = cli("build", "engine", run, *arguments)
    assert code != 0 and "no timing cache" in err
    assert "timing" not in (run / "recipe.yaml").read_text()


def test_a_second_build_into_one_folder_is_told_to_wait(run, cli, recipe):
    with RunFolder(run).lock():
        code, _, err = cli("build", "engine", run, "--opt-level", "5")
    assert code != 0 and f"Another ghostexport process is writing into {run}" in err and "Wait for it" in err
    assert (run / "recipe.yaml").read_bytes() == recipe
