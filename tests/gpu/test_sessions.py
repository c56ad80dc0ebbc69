"""Engines that run on a GPU: parity with ONNX Runtime on the CPU, generation, swap. Skipped where nothing can run."""

import numpy as np
import pytest

from ghostexport.execution import Execution
from ghostexport.recipe import BuildSection
from ghostexport.runtimes import RUNTIMES
from ghostexport.serving.generation import generate
from tests.runtime_graphs import dense_graph, operators, variant_graph

# TF32 products have ten mantissa bits; logits of the tiny model are of order 1
TOLERANCE = 2e-2
SMALL = {"max_batch": 2, "max_tokens": 32, "max_past": 63}

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["tensorrt", "tensorrt-rtx"])
def runtime(request):
    found = RUNTIMES[request.param].availability()
    if not (found.build and found.run):
        pytest.skip(found.reason)
    return RUNTIMES[request.param]


def reference(graph, folder):
    cpu, execution = RUNTIMES["onnxruntime"], Execution(device="cpu")
    return cpu.load(cpu.build(graph, folder / "cpu" / graph.stem, graph.stem, BuildSection(), execution), execution)


def agree(session, expected):
    ids = np.random.default_rng(0).integers(3, 128, (2, 20))
    ours, theirs = session.new_cache(2), expected.new_cache(2)
    for part in (ids[:, :12], ids[:, 12:19], ids[:, 19:]):
        got, ours = session.forward(part, ours)
        want, theirs = expected.forward(part, theirs)
        assert np.abs(got - want).max() < TOLERANCE


@pytest.mark.parametrize("profiles", ["joint", "split", "single"])
def test_an_engine_agrees_with_onnxruntime(runtime, profiles, tmp_path):
    settings = BuildSection(**SMALL, profiles=profiles)
    engine = runtime.build(dense_graph(), tmp_path / "dense", "dense", settings, Execution())
    session, expected = runtime.load(engine, Execution()), reference(dense_graph(), tmp_path)
    agree(session, expected)
    ids = np.random.default_rng(1).integers(3, 128, (2, 8))
    assert (generate(session, ids, 8) == generate(expected, ids, 8)).mean() > 0.9
    session.close()


def test_a_repeated_decode_replays_a_graph_with_the_same_result(runtime, tmp_path):
    engine = runtime.build(dense_graph(), tmp_path / "dense", "dense", BuildSection(**SMALL), Execution())
    session = runtime.load(engine, Execution())
    cache = session.new_cache(1, 16)
    first, _ = session.forward(np.array([[5]]), cache)
    for _ in range(3):
        again, _ = session.forward(np.array([[5]]), cache)
        assert np.array_equal(first, again)
    assert session.timed_forward(np.array([[5]]), cache)[0] > 0


def test_swapping_the_operator_equals_building_it(runtime, tmp_path):
    settings = BuildSection(**SMALL, refittable=True)
    engine = runtime.build(variant_graph("ghost"), tmp_path / "ghost", "ghost", settings, Execution())
    swapped = runtime.swap(engine, operators("linearpatch-diag"), tmp_path / "patched", Execution())
    agree(runtime.load(swapped, Execution()), reference(variant_graph("linearpatch-diag"), tmp_path))
    agree(runtime.load(engine, Execution()), reference(variant_graph("ghost"), tmp_path))
