"""The TensorRT code path on a strict fake of every release: build, refit and run, calls and numbers."""

import dataclasses

import numpy as np
import pytest

from ghostexport.errors import BuildError, RecipeError, RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.recipe import BuildSection
from ghostexport.runtimes import RUNTIMES
from ghostexport.runtimes.gpu import Gpu
from ghostexport.runtimes.nvinfer import builder
from ghostexport.runtimes.nvinfer.engine_loading import why_not_loadable
from ghostexport.runtimes.nvinfer.flavours import TensorRT, TensorRTRTX
from ghostexport.runtimes.nvinfer.nv_session import NvSession
from ghostexport.serving.generation import generate
from tests.runtime_graphs import dense_graph, operators, variant_graph
from tests.unit.runtimes.fake_vendor import HostDevice, Module
from tests.unit.runtimes.vendor_listing import RELEASES, is_rtx, listing

GPU = Gpu("Orin", "8.7", "12.6", 8 << 30)
SMALL = {"max_batch": 2, "max_tokens": 8, "max_past": 15}


def flavour(release, monkeypatch, gpu=GPU):
    """The runtime of a release with its vendor module replaced, as on a machine with ``gpu``."""
    runtime = TensorRTRTX() if is_rtx(release) else TensorRT()
    trt = Module(release)
    monkeypatch.setattr(type(runtime), "vendor", lambda self: trt)
    for module in ("builder", "flavours"):
        monkeypatch.setattr(f"ghostexport.runtimes.nvinfer.{module}.find_gpu", lambda: gpu)
    return runtime, trt


def build(runtime, graph, folder, execution=None, **settings):
    settings = BuildSection(**SMALL | settings)
    return runtime.build(graph, folder / graph.stem, graph.stem, settings, execution or Execution())


def session(runtime, trt, engine):
    return NvSession(trt, runtime.title, engine, HostDevice())


@pytest.mark.parametrize("release", RELEASES)
def test_the_whole_path_on_every_release(release, tmp_path, monkeypatch):
    runtime, trt = flavour(release, monkeypatch)
    engine = build(runtime, variant_graph("ghost"), tmp_path, refittable=True)
    streams = "build_serialized_network_to_stream" in listing(release)["Builder"]
    individual = "REFIT_INDIVIDUAL" in listing(release)["BuilderFlag"]
    assert trt.calls == [
        "Builder",
        "Builder.create_network",
        "OnnxParser.parse_from_file",
        "INetworkDefinition.name=",
        "Builder.create_builder_config",
        "IBuilderConfig.profiling_verbosity=",
        "IBuilderConfig.set_flag",
        *(["INetworkDefinition.mark_weights_refittable"] if individual else []),
        *["Builder.create_optimization_profile", "IBuilderConfig.add_optimization_profile"] * 2,
        "Builder.build_serialized_network_to_stream" if streams else "Builder.build_serialized_network",
    ]
    assert engine.extra["refittable"] == (["ghost.0.delta"] if individual else ["*"])

    trt.calls.clear()
    swapped = runtime.swap(engine, operators("linearpatch-diag"), tmp_path / "patched", Execution())
    keeps = ["ISerializationConfig.set_flag"] if "INCLUDE_REFIT" in listing(release)["SerializationFlag"] else []
    assert trt.calls == [
        "Runtime",
        "Runtime.deserialize_cuda_engine",
        "Refitter",
        "Refitter.set_named_weights",
        "Refitter.refit_cuda_engine",
        "ICudaEngine.create_serialization_config",
        *keeps,
        "ICudaEngine.serialize_with_config",
    ]
    assert swapped.path == tmp_path / "patched.engine" and swapped.variant == "linearpatch-diag"

    trt.calls.clear()
    ids = np.random.default_rng(0).integers(3, 128, (2, 8))
    reference = onnxruntime_logits(variant_graph("linearpatch-diag"), tmp_path, ids)
    running = session(runtime, trt, swapped)
    first, cache = running.forward(ids[:, :5], running.new_cache(2))
    second, cache = running.forward(ids[:, 5:7], cache)
    third, cache = running.forward(ids[:, 7:], cache)
    running.close()
    assert np.abs(np.concatenate([first, second, third], 1) - reference).max() < 1e-5
    assert trt.calls.count("IExecutionContext.execute_async_v3") == 3
    # prefill twice (profile 0), then one token: profile 1
    assert trt.calls.count("IExecutionContext.set_optimization_profile_async") == 1
    assert ("IRuntimeConfig.set_runtime_cache" in trt.calls) == is_rtx(release)
    assert (tmp_path / "patched.runtime_cache").exists() == is_rtx(release)


def onnxruntime_logits(graph, folder, ids):
    runtime, execution = RUNTIMES["onnxruntime"], Execution(device="cpu")
    engine = runtime.build(graph, folder / "reference" / graph.stem, graph.stem, BuildSection(), execution)
    running = runtime.load(engine, execution)
    return running.forward(ids, running.new_cache(len(ids)))[0]


@pytest.mark.parametrize("profiles", ["joint", "split", "single"])
def test_generation_alternates_buffers_and_profiles(profiles, tmp_path, monkeypatch):
    runtime, trt = flavour("tensorrt-10.3.0", monkeypatch)
    engine = build(runtime, dense_graph(), tmp_path, profiles=profiles)
    running = session(runtime, trt, engine)
    cpu = RUNTIMES["onnxruntime"]
    reference = cpu.load(cpu.build(dense_graph(), tmp_path / "r", "dense", BuildSection(), Execution()), Execution())
    ids = np.random.default_rng(1).integers(3, 128, (2, 4))
    assert np.array_equal(generate(running, ids, 10), generate(reference, ids, 10))


def test_a_repeated_decode_call_is_captured_once_and_replayed(tmp_path, monkeypatch):
    runtime, trt = flavour("tensorrt-11.4.0.106", monkeypatch)
    running = session(runtime, trt, build(runtime, dense_graph(), tmp_path))
    cache = running.new_cache(1, 7)
    token = np.array([[5]])
    first, _ = running.forward(token, cache)
    for _ in range(3):
        again, _ = running.forward(token, cache)
        assert np.array_equal(first, again)
    assert running._device.captured == 1
    other, longer = running.forward(token + 1, cache)  # new values in the same buffers
    assert not np.array_equal(first, other) and running._device.captured == 1
    running.forward(token, longer)  # another length: a plain call
    assert running._device.captured == 1
    seconds, _ = running.timed_forward(token, running.new_cache(1, 3))
    assert seconds == 0.5


def test_an_overwritten_cache_is_refused(tmp_path, monkeypatch):
    runtime, trt = flavour("tensorrt-10.3.0", monkeypatch)
    running = session(runtime, trt, build(runtime, dense_graph(), tmp_path))
    ids = np.array([[5]])
    start = running.new_cache(1)
    _, one = running.forward(ids, start)
    _, two = running.forward(ids, one)
    assert (two.length, two.nbytes) == (2, 2 * 3 * 1 * 2 * 2 * 16 * 4)
    with pytest.raises(ValueError, match="overwritten"):
        running.forward(ids, start)
    running.new_cache(1)
    with pytest.raises(ValueError, match="overwritten"):
        running.forward(ids, two)


def test_a_call_outside_the_profiles_names_the_limits(tmp_path, monkeypatch):
    runtime, trt = flavour("tensorrt-10.3.0", monkeypatch)
    running = session(runtime, trt, build(runtime, dense_graph(), tmp_path))
    with pytest.raises(RecipeError, match="no profile for batch 1, 9 tokens after 0"):
        running.forward(np.ones((1, 9), np.int64), running.new_cache(1))
    with pytest.raises(RecipeError, match="batch 3"):
        running.new_cache(3)


def test_every_setting_reaches_the_config(tmp_path, monkeypatch):
    runtime, trt = flavour("tensorrt-10.13.3.9", monkeypatch)
    cache = tmp_path / "timing.cache"
    settings = {
        "workspace": 64,
        "hardware_compatibility": "same-compute-capability",
        "version_compatible": True,
        "weight_streaming": True,
        "opt_level": 5,
    }
    build(runtime, variant_graph("ghost"), tmp_path, Execution(timing_cache=cache), **settings)
    assert cache.read_bytes() == b"timings"
    for call in (
        "set_memory_pool_limit",
        "hardware_compatibility_level=",
        "builder_optimization_level=",
        "set_timing_cache",
    ):
        assert f"IBuilderConfig.{call}" in trt.calls
    assert trt.calls.count("IBuilderConfig.set_flag") == 2
    cache.write_bytes(b"foreign")
    with pytest.raises(BuildError, match="another TensorRT version or GPU"):
        build(runtime, variant_graph("ghost"), tmp_path, Execution(timing_cache=cache))


def test_a_stripped_plan_takes_its_weights_from_the_graph(tmp_path, monkeypatch):
    runtime, trt = flavour("tensorrt-10.3.0", monkeypatch)
    engine = build(runtime, dense_graph(), tmp_path, strip_plan=True)
    session(runtime, trt, engine)
    assert "OnnxParserRefitter.refit_from_file" in trt.calls and "Refitter.refit_cuda_engine" in trt.calls


@pytest.mark.parametrize(
    ("release", "settings", "message"),
    [
        ("tensorrt-10.3.0", {"hardware_compatibility": "same-compute-capability"}, "no level same-compute-capability"),
        ("tensorrt-10.3.0", {"compute_capability": ("SM86",)}, "means nothing to tensorrt"),
        ("tensorrt-11.4.0.106", {"runtimes": ("tensorrt-rtx",), "compute_capability": ("SM86",)}, "GPU it runs on"),
        ("tensorrt_rtx-1.7.1.116", {"compute_capability": ("SM90",)}, "not SM90"),
        ("tensorrt_rtx-1.7.1.116", {"version_compatible": True}, "no lean runtime"),
    ],
)
def test_what_a_release_lacks_is_refused(release, settings, message, tmp_path, monkeypatch):
    runtime, _ = flavour(release, monkeypatch)
    with pytest.raises(RecipeError, match=message):
        build(runtime, dense_graph(), tmp_path, **settings)
    assert not list(tmp_path.iterdir())


def test_an_engine_that_is_not_refittable_says_so(tmp_path, monkeypatch):
    runtime, _ = flavour("tensorrt-10.3.0", monkeypatch)
    engine = build(runtime, variant_graph("ghost"), tmp_path)
    with pytest.raises(BuildError, match="not built refittable"):
        runtime.swap(engine, operators(), tmp_path / "x", Execution())


def test_a_builder_that_cannot_start_is_explained(monkeypatch, tmp_path):
    runtime, trt = flavour("tensorrt-11.4.0.106", monkeypatch)

    def broken(logger):
        logger.log(trt.ILogger.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    trt.Builder = broken
    found = runtime.availability()
    assert not found.build and "no usable NVIDIA GPU or driver" in found.reason
    with pytest.raises(RuntimeUnavailableError, match="no usable NVIDIA GPU or driver"):
        build(runtime, dense_graph(), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("libnvinfer.so.11: cannot open shared object file: No such file or directory", "but not its libraries"),
        ("No module named 'tensorrt'", "Python package is not installed"),
    ],
)
def test_a_library_that_cannot_be_imported_is_explained(raw, message, monkeypatch):
    def fail(self):
        raise ImportError(raw)

    monkeypatch.setattr(TensorRT, "vendor", fail)
    found = TensorRT().availability()
    assert message in found.reason and "pip install 'ghostexport[tensorrt]'" in found.reason and not found.build


@pytest.mark.parametrize(
    ("changes", "version", "gpu", "reason"),
    [
        ({}, "10.3.0", GPU, None),
        ({"runtime": "tensorrt-rtx"}, "10.3.0", GPU, "built for tensorrt-rtx"),
        ({}, "10.7.0", GPU, "built with version 10.3.0, here is 10.7.0"),
        ({"flags": {"version_compatible": True}}, "10.7.0", GPU, None),
        ({"flags": {"version_compatible": True}}, "10.0.1", GPU, "newer than 10.0.1"),
        ({}, "10.3.0", Gpu("H200", "9.0", "12.6", 0), "compute capability 8.7, this GPU has 9.0"),
        ({"flags": {"hardware_compatibility": "ampere-plus"}}, "10.3.0", Gpu("H200", "9.0", "12.6", 0), None),
        ({"flags": {"hardware_compatibility": "ampere-plus"}}, "10.3.0", Gpu("T4", "7.5", "12.6", 0), "has 7.5"),
        ({}, "10.3.0", Gpu("Orin", "8.7", "11.4", 0), "driver 12.6, this driver supports only 11.4"),
    ],
)
def test_the_sidecar_is_checked_against_this_machine(changes, version, gpu, reason, tmp_path, monkeypatch):
    runtime, _ = flavour("tensorrt-10.3.0", monkeypatch)
    engine = build(runtime, dense_graph(), tmp_path)
    flags = {**engine.flags, **changes.get("flags", {})}
    engine = dataclasses.replace(engine, **{**changes, "flags": flags})
    found = why_not_loadable(engine, "tensorrt", version, gpu)
    assert found is None if reason is None else reason in found


def test_rtx_targets_are_checked_against_the_gpu(tmp_path, monkeypatch):
    runtime, trt = flavour("tensorrt_rtx-1.7.1.116", monkeypatch)
    engine = build(runtime, dense_graph(), tmp_path, compute_capability=("SM86", "SM89"))
    assert "this GPU is SM120" in why_not_loadable(engine, "tensorrt-rtx", engine.version, Gpu("", "12.0", "13.0", 0))
    assert why_not_loadable(engine, "tensorrt-rtx", engine.version, Gpu("", "8.9", "13.0", 0)) is None
    assert "use tensorrt" in runtime.why_not_here(trt, Gpu("H200", "9.0", "13.0", 0))


def test_loading_without_a_gpu_says_why(tmp_path, monkeypatch):
    runtime, _ = flavour("tensorrt-10.3.0", monkeypatch)
    engine = build(runtime, dense_graph(), tmp_path)
    monkeypatch.setattr(builder, "find_gpu", lambda: "no NVIDIA driver here")
    with pytest.raises(RuntimeUnavailableError, match="no NVIDIA driver here"):
        runtime.load(engine, Execution())


def test_trtexec_lines_time_the_same_thing_in_both_spellings(tmp_path, monkeypatch):
    runtime, _ = flavour("tensorrt-10.3.0", monkeypatch)
    lines = build(runtime, dense_graph(), tmp_path, refittable=True, workspace=64).extra["trtexec"]
    old, new = lines["10.x"], lines["11.x"]
    assert len(old) == len(new) == 2
    build_line, decode_line = old
    for part in (
        "--onnx=dense.onnx",
        "--saveEngine=dense.engine",
        "--stronglyTyped",
        "--memPoolSize=workspace:64",
        "--refit",
        "--profile=1 --minShapes=input_ids:1x1,attention_mask:1x1,",
        "--useProfile=0 --shapes=input_ids:1x8,attention_mask:1x8,",
        "--noDataTransfers --useSpinWait --useCudaGraph",
    ):
        assert part in build_line, part
    assert decode_line.startswith("trtexec --loadEngine=dense.engine --useProfile=1 --shapes=input_ids:1x1,")
    assert "--stronglyTyped" not in new[0] and "--noDataTransfers" not in new[0]
