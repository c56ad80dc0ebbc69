"""Fitted operators that fold weights: the graph after surgery computes what the patched model computes, node for node.

Every kind is fitted, not made up, so the test also sees that what ``recover`` returns is what surgery understands.
"""

import numpy as np
import onnx
import pytest

from ghostexport import models, recovery
from ghostexport.calibration import CalibrationSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection
from ghostexport.surgery import operate
from ghostexport.verification import compare, verify

KINDS = ("ghost-weighted", "ghost-affine", "ghost-split", "ghost-zero", "ghost-split+refit", "ghost-zero+refit")
PLAN = PrunePlan.from_spans(6, [(1, 2), (3, 5)])


def windows(count, seed):
    return CalibrationSet.from_tokens(np.random.default_rng(seed).integers(3, 128, (count, 40)))


@pytest.fixture
def fitted(exported, tmp_path):
    """``case, sets = fitted(name, dtype, kinds)``: the exported model and its operator sets."""

    def fit(name, kinds, dtype="float32", **section):
        case = exported(name, dtype)
        loaded = models.from_memory(case.model)
        section = RecoverSection(operators=kinds, **section)
        return case, loaded, recovery.recover(loaded, PLAN, windows(24, 0), windows(4, 1), section)

    return fit


def count_nodes(path):
    return len(onnx.load(path, load_external_data=False).graph.node)


@pytest.mark.slow
def test_graph_and_model_agree_and_cost_the_same(fitted, tmp_path):
    case, loaded, sets = fitted("llama", ("ghost", *KINDS))
    operate(case.path, PLAN, None, tmp_path / "pruned.onnx")
    nodes = {"pruned": count_nodes(tmp_path / "pruned.onnx")}
    for kind, operators in sets.items():
        graph = tmp_path / f"{kind}.onnx"
        operate(case.path, PLAN, operators, graph)
        patched = models.patch(loaded, PLAN, operators).model
        assert verify(patched, graph, kind).worst_relative < 1e-4
        nodes[kind] = count_nodes(graph)
    assert not compare(models.patch(loaded, PLAN).model, tmp_path / "ghost-zero+refit.onnx").passed
    assert nodes["ghost"] == nodes["pruned"] + 2 * 2  # MatMul and Add at each boundary
    assert nodes["ghost-weighted"] == nodes["ghost-split"] == nodes["ghost-split+refit"] == nodes["ghost"]
    assert nodes["ghost-zero"] == nodes["ghost-zero+refit"] == nodes["pruned"]
    assert nodes["ghost-affine"] == nodes["ghost"] + 2  # one more Add at each boundary


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("gpt2", "float32"), ("llama", "float16"), ("llama", "bfloat16")])
def test_folded_weights_with_biases_and_in_half_precision(fitted, tmp_path, name, dtype):
    kind = "ghost-split+refit"
    case, loaded, sets = fitted(name, (kind,), dtype)
    operate(case.path, PLAN, sets[kind], tmp_path / "cut.onnx", self_contained=True)
    assert verify(models.patch(loaded, PLAN, sets[kind]).model, tmp_path / "cut.onnx", kind).passed


@pytest.mark.slow
def test_low_rank_and_cross_validated(fitted, tmp_path):
    kinds = ("ghost-weighted", "ghost-split")
    case, loaded, sets = fitted("llama", kinds, rank=8, ridge="cv")
    for kind, operators in sets.items():
        assert all(o.factors[0].shape == (64, 8) for o in operators.operators)
        operate(case.path, PLAN, operators, tmp_path / f"{kind}.onnx")
        assert verify(models.patch(loaded, PLAN, operators).model, tmp_path / f"{kind}.onnx", kind).passed
