"""A library that says no: every answer that it may give to a build or a refit is heard, and nothing is left behind."""

import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from ghostexport.errors import BuildError
from ghostexport.execution import Execution
from tests.runtime_graphs import operators, variant_graph
from tests.unit.runtimes.test_nvinfer import build, flavour

RELEASE = "tensorrt-10.13.3.9"


@pytest.fixture
def vendor(monkeypatch, tmp_path):
    runtime, trt = flavour(RELEASE, monkeypatch)
    return runtime, trt, monkeypatch


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [
        ("set_named_weights", False, "refuses new weights for ghost.0.delta"),
        ("get_missing_weights", ["ghost.1.delta"], r"wants more weights than the operators: \['ghost.1.delta'\]"),
        ("refit_cuda_engine", False, "cannot refit"),
    ],
)
def test_a_refit_that_is_refused(vendor, tmp_path, method, answer, message):
    runtime, trt, monkeypatch = vendor
    engine = build(runtime, variant_graph("ghost"), tmp_path, refittable=True)
    monkeypatch.setattr(trt.Refitter, method, lambda self, *arguments: answer)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BuildError, match=message):
        runtime.swap(engine, operators("linearpatch-diag"), tmp_path / "patched", Execution())
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("dtype", "numpy"), [("float32", np.float32), ("float16", np.float16), ("bfloat16", None)])
def test_new_weights_have_the_engines_dtype_and_live_until_the_refit(vendor, tmp_path, dtype, numpy):
    runtime, trt, monkeypatch = vendor
    numpy = np.dtype(numpy or ml_dtypes.bfloat16)
    engine = build(runtime, variant_graph("ghost"), tmp_path, refittable=True)
    given, read = {}, {}

    def take(self, name, weights):
        given[name] = weights
        np.full(weights._count, -1, numpy)  # takes the place of an array that was given up
        return True

    def refit(self):
        for name, weights in given.items():
            raw = ctypes.string_at(weights._pointer, weights._count * numpy.itemsize)
            read[name] = np.frombuffer(raw, numpy)
        return True

    monkeypatch.setattr(
        trt.Refitter, "get_weights_prototype", lambda self, name: SimpleNamespace(dtype=getattr(trt, dtype))
    )
    monkeypatch.setattr(trt.Refitter, "set_named_weights", take)
    monkeypatch.setattr(trt.Refitter, "refit_cuda_engine", refit)
    new = operators("linearpatch-diag")
    runtime.swap(engine, new, tmp_path / "patched", Execution())
    expected = np.diag(new.operators[0].diagonal) if new.operators[0].diagonal is not None else new.operators[0].matrix
    np.testing.assert_array_equal(
        read["ghost.0.delta"].astype(np.float32), expected.astype(numpy).astype(np.float32).ravel()
    )


@pytest.mark.parametrize(
    ("name", "method", "answer", "message"),
    [
        ("OnnxParser", "parse_from_file", False, "the parser refuses the graph"),
        ("IBuilderConfig", "add_optimization_profile", -1, "profile prefill is refused"),
        ("Builder", "build_serialized_network", None, "the builder returned no plan"),
    ],
)
def test_a_build_that_is_refused(vendor, tmp_path, name, method, answer, message):
    runtime, trt, monkeypatch = vendor
    monkeypatch.setattr(getattr(trt, name), method, lambda self, *arguments: answer)
    if method == "build_serialized_network" and hasattr(trt.Builder, "build_serialized_network_to_stream"):
        monkeypatch.setattr(trt.Builder, "build_serialized_network_to_stream", lambda self, *arguments: False)
    with pytest.raises(BuildError, match=message):
        build(runtime, variant_graph("ghost"), tmp_path)
    assert not list(tmp_path.iterdir())
