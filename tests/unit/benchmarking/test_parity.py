"""An engine against its own graph, on ONNX Runtime; a wrong engine must be found."""

import numpy as np
import pytest

from ghostexport.benchmarking.engine_checks import engine_agrees
from ghostexport.execution import Execution
from ghostexport.recipe import BuildSection
from ghostexport.runtimes import RUNTIMES
from tests.runtime_graphs import dense_graph


class Wrong:
    """A session whose logits are off by a factor."""

    def __init__(self, session, factor=1.01):
        self.session, self.factor = session, factor

    def __getattr__(self, name):
        return getattr(self.session, name)

    def forward(self, ids, cache):
        logits, cache = self.session.forward(ids, cache)
        return logits * self.factor, cache


@pytest.fixture(scope="module")
def engine(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("engine")
    graph = dense_graph()
    return graph, RUNTIMES["onnxruntime"].build(graph, folder / "dense", "dense", BuildSection(), Execution())


def test_an_engine_agrees_with_its_graph_and_a_wrong_one_does_not(engine):
    graph, built = engine

    def load():
        return RUNTIMES["onnxruntime"].load(built, Execution())

    agrees, sentence = engine_agrees(load, graph, "onnxruntime", "float32", 0)
    assert agrees, sentence
    agrees, sentence = engine_agrees(lambda: Wrong(load()), graph, "onnxruntime", "float32", 0)
    assert not agrees and "differ" in sentence
    agrees, sentence = engine_agrees(lambda: Wrong(load(), np.nan), graph, "onnxruntime", "float32", 0)
    assert not agrees and sentence == "the engine's logits are not finite"


def test_a_bfloat16_engine_is_not_compared_and_says_so(engine):
    graph, _ = engine
    assert engine_agrees(pytest.fail, graph, "tensorrt", "bfloat16", 0) == (
        True,
        "not compared: ONNX Runtime has no bfloat16 kernels on the CPU",
    )
