"""The main job on a tiny model, for real: every stage, ONNX Runtime and the TensorRT-RTX builder."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml

FLAGS = ("--prune", "2", "--sequences", "24", "--length", "64")


@pytest.fixture(scope="session")
def run(tiny_model, text_file, tmp_path_factory):
    """A finished run of the tiny model with both runtimes."""
    from ghostexport.cli import resolve
    from ghostexport.pipeline import run as run_pipeline

    folder = tmp_path_factory.mktemp("runs") / "run"
    flags = {
        "calibration": {"source": str(text_file), "sequences": 24, "length": 64},
        "select": {"prune": 2},
        "build": {"runtimes": ["onnxruntime", "tensorrt-rtx"]},
    }
    recipe, run_folder = resolve(str(tiny_model), folder, None, flags)
    run_pipeline(recipe, run_folder, goal="build")
    return folder


@pytest.mark.slow
def test_every_artefact_of_the_run_folder_is_there(run):
    variants = ("dense", "pruned", "ghost", "linearpatch-rotate")
    for name in ("recipe.yaml", "manifest.json", "plan.json", "parity.json", "calibration.safetensors"):
        assert (run / name).is_file()
    for variant in variants:
        assert (run / "onnx" / f"{variant}.onnx").is_file()
        for runtime in ("onnxruntime", "tensorrt-rtx"):
            sidecar = json.loads((run / "engines" / runtime / f"{variant}.json").read_text())
            assert sidecar["variant"] == variant and sidecar["runtime"] == runtime and sidecar["plan_bytes"] > 0
    assert set(json.loads((run / "parity.json").read_text())) == set(variants)
    leftovers = [p for p in run.rglob("*") if p.name.endswith(".tmp")]
    assert leftovers == []


@pytest.mark.slow
def test_variants_write_only_their_operator(run):
    dense_data = (run / "onnx" / "dense.onnx.data").stat().st_size
    assert not (run / "onnx" / "pruned.onnx.data").exists()
    c = yaml.safe_load((run / "recipe.yaml").read_text())
    assert c["recover"]["operators"] == ["ghost", "linearpatch-rotate"]
    operator = (run / "onnx" / "ghost.onnx.data").stat().st_size
    assert operator == 64 * 64 * 4 < dense_data


@pytest.mark.slow
def test_a_second_run_keeps_every_stage_and_changes_no_file(run, cli, tiny_model, text_file):
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
    code, _, err = cli("build", "engine", run)
    assert code == 0, err
    assert err.count("current, kept") == 7
    after = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in before}
    changed = {p.name for p in before if before[p] != after[p]}
    assert changed <= {"recipe.yaml"}


@pytest.mark.slow
def test_the_written_recipe_reproduces_the_run(run, cli, tiny_model, tmp_path):
    code, _, err = cli("recover", tiny_model, "-o", tmp_path / "again", "--recipe", run / "recipe.yaml")
    assert code == 0, err
    for name in ("plan.json", "operators/ghost.safetensors", "calibration.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (run / name).read_bytes()


@pytest.mark.slow
def test_an_edited_artefact_is_found_and_remade_after_deleting_it(run, cli, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    operator = copy / "operators" / "ghost.safetensors"
    data = bytearray(operator.read_bytes())
    data[-1] ^= 1
    operator.write_bytes(bytes(data))
    code, _, err = cli("recover", copy)
    assert code == 2 and "ghost.safetensors was changed" in err
    operator.unlink()
    code, _, err = cli("recover", copy)
    assert code == 0, err
    assert operator.read_bytes() == (run / "operators" / "ghost.safetensors").read_bytes()


@pytest.mark.slow
def test_ghost_generates_the_same_tokens_in_onnx_runtime_as_in_pytorch(run, tiny_model):
    from ghostexport import models
    from ghostexport.execution import Execution
    from ghostexport.runfolder import RunFolder
    from ghostexport.runtimes import RUNTIMES, read_sidecar
    from ghostexport.serving.generation import generate

    folder = RunFolder(run)
    loaded = models.load_model(tiny_model, "float32", Execution(device="cpu"))
    patched = models.patch(loaded, folder.read_plan(), folder.read_operators("ghost"))
    import torch

    prompt = torch.tensor([[1, 40, 41, 42, 43]])
    expected = patched.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, min_new_tokens=24, do_sample=False
    )
    engine = read_sidecar(run / "engines" / "onnxruntime" / "ghost.json")
    session = RUNTIMES["onnxruntime"].load(engine, Execution(device="cpu"))
    tokens = generate(session, prompt.numpy(), 24)
    np.testing.assert_array_equal(tokens[:, -24:], expected.numpy()[:, -24:])


@pytest.mark.slow
def test_a_stopped_refit_takes_its_streams_with_it(tiny_model, text_file, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    start = [sys.executable, "-m", "ghostexport.cli", "recover", str(tiny_model), "-o", str(tmp_path / "run"), *FLAGS]
    start += ["--calibration", str(text_file), "--operator", "ghost+refit"]
    process = subprocess.Popen(
        start, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(scratch)}
    )
    deadline = time.monotonic() + 120
    while not list(scratch.glob("*streams*")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)  # raises what Ctrl-C does
    _, said = process.communicate()
    assert process.returncode == 130 and "finished stages are kept" in said
    assert not list(scratch.glob("ghostexport-*"))


@pytest.mark.slow
def test_a_killed_run_continues_and_ends_in_the_same_bytes(run, tiny_model, text_file, tmp_path):
    folder = tmp_path / "killed"
    command = [sys.executable, "-m", "ghostexport.cli", "surgery", str(folder)]
    start = [sys.executable, "-m", "ghostexport.cli", "recover", str(tiny_model), "-o", str(folder), *FLAGS]
    start += ["--calibration", str(text_file)]
    process = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (folder / "calibration.safetensors").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "operators" / "ghost.safetensors").exists()
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    for name in ("plan.json", "operators/ghost.safetensors", "onnx/ghost.onnx.data"):
        assert (folder / name).read_bytes() == (run / name).read_bytes()


def test_a_goal_before_build_asks_for_no_runtime_and_the_checks_load_the_model_once(
    tiny_model, text_file, tmp_path, monkeypatch
):
    from ghostexport import models, runtimes
    from ghostexport.cli import resolve
    from ghostexport.errors import RuntimeUnavailableError
    from ghostexport.pipeline import CHECKPOINT
    from ghostexport.pipeline import run as run_pipeline

    def none_here():
        raise RuntimeUnavailableError("No runtime is installed.", "pip install one.")

    loads, load = [], models.load_model
    monkeypatch.setattr(runtimes, "default_runtime", none_here)
    monkeypatch.setattr(models, "load_model", lambda *a, **k: loads.append(a) or load(*a, **k))
    flags = {
        "calibration": {"source": str(text_file), "sequences": 24, "length": 64},
        "select": {"prune": 2},
        "recover": {"operators": ["ghost-zero"], "quality": None},
    }
    recipe, folder = resolve(str(tiny_model), tmp_path / "run", None, flags)
    run_pipeline(recipe, folder, goal=CHECKPOINT)
    assert (tmp_path / "run" / "checkpoint" / "ghost-zero" / "config.json").is_file()
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["build"]["runtimes"] == []

    flags["recover"] = {"quality": "best"}
    recipe, folder = resolve(str(tiny_model), tmp_path / "best", None, flags)
    del loads[:]
    run_pipeline(recipe, folder, goal="select")
    assert len(loads) == 2  # what best becomes and the checks; the stage itself
    with pytest.raises(RuntimeUnavailableError):
        run_pipeline(recipe, folder, goal="build")
