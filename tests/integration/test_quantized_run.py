"""Quantised variants beside the float ones, through every stage."""

import json

import numpy as np
import pytest
import torch

from ghostexport.execution import Execution
from ghostexport.models import load_model, patch
from ghostexport.models.rounding import round_weights
from ghostexport.quantization.reader import rounded_weights, write_unpacked
from ghostexport.runfolder import RunFolder
from ghostexport.runtimes import load_engine
from ghostexport.runtimes.ort.onnxruntime import open_graph


@pytest.fixture(scope="module")
def run(tiny_model, exported_run, text_file, tmp_path_factory):
    """Float, int4, int8 and NVFP4 graphs, verified; engines of what ONNX Runtime holds are built in tests."""
    from ghostexport.cli import resolve
    from ghostexport.pipeline import run as run_pipeline

    path = tmp_path_factory.mktemp("quantised") / "run"
    given = {
        "calibration": {"source": str(text_file), "sequences": 24, "length": 64},
        "select": {"prune": 2},
        "recover": {"operators": ["ghost"]},
        "quantize": {"format": ["int4", "int8", "nvfp4"]},
        "build": {"runtimes": ["onnxruntime"]},
    }
    recipe, folder = resolve(str(tiny_model), path, None, given)
    folder.adopt("export", exported_run)
    run_pipeline(recipe, folder, goal="verify")
    return folder


VARIANTS = [f"{name}.{form}" for form in ("int4", "int8", "nvfp4") for name in ("dense", "ghost")]


def test_every_quantised_graph_equals_pytorch_with_the_rounded_weights(run):
    parity = run.read_parity()
    assert list(parity) == ["dense", "pruned", "ghost", *VARIANTS]
    assert all(parity[name]["passed"] for name in VARIANTS)
    assert "unpacked" in parity["ghost.nvfp4"]["note"] and not parity["ghost.int4"]["note"]


@pytest.mark.parametrize("variant", ["dense.int4", "ghost.nvfp4"])
def test_the_unpacked_graph_holds_the_rounded_weights(run, variant, tmp_path):
    import onnx
    from onnx import numpy_helper

    made = onnx.load(write_unpacked(run.graph_path(variant), tmp_path))
    stored = {i.name.removesuffix(".dequantize.value.float"): numpy_helper.to_array(i) for i in made.graph.initializer}
    found = dict(rounded_weights(run.graph_path(variant)))
    assert found and all(np.array_equal(stored[name], weight) for name, weight in found.items())
    assert not any(node.op_type == "DequantizeLinear" for node in made.graph.node)


def test_verify_sees_a_wrong_scale(run, tiny_model, tmp_path):
    from onnx import load, numpy_helper, save

    from ghostexport.verification import compare

    graph = load(run.graph_path("ghost.int4"))
    scale = next(i for i in graph.graph.initializer if i.name.endswith(".scale"))
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * np.float32(1.1), scale.name))
    save(graph, tmp_path / "wrong.onnx")
    dense = load_model(str(tiny_model), "float32")
    ghost = patch(dense, run.read_plan(), run.read_operators("ghost.int4")).model
    before = {name: tensor.clone() for name, tensor in ghost.state_dict().items()}
    twin = round_weights(ghost, run.graph_path("ghost"), run.graph_path("ghost.int4"))
    assert compare(twin, run.graph_path("ghost.int4")).passed
    assert not compare(twin, tmp_path / "wrong.onnx").passed
    assert not compare(ghost, run.graph_path("ghost.int4")).passed
    assert all(torch.equal(tensor, before[name]) for name, tensor in ghost.state_dict().items())


def test_scales_are_weighted_by_what_the_repaired_graph_sees(run):
    reports = run.read().quantization
    assert list(reports) == sorted(VARIANTS) and all(report["weighted"] for report in reports.values())
    errors = [[row["relative_error"] for row in reports[f"{name}.int4"]["linears"]] for name in ("dense", "ghost")]
    assert errors[0][:4] == pytest.approx(errors[1][:4], rel=1e-5)  # block 0 stands before the cut
    assert errors[0][-4:] != pytest.approx(errors[1][-4:], rel=1e-3)


def test_engines_swap_show_eval_and_report_know_the_variants(run, cli, tmp_path):
    code, _, err = cli("build", "engine", run.path, "--runtime", "onnxruntime", "--quantize", "nvfp4")
    assert code == 2 and "onnxruntime has no kernels for nvfp4 weights; it holds int8, int4" in err
    code, shown, err = cli("bench", run.path, "--preset", "quick", "--repeats", "2", "--quantize", "int4")
    assert code == 0, err
    assert "ghost.int4" in shown and "dense.int4" in shown and "int8" not in shown
    figures = json.loads(run.bench_path("onnxruntime").read_text())
    assert {c["variant"] for c in figures["comparisons"]} >= {"dense.int4", "ghost.int4"}
    assert figures["variants"]["ghost.int4"]["parity"]
    size = json.loads(run.engine_quality_path.read_text())["sizes"]
    assert size["ghost.int4"]["blocks"] == size["ghost"]["blocks"] == 4
    assert size["ghost.int4"]["weight_bytes"] < 0.6 * size["ghost"]["weight_bytes"]
    page = run.report_path.read_text()
    assert "ghost.int4" in page and "Quantised weights" in page

    code, _, err = cli("eval", run.path, "--no-onnx", "--generate", "0")
    assert code == 0, err
    quality = json.loads(run.model_quality_path.read_text())["variants"]
    assert quality["ghost"]["kl"] > 0 and 0 < quality["ghost.int4"]["kl_float"] < quality["ghost.int4"]["kl"] * 10

    engine = run.sidecar_path("onnxruntime", "ghost.int4")
    other = tmp_path / "other.safetensors"
    operators = run.read_operators("ghost")
    halved = operators.__class__(
        "other", tuple(o.__class__(o.boundary, o.kind, delta=o.delta / 2) for o in operators.operators), operators.plan
    )
    other.write_bytes(halved.to_bytes())
    code, _, err = cli("swap", engine, "--operator", other)
    assert code == 0, err
    ids = np.arange(3, 15)[None]
    outputs = {}
    for path in (engine, engine.with_name("other.json")):
        _, session = load_engine(path, Execution())
        outputs[path.stem] = session.forward(ids, session.new_cache(1))[0]
    assert np.abs(outputs["other"] - outputs["ghost.int4"]).max() > 1e-3


def test_a_run_folder_is_quantised_by_its_own_verb_and_float_again(run, cli):
    code, _, err = cli("quantize", run.path, "--format", "int8")
    assert code == 0, err
    assert run.graph_path("ghost.int8").exists()
    session = open_graph(run.graph_path("ghost.int8"))
    assert session.forward(np.arange(3, 9)[None], session.new_cache(1))[0].shape[1] == 6
    code, shown, err = cli("verify", run.path, "--quantize", "none")
    assert code == 0, err
    assert set(RunFolder(run.path).read_parity()) == {"dense", "pruned", "ghost"} and "int8" not in shown


@pytest.mark.slow
def test_a_named_device_gets_half_precision_int4_engines(cli, tiny_model, text_file, tmp_path):
    pytest.importorskip("tensorrt_rtx")
    run = tmp_path / "run"
    flags = ("--calibration", text_file, "--sequences", "24", "--length", "64", "--prune", "2", "--operator", "ghost")
    shape = ("--max-batch", "1", "--max-tokens", "16", "--max-past", "31", "--profiles", "single")
    code, _, err = cli("build", "engine", tiny_model, "-o", run, "--hardware", "rtx30", *flags, *shape)
    assert code == 0, err
    assert "dtype float16: half the bytes" in err and "format int4: " in err
    sidecar = json.loads(RunFolder(run).sidecar_path("tensorrt-rtx", "ghost.int4").read_text())
    assert sidecar["flags"]["compute_capability"] == ["SM86"] and sidecar["plan_bytes"] > 0
    assert RunFolder(run).read_parity()["ghost.int4"]["dtype"] == "float16"
    code, _, err = cli("build", "engine", run, "--hardware", "rtx30", "--quantize", "fp8")
    assert code == 2 and "fp8 needs SM89" in err
