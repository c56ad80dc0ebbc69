"""Real TensorRT-RTX builds, ahead of time on the CPU: what they prove is parsing, building, bindings and profiles."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ghostexport.errors import BuildError, RecipeError, RunFolderError, RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.recipe import BuildSection
from ghostexport.runtimes import RUNTIMES, current_engine
from ghostexport.runtimes.nvinfer.diagnosis import capture_log, explain
from ghostexport.runtimes.nvinfer.engine_loading import create_runtime, load_plan
from ghostexport.runtimes.sidecar import read_sidecar
from tests.runtime_graphs import dense_graph, variant_graph
from tests.unit.runtimes.in_place import CAPACITY, in_place_graph

pytest.importorskip("tensorrt_rtx")
RUNTIME = RUNTIMES["tensorrt-rtx"]
SMALL = {"max_batch": 2, "max_tokens": 16, "max_past": 31}


def build(graph, folder, say=lambda line: None, **settings):
    return RUNTIME.build(graph, folder / graph.stem, graph.stem, BuildSection(**SMALL | settings), Execution(say=say))


def test_the_runtime_is_found_and_says_what_it_can_do():
    found = RUNTIME.availability()
    assert found.build and found.version.split(".")[0].isdigit() and "\n" not in found.reason


def test_a_ghost_engine_with_two_profiles(tmp_path):
    lines = []
    engine = build(variant_graph("ghost"), tmp_path, lines.append)
    assert engine.path == tmp_path / "ghost.engine" and engine.plan_bytes == engine.path.stat().st_size > 1 << 20
    assert "GB of host memory" in lines[0] and "float32 engine" in lines[0]
    sidecar = json.loads((tmp_path / "ghost.json").read_text())
    assert sidecar["profiles"]["prefill"]["attention_mask"] == [[1, 1], [1, 16], [2, 47]]
    assert sidecar["profiles"]["decode"]["input_ids"] == [[1, 1], [1, 1], [2, 1]]
    assert sidecar["extra"]["operator_layers"] == ["ghost.0.matmul", "ghost.0.add"]
    assert sidecar["extra"]["network_name"].startswith("ghost|")
    assert sidecar["extra"]["build_peak_bytes"] > engine.weight_bytes
    assert sidecar["flags"]["max_past"] == 31 and sidecar["extra"]["tf32"] is True
    assert [t["name"] for t in sidecar["inputs"]][:2] == ["input_ids", "attention_mask"]
    assert len(sidecar["inputs"]) == 3 + 4 and len(sidecar["outputs"]) == 1 + 4  # two blocks are left
    first, second = sidecar["extra"]["trtexec"]["rtx"]
    assert "--profile=1" in first and "--useProfile=1" in second and "attention_mask:1x17" in second
    assert read_sidecar(engine.path).sha256 == engine.sha256
    target = tmp_path / "ghost"
    assert current_engine(RUNTIME, variant_graph("ghost"), target, BuildSection(**SMALL)) is not None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ghost.engine", "ghost.json"]


@pytest.mark.slow
@pytest.mark.parametrize("opset", [20, 23])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes_and_opsets(tmp_path, dtype, opset):
    engine = build(variant_graph("ghost", dtype, opset), tmp_path, profiles="single")
    assert engine.inputs[-1].dtype == dtype and engine.extra["opset"] == opset


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dense", "pruned", "linearpatch-rotate", "linearpatch-diag", "affine"])
def test_variants(tmp_path, variant):
    graph = dense_graph() if variant == "dense" else variant_graph(variant)
    engine = build(graph, tmp_path, profiles="single")
    layers = {"dense": 0, "pruned": 0, "affine": 3}.get(variant, 2)
    assert len(engine.extra["operator_layers"]) == layers


@pytest.mark.slow
def test_several_spans_have_an_operator_each(tmp_path):
    graph = variant_graph("ghost", spans=((0, 1), (2, 3)))
    engine = build(graph, tmp_path, profiles="single")
    assert engine.extra["operator_layers"] == ["ghost.0.matmul", "ghost.0.add", "ghost.1.matmul", "ghost.1.add"]


@pytest.mark.slow
def test_targets_and_flags_that_work_without_a_gpu(tmp_path):
    engine = build(
        variant_graph("ghost"),
        tmp_path,
        profiles="single",
        compute_capability=("SM86", "SM89", "SM120"),
        hardware_compatibility="none",
        weight_streaming=True,
        opt_level=1,
        workspace=256,
    )
    assert engine.flags["compute_capability"] == ["SM86", "SM89", "SM120"]


@pytest.mark.slow
def test_split_profiles_make_two_plans(tmp_path):
    engine = build(dense_graph(), tmp_path, profiles="split")
    assert list(engine.sha256) == ["dense.prefill.engine", "dense.decode.engine"]
    assert engine.plan_bytes == sum((tmp_path / name).stat().st_size for name in engine.sha256)
    assert read_sidecar(tmp_path / "dense.decode.engine").path == tmp_path / "dense.prefill.engine"


def test_several_points_become_profiles_of_one_plan(tmp_path):
    engine = build(variant_graph("pruned"), tmp_path, profiles="single", token_points=(4,))
    assert engine.profiles["single-t16"]["input_ids"] == ((1, 5), (1, 16), (2, 16))


def test_a_cache_updated_in_place_is_accepted_with_its_fixed_capacity(tmp_path):
    engine = build(in_place_graph(tmp_path / "m.onnx"), tmp_path / "out", max_past=15)
    assert engine.extra["kv_capacity"] == CAPACITY == engine.inputs[-1].dims[2]


def test_an_operator_only_onnxruntime_supplies_points_there(tmp_path):
    graph = attention_graph(tmp_path / "genai.onnx")
    with pytest.raises(BuildError, match="GroupQueryAttention") as caught:
        build(graph, tmp_path / "out")
    assert "--runtime onnxruntime" in caught.value.remedy
    assert "'attn' (GroupQueryAttention)" in caught.value.message and caught.value.log
    assert not list((tmp_path / "out").iterdir())


def test_turing_has_no_float32_kernels(tmp_path):
    with pytest.raises(BuildError, match="no float32 kernels") as caught:
        build(variant_graph("pruned"), tmp_path, profiles="single", compute_capability=("SM75",))
    assert "--dtype float16" in caught.value.remedy and "FP32 GEMM" in caught.value.log
    assert not list(tmp_path.iterdir())


def test_a_profile_that_contradicts_the_graph_is_refused_by_the_library(tmp_path):
    graph = inconsistent_graph(tmp_path / "m.onnx")
    with pytest.raises(BuildError, match="a profile contradicts the graph's shapes") as caught:
        build(graph, tmp_path / "out")
    assert caught.value.log and not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"version_compatible": True}, "ships no lean runtime"),
        ({"compute_capability": ("SM87",)}, "not SM87"),
        ({"compute_capability": ("CURRENT", "SM86")}, "CURRENT"),
        ({"providers": ("cpu",)}, "providers .* means nothing to tensorrt-rtx"),
    ],
)
def test_options_it_does_not_support_are_refused(tmp_path, settings, message):
    with pytest.raises(RecipeError, match=message):
        build(variant_graph("pruned"), tmp_path, **settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(RUNTIME.availability().run, reason="there is a GPU")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"refittable": True}, "refittable needs a GPU"),
        ({"strip_plan": True}, "strip_plan needs a GPU"),
        ({"compute_capability": ("CURRENT",)}, "there is none here"),
    ],
)
def test_options_that_need_a_gpu_are_refused_without_one(tmp_path, settings, message):
    with pytest.raises(RecipeError, match=message):
        build(variant_graph("pruned"), tmp_path, **settings)


def test_a_timing_cache_is_refused(tmp_path):
    execution = Execution(timing_cache=tmp_path / "cache")
    with pytest.raises(RecipeError, match="no timing cache"):
        RUNTIME.build(variant_graph("pruned"), tmp_path / "p", "pruned", BuildSection(), execution)


def test_missing_external_data_is_named_before_the_library_is_asked(tmp_path):
    graph = tmp_path / "dense.onnx"
    graph.write_bytes(dense_graph().read_bytes())
    with pytest.raises(BuildError, match=r"dense\.onnx\.data of dense\.onnx is missing"):
        build(graph, tmp_path / "out")


@pytest.mark.skipif(RUNTIME.availability().run, reason="there is a GPU")
def test_loading_without_a_gpu_and_damaged_plans_are_one_clear_message(tmp_path):
    engine = build(variant_graph("pruned"), tmp_path, profiles="single")
    with pytest.raises(RuntimeUnavailableError, match=r"cannot run .*pruned\.engine: no NVIDIA driver|CUDA|GPU"):
        RUNTIME.load(engine, Execution())
    trt = RUNTIME.module()
    logger = capture_log(trt)
    runtime = create_runtime(trt, "TensorRT-RTX", logger)
    for content in (engine.path.read_bytes(), engine.path.read_bytes()[:1000], b"ftrt" + bytes(5000)):
        plan = tmp_path / "damaged.engine"
        plan.write_bytes(content)
        with pytest.raises(RuntimeUnavailableError, match="cannot load") as caught:
            load_plan(trt, "TensorRT-RTX", plan, logger, runtime)
        assert explain(caught.value.message) is not None


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    from pathlib import Path

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            raise OSError(28, "No space left on device")

    real = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda self, mode="r", *a, **k: Full(real(self, mode)) if self.suffix == ".tmp" else real(self, mode, *a, **k),
    )
    with pytest.raises(RunFolderError, match="No space left on device"):
        build(variant_graph("pruned"), tmp_path, profiles="single")
    assert not list(tmp_path.iterdir())


def test_killing_a_build_leaves_no_engine_and_the_next_build_cleans_up(tmp_path):
    graph = variant_graph("ghost")
    code = (
        "import sys; from pathlib import Path; from ghostexport.runtimes import RUNTIMES;"
        "from ghostexport.execution import Execution; from ghostexport.recipe import BuildSection;"
        "RUNTIMES['tensorrt-rtx'].build(Path(sys.argv[1]), Path(sys.argv[2]), 'ghost',"
        " BuildSection(profiles='single'), Execution())"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(graph), str(tmp_path / "ghost")])
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".ghost.*.tmp")) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.poll() is None and list(tmp_path.glob(".ghost.*.tmp"))
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "ghost.engine").exists() and not (tmp_path / "ghost.json").exists()
    build(graph, tmp_path, profiles="single")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ghost.engine", "ghost.json"]


def attention_graph(path):
    """One com.microsoft GroupQueryAttention, as ONNX Runtime GenAI's builder makes them."""
    value = helper.make_tensor_value_info
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "past_key_values.0.key", "past_key_values.0.value", "seqlens", "total"],
        ["logits", "present.0.key", "present.0.value"],
        name="attn",
        domain="com.microsoft",
        num_heads=4,
        kv_num_heads=2,
    )

    def constant(name, shape):
        return helper.make_tensor(name, TensorProto.FLOAT, shape, np.zeros(int(np.prod(shape)), np.float32))

    kv = ["batch", 2, "past", 16]
    graph = helper.make_graph(
        [node],
        "genai",
        [
            value("past_key_values.0.key", TensorProto.FLOAT, kv),
            value("past_key_values.0.value", TensorProto.FLOAT, kv),
        ],
        [
            value("logits", TensorProto.FLOAT, ["batch", "tokens", 64]),
            value("present.0.key", TensorProto.FLOAT, ["batch", 2, "total", 16]),
            value("present.0.value", TensorProto.FLOAT, ["batch", 2, "total", 16]),
        ],
        [
            constant("q", [1, 1, 64]),
            constant("k", [1, 1, 32]),
            constant("v", [1, 1, 32]),
            helper.make_tensor("seqlens", TensorProto.INT32, [1], [0]),
            helper.make_tensor("total", TensorProto.INT32, [1], [1]),
        ],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets), path)
    return path


def inconsistent_graph(path):
    """Adds seven numbers to ``attention_mask`` [batch, total]: no profile with another total fits."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Add", ["attention_mask", "seven"], ["sum"], name="sum"),
            helper.make_node("Cast", ["sum"], ["logits"], to=TensorProto.FLOAT, name="cast"),
            helper.make_node("Identity", ["past_key_values.0.key"], ["present.0.key"], name="kv"),
        ],
        "inconsistent",
        [
            value("attention_mask", TensorProto.INT64, ["batch", "total"]),
            value("past_key_values.0.key", TensorProto.FLOAT, ["batch", 2, "past", 16]),
        ],
        [
            value("logits", TensorProto.FLOAT, ["batch", 7]),
            value("present.0.key", TensorProto.FLOAT, ["batch", 2, "past", 16]),
        ],
        [helper.make_tensor("seven", TensorProto.INT64, [7], range(7))],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    return path
