"""Surgery on graphs of every producer: ONNX Runtime on the cut graph equals PyTorch on the cut model.

Prefill of 7 tokens, a decode step, then 12 tokens at once with past 8 (beyond the sliding windows of 8), batch 2.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ghostexport.models import drop_blocks, insert_operators
from ghostexport.plan import PrunePlan
from ghostexport.surgery import inspect_graph, operate, read_operators
from tests.decoding import assert_same, chunks, onnx_logits, torch_logits
from tests.surgery_cases import FIXTURES, SPANS, dense_operators, fixture_model, plan_of, same_graph

FOLDER = Path(__file__).parent.parent / "fixtures"


def _tokens(name: str) -> list[Any]:
    """GroupQueryAttention takes one new token at a time once there is a past, for a batch above 1."""
    return chunks(96, (7, 1, 12) if FIXTURES[name].standard else (7, 1, 1))


#: TensorRT Edge-LLM's plugin has a test file of its own
FLOAT = [name for name in FIXTURES if not name.endswith("int4") and FIXTURES[name].producer != "edge-llm"]


@functools.cache
def _model(name: str) -> Any:
    return fixture_model(name)


@functools.cache
def _reference(fixture: str, spans: str | None, with_operator: bool) -> list[Any]:
    model, tokens = _model(fixture), _tokens(fixture)
    if spans is None:
        return torch_logits(model, tokens)
    pruned = drop_blocks(model, plan_of(spans))
    if with_operator:
        pruned = insert_operators(pruned, dense_operators(plan_of(spans), model.config.hidden_size))
    return torch_logits(pruned, tokens)


def _first_of(name: str) -> str:
    """One fixture per model stands for all: their PyTorch reference is the same."""
    kind = FIXTURES[name].model, FIXTURES[name].standard
    return next(other for other, fixture in FIXTURES.items() if (fixture.model, fixture.standard) == kind)


@pytest.mark.parametrize("name", FIXTURES)
def test_the_blocks_are_found(name: str) -> None:
    report = inspect_graph(FOLDER / name / "model.onnx")
    assert report.blocker is None
    assert (report.num_blocks, report.hidden_size) == (6, 32)
    assert report.dtype == ("float16" if FIXTURES[name].dtype == "float16" else "float")
    sums = 1 if FIXTURES[name].model in ("gpt-neox", "phi") else 2
    assert [block["sums"] for block in report.blocks] == [sums] * 6
    assert report.producer == FIXTURES[name].producer.split(" ")[0]


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("name", FLOAT)
def test_a_cut_graph_equals_the_cut_model(name: str, spans: str, tmp_path: Path) -> None:
    fixture, model, tokens = FIXTURES[name], _model(_first_of(name)), _tokens(name)
    plan = plan_of(spans)
    for with_operator in (False, True):
        operators = dense_operators(plan, model.config.hidden_size) if with_operator else None
        output = tmp_path / f"{with_operator}.onnx"
        report = operate(FOLDER / name / "model.onnx", plan, operators, output)
        assert report.blocks_after == len(plan.kept)
        reference = _reference(_first_of(name), spans, with_operator)
        assert_same(onnx_logits(output, tokens), reference, fixture.tolerance)


@pytest.mark.parametrize("name", FIXTURES)
def test_a_cut_graph_is_cut_further_and_repaired_anew_as_in_one_step(name: str, tmp_path: Path) -> None:
    """One of the two cuts first; then the other one, with operators for both; then without any."""
    source, whole = FOLDER / name / "model.onnx", plan_of("two")
    operators = dense_operators(whole, 32)
    operate(source, whole, operators, tmp_path / "whole.onnx")
    operate(source, whole, None, tmp_path / "pruned.onnx")
    for first, later in ((0, (2, 4)), (1, (1, 2))):
        once = PrunePlan.from_spans(6, [whole.removed[first]])
        operate(source, once, dense_operators(once, 32, seed=5), tmp_path / "one.onnx")
        further = operate(
            tmp_path / "one.onnx", PrunePlan.from_spans(len(once.kept), [later]), None, tmp_path / "x.onnx"
        )
        assert further.blocks_after == 3
        operate(tmp_path / "x.onnx", whole, operators, tmp_path / "again.onnx")
        assert same_graph(tmp_path / "again.onnx", tmp_path / "whole.onnx")
        report = inspect_graph(tmp_path / "again.onnx")
        assert report.blocker is None and [block["dense_block"] for block in report.blocks] == [0, 2, 5]
    assert read_operators(tmp_path / "again.onnx").sha256 == operators.sha256 or FIXTURES[name].dtype == "float16"
    operate(tmp_path / "again.onnx", None, None, tmp_path / "dropped.onnx", drop=True)
    assert same_graph(tmp_path / "dropped.onnx", tmp_path / "pruned.onnx")
    if FIXTURES[name].producer != "edge-llm":
        tokens = _tokens(name)
        for a, b in (("again", "whole"), ("dropped", "pruned")):
            got, expected = (onnx_logits(tmp_path / f"{file}.onnx", tokens) for file in (a, b))
            assert all(np.array_equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("spans", SPANS)
def test_int4_equals_the_dense_int4_graph_with_silenced_blocks(spans: str, tmp_path: Path) -> None:
    """A block whose two output projections have zero scales adds nothing: the same as no block."""
    source = FOLDER / "genai-llama-int4" / "model.onnx"
    plan = plan_of(spans)
    operate(source, plan, None, tmp_path / "cut.onnx")
    model = ir.load(source)
    silenced = 0
    for name, value in model.graph.initializers.items():
        block = next((b for b in range(6) if f".layers.{b}." in name), None)
        projection = "o_proj" in name or "down_proj" in name
        if block is not None and block not in plan.kept and projection and "scale" in name:
            assert value.const_value is not None
            value.const_value = ir.Tensor(np.zeros_like(value.const_value.numpy()), name=name)
            silenced += 1
    assert silenced == 2 * plan.num_removed
    ir.save(model, tmp_path / "silenced.onnx")
    tokens = _tokens("genai-llama-int4")
    assert_same(onnx_logits(tmp_path / "cut.onnx", tokens), onnx_logits(tmp_path / "silenced.onnx", tokens), 1e-5)


def test_int4_takes_a_float_operator(tmp_path: Path) -> None:
    """Quantised blocks stay as they are; the operator at the embedding multiplies it before block 2."""
    source, plan = FOLDER / "genai-llama-int4" / "model.onnx", plan_of("first")
    operators = dense_operators(plan, 32, bias=False)
    operate(source, plan, operators, tmp_path / "ghost.onnx")
    before, after = ir.load(source), ir.load(tmp_path / "ghost.onnx")
    kept = {name: value for name, value in after.graph.initializers.items() if not name.startswith("ghost.")}
    for name, value in kept.items():
        original = before.graph.initializers[name].const_value
        assert original is not None and value.const_value is not None
        assert value.const_value.tobytes() == original.tobytes()
    delta = after.graph.initializers["ghost.0.delta"].const_value
    assert delta is not None and np.array_equal(delta.numpy(), operators.operators[0].delta)


@pytest.mark.parametrize("spans", ["middle", "last"])
def test_a_fused_sum_adds_the_bias_itself(spans: str, tmp_path: Path) -> None:
    source, plan = FOLDER / "genai-llama-fp32" / "model.onnx", plan_of(spans)
    added = []
    for bias in (False, True):
        report = operate(source, plan, dense_operators(plan, 32, bias=bias), tmp_path / f"{bias}.onnx")
        added.append([name for boundary in report.boundaries for name in boundary.nodes_added])
    assert added[0] == added[1]
