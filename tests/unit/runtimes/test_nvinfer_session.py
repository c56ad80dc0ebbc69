"""Sessions on the strict fake: a KV cache updated in place, CUDA graphs, host time of a launch."""

import numpy as np
import pytest

from ghostexport.errors import BuildError, RecipeError
from ghostexport.execution import Execution
from ghostexport.recipe import BuildSection
from ghostexport.runtimes import RUNTIMES
from ghostexport.serving.generation import generate
from tests.runtime_graphs import dense_graph
from tests.unit.runtimes.in_place import CAPACITY, VOCABULARY, in_place_graph, in_place_logits
from tests.unit.runtimes.test_nvinfer import build, flavour, session
from tests.unit.runtimes.vendor_listing import RELEASES, is_rtx, listing

ALIASING = [release for release in RELEASES if "get_aliased_input_tensor" in listing(release)["ICudaEngine"]]


def in_place_session(release, tmp_path, monkeypatch):
    runtime, trt = flavour(release, monkeypatch)
    engine = build(runtime, in_place_graph(tmp_path / "graph.onnx"), tmp_path / "engines")
    return session(runtime, trt, engine), engine


@pytest.mark.parametrize("release", ALIASING)
def test_a_cache_updated_in_place_is_bound_once_and_decode_replays(release, tmp_path, monkeypatch):
    running, engine = in_place_session(release, tmp_path, monkeypatch)
    assert engine.extra["kv_capacity"] == CAPACITY
    assert engine.profiles["decode"]["past_key_values.0.key"] == ((1, 1, CAPACITY, 4),) * 2 + ((2, 1, CAPACITY, 4),)
    ids = np.random.default_rng(2).integers(0, VOCABULARY, (2, CAPACITY))
    logits, cache = running.forward(ids[:, :5], running.new_cache(2))
    parts = [logits]
    for step in range(5, CAPACITY):
        logits, cache = running.forward(ids[:, step : step + 1], cache)
        parts.append(logits)
    assert np.abs(np.concatenate(parts, 1) - in_place_logits(ids)).max() < 1e-5
    # of 11 decode steps the first is a plain launch; TensorRT-RTX captures inside the library
    assert (running.graph_captures, running.graph_replays) == ((0, 0) if is_rtx(release) else (1, 10))
    # one buffer set: two sequences of CAPACITY keys and values of 4 float32 numbers
    assert cache.length == CAPACITY and cache.nbytes == 2 * 2 * CAPACITY * 4 * 4 and len(running._sets) == 1
    with pytest.raises(RecipeError, match=f"its cache holds {CAPACITY}"):
        running.forward(ids[:, :1], cache)


def test_an_older_step_can_be_continued_in_place(tmp_path, monkeypatch):
    running, _ = in_place_session("tensorrt-11.4.0.106", tmp_path, monkeypatch)
    ids = np.random.default_rng(3).integers(0, VOCABULARY, (1, 6))
    _, cache = running.forward(ids[:, :5], running.new_cache(1))
    running.forward((ids[:, 5:] + 1) % VOCABULARY, cache)
    again, _ = running.forward(ids[:, 5:], cache)
    assert np.abs(again - in_place_logits(ids)[:, 5:]).max() < 1e-5


@pytest.mark.parametrize("limits", [{"max_tokens": CAPACITY + 1}, {"max_past": CAPACITY}])
def test_limits_beyond_the_capacity_are_refused_before_the_build(limits, tmp_path, monkeypatch):
    runtime, _ = flavour("tensorrt-10.16.1.11", monkeypatch)
    with pytest.raises(RecipeError, match=f"holds {CAPACITY} tokens") as caught:
        build(runtime, in_place_graph(tmp_path / "graph.onnx"), tmp_path / "engines", **limits)
    assert f"--max-past {min(limits.get('max_past', 15), CAPACITY - 1)}" in caught.value.remedy
    assert not (tmp_path / "engines").exists()


def test_onnxruntime_points_such_a_graph_to_tensorrt(tmp_path):
    graph = in_place_graph(tmp_path / "graph.onnx")
    with pytest.raises(BuildError, match="updates its KV cache in place") as caught:
        RUNTIMES["onnxruntime"].build(graph, tmp_path / "out" / "g", "dense", BuildSection(), Execution(device="cpu"))
    assert "--runtime tensorrt" in caught.value.remedy and not (tmp_path / "out").exists()


def test_a_growing_cache_replays_only_a_repeated_call(tmp_path, monkeypatch):
    runtime, trt = flavour("tensorrt-10.3.0", monkeypatch)
    running = session(runtime, trt, build(runtime, dense_graph(), tmp_path))
    generate(running, np.array([[3, 4, 5]]), 6)
    assert (running.graph_captures, running.graph_replays) == (0, 0)  # every step had another past length
    cache = running.new_cache(1, 7)
    for _ in range(4):
        running.timed_forward(np.array([[5]]), cache)
    assert (running.graph_captures, running.graph_replays) == (1, 3)


def test_the_host_time_of_a_launch_is_that_of_the_last_call(tmp_path, monkeypatch):
    runtime, trt = flavour("tensorrt-10.3.0", monkeypatch)
    running = session(runtime, trt, build(runtime, dense_graph(), tmp_path))
    assert running.enqueue_seconds is None
    clock = iter(range(0, 10**12, 2 * 10**6))  # every reading 2 ms after the one before
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(clock))
    cache = running.new_cache(1, 7)
    seen = []
    for _ in range(3):  # a plain launch, a capture with its replay, a replay
        running.timed_forward(np.array([[5]]), cache)
        seen.append(running.enqueue_seconds)
    assert seen == pytest.approx([2e-3, 6e-3, 6e-3])  # the fake replays by launching, which reads the clock twice more


def test_a_larger_output_buffer_is_bound_by_every_plan(tmp_path, monkeypatch):
    runtime, trt = flavour("tensorrt-10.3.0", monkeypatch)
    running = session(runtime, trt, build(runtime, dense_graph(), tmp_path, profiles="split", max_batch=4))
    prompt = np.array([[3, 4]])
    first, _ = running.forward(prompt, running.new_cache(1))
    running.forward(np.full((4, 1), 5), running.new_cache(4))  # the other plan, logits of 4 tokens in place of 2
    again, _ = running.forward(prompt, running.new_cache(1))
    assert np.array_equal(first, again)
