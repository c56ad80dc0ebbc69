"""Both ways round the square give one function: surgery(export(model)) = export(insert(drop(model)))."""

import numpy as np
import pytest

from ghostexport.exporters import export_model
from ghostexport.models import drop_blocks, insert_operators
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.runtimes.ort.onnxruntime import open_graph
from ghostexport.surgery import operate
from ghostexport.verification import compare, verify

PLANS = {"first": [(0, 2)], "middle": [(2, 4)], "last": [(4, 6)], "two-spans": [(1, 2), (3, 5)]}


def ghost(plan, seed=0):
    """A random operator with bias at every boundary, strong enough that leaving it out would show."""
    rng = np.random.default_rng(seed)
    operators = (
        Operator(
            boundary,
            "ghost",
            delta=(0.3 * rng.standard_normal((64, 64)) / 8).astype(np.float32),
            bias=(0.1 * rng.standard_normal(64)).astype(np.float32),
        )
        for boundary in plan.boundaries
    )
    return OperatorSet("ghost", tuple(operators), plan)


@pytest.mark.slow
@pytest.mark.parametrize("spans", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_surgery_on_the_graph_equals_surgery_on_the_model(exported, tmp_path, name, spans):
    case = exported(name)
    plan = PrunePlan.from_spans(6, spans)
    pruned, operators = drop_blocks(case.model, plan), ghost(plan)
    operate(case.path, plan, None, tmp_path / "pruned.onnx")
    operate(case.path, plan, operators, tmp_path / "ghost.onnx")
    patched = insert_operators(pruned, operators)
    assert verify(pruned, tmp_path / "pruned.onnx", "pruned").worst_relative < 1e-4
    assert verify(patched, tmp_path / "ghost.onnx", "ghost").worst_relative < 1e-4
    assert not compare(pruned, tmp_path / "ghost.onnx").passed  # the operators do something


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan_name"), [("llama", "two-spans"), ("gemma3", "last")])
def test_surgery_then_export_equals_export_then_surgery(exported, tmp_path, name, plan_name):
    case = exported(name)
    plan = PrunePlan.from_spans(6, PLANS[plan_name])
    operators = ghost(plan)
    operate(case.path, plan, operators, tmp_path / "cut.onnx")
    patched = insert_operators(drop_blocks(case.model, plan), operators)
    export_model(patched, tmp_path / "direct.onnx", exporter="transformers")
    one, other = open_graph(tmp_path / "cut.onnx"), open_graph(tmp_path / "direct.onnx")
    assert one.kv == other.kv
    rng = np.random.default_rng(1)
    caches = [one.new_cache(2), other.new_cache(2)]
    total = 0
    for tokens in (5, 11, 1, 1):  # prefill from nothing, a chunk after a past, two decode steps
        ids = rng.integers(0, 128, (2, tokens))
        total += tokens
        results = [run.outputs(ids, cache) for run, cache in zip((one, other), caches, strict=True)]
        outputs, caches = zip(*results, strict=True)
        for key in outputs[0]:
            np.testing.assert_allclose(outputs[0][key], outputs[1][key], atol=5e-5, err_msg=f"{key} at {total}")
