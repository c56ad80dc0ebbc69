"""Surgery on graphs that surgery changed before equals one surgery on the dense graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ghostexport.errors import RecipeError, SurgeryError
from ghostexport.operators import Operator, OperatorSet, WeightFold, load_operators
from ghostexport.plan import PrunePlan
from ghostexport.surgery import inspect_graph, operate, read_operators
from tests.surgery_cases import SPANS, dense_operators, same_graph
from tests.unit.surgery.test_operation import DIALECTS, TOLERANCE, run
from tests.unit.surgery.toy import C, Toy, build_merged, compute, save, weights

FULL = PrunePlan.from_spans(6, [(1, 2), (3, 5)])
FORMS: dict[str, Any] = {
    "factors": {"factors": (np.ones((C, 2), np.float32) / 9, np.ones((2, C), np.float32) / 7)},
    "diagonal": {"diagonal": np.linspace(-0.5, 0.5, C, dtype=np.float32)},
    "bias": {"bias": np.linspace(-1, 1, C, dtype=np.float32)},
    "network": {
        "network": tuple(np.random.default_rng(0).normal(size=s).astype(np.float32) for s in ((C, 5), 5, (5, C), C))
    },
    "mid": {"delta": np.eye(C, dtype=np.float32)[::-1] / 3, "site": "mid"},
}


def part(operators: OperatorSet, *indices: int) -> OperatorSet:
    """Some of the operators, for a plan of their spans alone."""
    plan = PrunePlan.from_spans(operators.plan.num_blocks, [operators.plan.removed[i] for i in indices])
    own = tuple(replace(operators.operators[i], boundary=b) for i, b in zip(indices, plan.boundaries, strict=True))
    return OperatorSet(operators.name, own, plan)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_cut_further_replaced_and_taken_out_is_one_surgery(dialect: str, tmp_path: Path) -> None:
    """Both cuts at once, one after the other in either order, or with other operators in between."""
    toy = DIALECTS[dialect]
    source, operators = save(toy, tmp_path / "dense.onnx"), dense_operators(FULL, C)
    operate(source, FULL, operators, tmp_path / "whole.onnx")
    expected, x, past = run(tmp_path / "whole.onnx", toy, FULL)
    for first, later in ((0, (2, 4)), (1, (1, 2))):
        one = part(operators, first)
        operate(source, one.plan, one, tmp_path / "one.onnx")
        further = PrunePlan.from_spans(len(one.plan.kept), [later])
        report = operate(tmp_path / "one.onnx", further, None, tmp_path / "bare.onnx")
        assert (report.blocks_before, report.blocks_after) == (len(one.plan.kept), 3)
        onnx.checker.check_model(tmp_path / "bare.onnx")
        half = tuple(o if b == first else Operator(o.boundary, "none") for b, o in enumerate(operators.operators))
        operate(source, FULL, OperatorSet("ghost", half, FULL), tmp_path / "half.onnx")
        assert np.array_equal(run(tmp_path / "bare.onnx", toy, FULL)[0], run(tmp_path / "half.onnx", toy, FULL)[0])
        other = part(operators, 1 - first).operators[0]
        own = OperatorSet("ghost", (replace(other, boundary=further.boundaries[0]),), further)
        operate(tmp_path / "one.onnx", further, own, tmp_path / "both.onnx")
        operate(tmp_path / "bare.onnx", FULL, operators, tmp_path / "again.onnx")
        for name in ("both.onnx", "again.onnx"):
            assert np.array_equal(run(tmp_path / name, toy, FULL)[0], expected), name
            assert same_graph(tmp_path / name, tmp_path / "whole.onnx")
    operate(source, FULL, None, tmp_path / "pruned.onnx")
    operate(tmp_path / "whole.onnx", None, None, tmp_path / "dropped.onnx", drop=True)
    assert same_graph(tmp_path / "dropped.onnx", tmp_path / "pruned.onnx")
    assert np.abs(expected - compute(toy, FULL, operators, x, past)).max() < TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("dialect", ["plain", "embeds", "skip-norm"])
@pytest.mark.parametrize("spans", ["first", "last", "two"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_out_and_replaced(form: str, spans: str, dialect: str, tmp_path: Path) -> None:
    toy, plan = DIALECTS[dialect], PrunePlan.from_spans(6, SPANS[spans])
    if form == "mid" and (plan.removed[0].start == 0 or dialect == "skip-norm"):
        pytest.skip("no block before the cut, or no sum of its own between attention and MLP")
    source = save(toy, tmp_path / "dense.onnx")
    fit = {"largest_x": 1.5, "nmse_held_out": 0.25}
    own = OperatorSet("mine", tuple(Operator(b, form, **FORMS[form], fit=fit) for b in plan.boundaries), plan, "ab")
    operate(source, plan, own, tmp_path / "own.onnx")
    assert read_operators(tmp_path / "own.onnx").to_bytes() == own.to_bytes()
    ghost = dense_operators(plan, C)
    operate(source, plan, ghost, tmp_path / "ghost.onnx")
    for start, operators in (("own", ghost), ("ghost", own)):
        operate(tmp_path / f"{start}.onnx", plan, operators, tmp_path / "new.onnx")
        onnx.checker.check_model(tmp_path / "new.onnx")
        wanted = "ghost" if start == "own" else "own"
        got, x, past = run(tmp_path / "new.onnx", toy, plan)
        expected = run(tmp_path / f"{wanted}.onnx", toy, plan)[0]
        assert np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max()
        assert read_operators(tmp_path / "new.onnx").to_bytes() == operators.to_bytes()
    operate(tmp_path / "own.onnx", None, None, tmp_path / "dropped.onnx", drop=True)
    got = run(tmp_path / "dropped.onnx", toy, plan)[0]
    expected = compute(toy, plan, None, x, past)
    assert np.abs(got - expected).max() < TOLERANCE * np.abs(expected).max()


def test_operators_of_cuts_that_meet_follow_each_other(tmp_path: Path) -> None:
    """Blocks 1 and 3 to 4 are gone; when block 2 goes too, both operators stand at the one cut [1, 5)."""
    toy, operators = Toy(blocks=6), dense_operators(FULL, C)
    source = save(toy, tmp_path / "dense.onnx")
    operate(source, FULL, operators, tmp_path / "two.onnx")
    report = operate(tmp_path / "two.onnx", PrunePlan.from_spans(3, [(1, 2)]), None, tmp_path / "one.onnx")
    assert [b.span for b in report.boundaries] == [(1, 5)]
    plan = PrunePlan.from_spans(6, [(1, 5)])
    got, x, past = run(tmp_path / "one.onnx", toy, plan)
    first, second = operators.operators
    W = np.eye(C) + first.delta.astype(np.float64)  # type: ignore[union-attr]
    V = np.eye(C) + second.delta.astype(np.float64)  # type: ignore[union-attr]
    joined = Operator(plan.boundaries[0], "x", delta=W @ V - np.eye(C), bias=first.bias @ V + second.bias)
    expected = compute(toy, plan, OperatorSet("x", (joined,), plan), x, past)
    assert np.abs(got - expected).max() < TOLERANCE * np.abs(expected).max()
    meets = PrunePlan.from_spans(3, [(0, 1)])
    with pytest.raises(SurgeryError, match=r"cut \[0, 2\) meets an earlier one, which has an operator"):
        operate(tmp_path / "two.onnx", meets, dense_operators(meets, C), tmp_path / "out.onnx")


def test_an_operator_of_another_dtype_keeps_it(tmp_path: Path) -> None:
    source, operators = save(Toy(blocks=6), tmp_path / "dense.onnx"), dense_operators(FULL, C)
    one = part(operators, 1)
    operate(source, one.plan, one, tmp_path / "half.onnx", operator_dtype="float16")
    operate(tmp_path / "half.onnx", PrunePlan.from_spans(4, [(1, 2)]), None, tmp_path / "out.onnx")
    before, after = (ir.load(tmp_path / name).graph.initializers for name in ("half.onnx", "out.onnx"))
    assert after["ghost.1.delta"].dtype == ir.DataType.FLOAT16
    old, new = before["ghost.0.delta"].const_value, after["ghost.1.delta"].const_value
    assert old is not None and new is not None and old.tobytes() == new.tobytes()
    read = read_operators(tmp_path / "half.onnx").operators[0].delta
    assert read is not None and np.array_equal(read, one.operators[0].delta.astype(np.float16))  # type: ignore[union-attr]


def test_merged_decoders_are_cut_further_in_both_branches(tmp_path: Path) -> None:
    operators = dense_operators(FULL, C)
    ir.save(build_merged(Toy(blocks=6)), tmp_path / "dense.onnx", external_data="dense.onnx.data")
    operate(tmp_path / "dense.onnx", FULL, operators, tmp_path / "whole.onnx")
    one = part(operators, 1)
    operate(tmp_path / "dense.onnx", one.plan, one, tmp_path / "one.onnx")
    operate(tmp_path / "one.onnx", FULL, operators, tmp_path / "both.onnx")
    assert same_graph(tmp_path / "both.onnx", tmp_path / "whole.onnx")


def test_inspect_shows_what_is_left_and_what_was_put_in(tmp_path: Path) -> None:
    source, operators = save(Toy(blocks=6), tmp_path / "dense.onnx"), dense_operators(FULL, C)
    assert inspect_graph(source).cuts == () and inspect_graph(source).dense_blocks == 6
    operate(source, FULL, operators, tmp_path / "ghost.onnx")
    report = inspect_graph(tmp_path / "ghost.onnx")
    assert report.blocker is None and report.dense_blocks == 6
    assert [block["dense_block"] for block in report.blocks] == [0, 2, 5]
    assert [block["sums"] for block in report.blocks] == [2, 2, 2]
    assert [(cut["removed"], cut["position"], cut["operator"], cut["dtype"]) for cut in report.cuts] == [
        ([1, 2], 1, "ghost", "float"),
        ([3, 5], 2, "ghost", "float"),
    ]
    assert {"ghost.1.matmul", "ghost.1.add", "ghost.1.delta", "ghost.1.bias"} <= set(report.cuts[1]["names"])
    bare = operate(source, FULL, None, tmp_path / "pruned.onnx")
    cuts = inspect_graph(tmp_path / "pruned.onnx").cuts
    assert [cut["operator"] for cut in cuts] == ["none", "none"] and not any(cut["names"] for cut in cuts)
    assert bare.blocks_after == 3


def test_what_is_in_weights_is_neither_read_nor_taken_out(tmp_path: Path) -> None:
    toy, plan = Toy(blocks=6), PrunePlan.from_spans(6, [(3, 5)])
    source, generator = save(toy, tmp_path / "dense.onnx"), np.random.default_rng(0)
    folds = [WeightFold(2, "mlp_output", generator.normal(size=(12, C)).astype(np.float32)) for _ in range(2)]
    ghost = dense_operators(plan, C).operators[0]
    split = [OperatorSet("split", (replace(ghost, folds=(fold,)),), plan) for fold in folds]
    operate(source, plan, split[0], tmp_path / "split.onnx")
    assert inspect_graph(tmp_path / "split.onnx").cuts[0]["folded"] == ["2.mlp_output"]
    with pytest.raises(SurgeryError, match=r"partly in its weights \(2\.mlp_output\): these cannot be read out"):
        read_operators(tmp_path / "split.onnx")
    for request in ({"drop": True, "operators": None}, {"operators": dense_operators(plan, C)}):
        with pytest.raises(SurgeryError, match="partly in its weights"):
            operate(tmp_path / "split.onnx", plan, output=tmp_path / "out.onnx", **request)  # type: ignore[arg-type]
    operate(tmp_path / "split.onnx", plan, split[1], tmp_path / "again.onnx")  # it brings all that was folded
    operate(source, plan, split[1], tmp_path / "once.onnx")
    assert same_graph(tmp_path / "again.onnx", tmp_path / "once.onnx")
    further = operate(tmp_path / "split.onnx", PrunePlan.from_spans(4, [(0, 1)]), None, tmp_path / "further.onnx")
    assert further.blocks_after == 3
    whole = PrunePlan.from_spans(6, [(0, 1), (3, 5)])
    got, x, past = run(tmp_path / "further.onnx", toy, whole)
    both = OperatorSet(
        "x", (Operator(whole.boundaries[0], "none"), replace(ghost, boundary=whole.boundaries[1])), whole
    )
    expected = compute(toy, whole, both, x, past, {"down2": folds[0].weight})
    assert np.abs(got - expected).max() < TOLERANCE * np.abs(expected).max()


def test_a_fold_counts_dense_blocks_and_a_scale_what_is_left(tmp_path: Path) -> None:
    """The second cut is fitted on the cut graph: its block 1 is the dense block 2."""
    toy = Toy(blocks=6)
    source, first = save(toy, tmp_path / "dense.onnx"), PrunePlan.from_spans(6, [(1, 2)])
    operate(source, first, None, tmp_path / "one.onnx")
    further = PrunePlan.from_spans(5, [(2, 4)])
    new = np.random.default_rng(0).normal(size=(C, C)).astype(np.float32)
    operator = Operator(further.boundaries[0], "x", folds=(WeightFold(1, "attention_output", new),))
    operate(tmp_path / "one.onnx", further, OperatorSet("x", (operator,), further), tmp_path / "both.onnx")
    got, x, past = run(tmp_path / "both.onnx", toy, FULL)
    expected = compute(toy, FULL, None, x, past, {"o2": new})
    assert np.abs(got - expected).max() < TOLERANCE * np.abs(expected).max()
    assert inspect_graph(tmp_path / "both.onnx").cuts[1]["folded"] == ["2.attention_output"]
    scaled = OperatorSet("s", (Operator(further.boundaries[0], "s", scale=0.5),), further)
    operate(tmp_path / "one.onnx", further, scaled, tmp_path / "scaled.onnx")
    got = run(tmp_path / "scaled.onnx", toy, FULL)[0]
    changed = {name: weights(toy)[name] / 0.5 for name in ("o5", "down5")}
    expected = compute(toy, FULL, None, x, past, changed)
    assert np.abs(got - expected).max() < TOLERANCE * np.abs(expected).max()


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    source, out = save(Toy(blocks=6), tmp_path / "dense.onnx"), tmp_path / "out.onnx"
    operate(source, FULL, dense_operators(FULL, C), tmp_path / "ghost.onnx")
    with pytest.raises(RecipeError, match=r"keeps blocks \[1\] of 6, which were removed before"):
        operate(tmp_path / "ghost.onnx", PrunePlan.from_spans(6, [(3, 5)]), None, out)
    with pytest.raises(SurgeryError, match="plan is for 7 blocks; the graph has 3 of 6"):
        operate(tmp_path / "ghost.onnx", PrunePlan.from_spans(7, [(3, 5)]), None, out)
    with pytest.raises(SurgeryError, match="no operator to take out"):
        operate(source, None, None, out, drop=True)
    with pytest.raises(SurgeryError, match="has no operator"):
        read_operators(source)
    model = ir.load(tmp_path / "ghost.onnx")
    model.metadata_props["ghostexport.operators"] = "{}"
    ir.save(model, tmp_path / "damaged.onnx")
    with pytest.raises(SurgeryError, match="record of its cuts is damaged"):
        operate(tmp_path / "damaged.onnx", FULL, None, out)
    assert "damaged" in (inspect_graph(tmp_path / "damaged.onnx").blocker or "")
    del model.metadata_props["ghostexport.operators"]
    ir.save(model, tmp_path / "bare.onnx")
    report = inspect_graph(tmp_path / "bare.onnx")
    assert report.blocker is None and report.num_blocks == 3 and report.blocks[0]["dense_block"] is None
    assert [cut["operator"] for cut in report.cuts] == ["unknown", "unknown"]
    assert not out.exists()


def test_an_operator_file_comes_back_byte_for_byte(tmp_path: Path) -> None:
    source, operators = save(Toy(blocks=6), tmp_path / "dense.onnx"), dense_operators(FULL, C)
    (tmp_path / "ghost.safetensors").write_bytes(operators.to_bytes())
    operate(source, FULL, load_operators(tmp_path / "ghost.safetensors"), tmp_path / "ghost.onnx")
    read = read_operators(tmp_path / "ghost.onnx")
    assert read.to_bytes() == (tmp_path / "ghost.safetensors").read_bytes()
