"""Fitted operators that fold weights: the graph after surgery computes what the patched model computes, node for node.

Every kind is fitted, not made up, so the test also sees that what ``recover`` returns is what surgery understands.
The judge of a refit, which would leave nearly every weight of a random model as it is, is told to take them all.
"""

import importlib
from dataclasses import replace

import numpy as np
import onnx
import pytest

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.models import right_multiply
from ghostexport.operators import WeightFold
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.recover import recover
from ghostexport.surgery import operate
from ghostexport.verification import compare, verify

KINDS = ("ghost-weighted", "ghost-affine", "ghost-split", "ghost-zero", "ghost-split+refit", "ghost-zero+refit")
PLAN = PrunePlan.from_spans(6, [(1, 2), (3, 5)])


def windows(count, seed):
    return CalibrationSet.from_tokens(np.random.default_rng(seed).integers(3, 128, (count, 40)))


@pytest.fixture
def fitted(exported, monkeypatch):
    """``case, loaded, sets = fitted(name, kinds, dtype)``: the exported model and its operator sets."""
    refit = importlib.import_module("ghostexport.recovery.refit.walk")
    monkeypatch.setattr(refit, "surely_less", lambda after, before: True)

    def fit(name, kinds, dtype="float32", **section):
        case = exported(name, dtype)
        loaded = models.from_memory(case.model)
        section = RecoverSection(operators=kinds, **section)
        return case, loaded, recover(loaded, PLAN, windows(24, 0), windows(4, 1), section)

    return fit


def folds(operators):
    return [fold for operator in operators.operators for fold in operator.folds]


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
        assert ({fold.role for fold in folds(operators)} == {"attention_output", "mlp_output"}) == ("+refit" in kind)
        nodes[kind] = count_nodes(graph)
    assert not compare(models.patch(loaded, PLAN).model, tmp_path / "ghost-zero+refit.onnx").passed
    assert nodes["ghost"] == nodes["pruned"] + 2 * 2  # MatMul and Add at each boundary
    assert nodes["ghost-weighted"] == nodes["ghost-split"] == nodes["ghost-split+refit"] == nodes["ghost"]
    assert nodes["ghost-zero"] == nodes["ghost-zero+refit"] == nodes["pruned"]
    assert nodes["ghost-affine"] == nodes["ghost"] + 2  # one more Add at each boundary


def with_other_weights(operators, model, block):
    """The set with both projections of a block (and their biases) moved, as a refit moves them."""
    random, more = np.random.default_rng(0), []
    for role in ("attention_output", "mlp_output"):
        projection = getattr(models.find_projections(model, block), role)
        weight = right_multiply(projection).float().numpy()
        weight = weight + 0.3 * weight.std() * random.standard_normal(weight.shape).astype(np.float32)
        bias = None
        if projection.bias is not None:
            bias = projection.bias.float().numpy() + 0.3 * random.standard_normal(64).astype(np.float32)
        more.append(WeightFold(block, role, weight, bias))
    *others, last = operators.operators
    return replace(operators, operators=(*others, replace(last, folds=(*last.folds, *more))))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("gpt2", "float32"), ("llama", "float16"), ("llama", "bfloat16")])
def test_folded_weights_with_biases_and_in_half_precision(fitted, tmp_path, name, dtype):
    kind = "ghost-split"
    case, loaded, sets = fitted(name, (kind,), dtype)
    moved = with_other_weights(sets[kind], loaded.model, 5)
    operate(case.path, PLAN, moved, tmp_path / "cut.onnx", self_contained=True)
    assert verify(models.patch(loaded, PLAN, moved).model, tmp_path / "cut.onnx", kind).passed
    assert not compare(models.patch(loaded, PLAN, sets[kind]).model, tmp_path / "cut.onnx").passed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("gemma3", {"attention_gain", "attention_output", "mlp_gain", "mlp_output"}),
        ("olmo2", {"attention_gain", "attention_output", "mlp_gain", "mlp_output"}),
        ("granite", {"attention_output", "mlp_output"}),
        ("falcon-parallel", {"attention_output", "mlp_output"}),
        ("mixtral", {"attention_output"}),
    ],
)
def test_the_best_of_every_shape_of_block(fitted, tmp_path, name, roles):
    """Gains of norms, multipliers, parallel blocks, attention beside experts: in the graph as in the model."""
    case, loaded, sets = fitted(name, ("best",))
    ((kind, operators),) = sets.items()
    assert kind == ("ghost-split+refit" if name == "granite" else "ghost-weighted+refit")
    assert {fold.role for fold in folds(operators)} <= roles
    factor = np.random.default_rng(0).uniform(0.7, 1.4, 64).astype(np.float32)
    if "mlp_gain" in roles:  # also where the judges of a random model keep one
        *others, last = operators.operators
        kept = tuple(fold for fold in last.folds if (fold.block, fold.role) != (5, "mlp_gain"))
        last = replace(last, folds=(*kept, WeightFold(5, "mlp_gain", factor)))
        operators = replace(operators, operators=(*others, last))
    operate(case.path, PLAN, operators, tmp_path / "best.onnx")
    operate(case.path, PLAN, None, tmp_path / "pruned.onnx")
    assert verify(models.patch(loaded, PLAN, operators).model, tmp_path / "best.onnx", kind).worst_relative < 1e-4
    assert count_nodes(tmp_path / "best.onnx") == count_nodes(tmp_path / "pruned.onnx") + 2 * 2


@pytest.mark.slow
def test_low_rank_and_cross_validated(fitted, tmp_path):
    kinds = ("ghost-weighted", "ghost-split")
    case, loaded, sets = fitted("llama", kinds, rank=8, ridge="cv")
    for kind, operators in sets.items():
        assert all(o.factors[0].shape == (64, 8) for o in operators.operators)
        operate(case.path, PLAN, operators, tmp_path / f"{kind}.onnx")
        assert verify(models.patch(loaded, PLAN, operators).model, tmp_path / f"{kind}.onnx", kind).passed
