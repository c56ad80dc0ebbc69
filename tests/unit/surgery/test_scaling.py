"""A scale folded behind the cut, and a network in its place, on toy decoders of every dialect against NumPy."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest

from ghostexport.errors import SurgeryError
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.surgery import operate
from tests.surgery_cases import SPANS
from tests.unit.surgery.test_operation import DIALECTS, TOLERANCE, run
from tests.unit.surgery.toy import C, compute, save

#: Folding changes only what the norms' epsilon sees.
FOLD_TOLERANCE = 2e-3


def operators_of(plan: PrunePlan, kind: str) -> OperatorSet:
    generator = np.random.default_rng(3)
    made = []
    for boundary in plan.boundaries:
        if kind == "scale":
            made.append(Operator(boundary, kind, scale=float(generator.uniform(0.7, 1.6))))
        else:
            shapes = ((C, 2 * C), (2 * C,), (2 * C, C), (C,))
            arrays = tuple(generator.normal(size=s).astype(np.float32) / C**0.5 for s in shapes)
            made.append(Operator(boundary, kind, network=arrays))
    return OperatorSet(kind, tuple(made), plan)


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_folded_scale_computes_the_inserted_one_without_a_node(dialect: str, spans: str, tmp_path: Path) -> None:
    toy, plan = DIALECTS[dialect], PrunePlan.from_spans(6, SPANS[spans])
    source, operators = save(toy, tmp_path / "dense.onnx"), operators_of(plan, "scale")
    behind = any(boundary.span.stop < 6 for boundary in plan.boundaries)
    if toy.qdq and behind:
        with pytest.raises(SurgeryError, match="not linear in a weight, or quantised"):
            operate(source, plan, operators, tmp_path / "out.onnx")
        return
    operate(source, plan, None, tmp_path / "pruned.onnx")
    operate(source, plan, operators, tmp_path / "out.onnx")
    got, x, past = run(tmp_path / "out.onnx", toy, plan)
    got = got * math.prod(
        operator.scale or 1.0 for operator in operators.operators
    )  # toys have no norm before the head
    expected = compute(toy, plan, operators, x, past)
    assert np.abs(got - expected).max() < FOLD_TOLERANCE * np.abs(expected).max()
    nodes = [[n.op_type for n in onnx.load(tmp_path / f"{name}.onnx").graph.node] for name in ("pruned", "out")]
    assert nodes[0] == nodes[1]


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_network_takes_the_place_of_the_stream(dialect: str, spans: str, tmp_path: Path) -> None:
    toy, plan = DIALECTS[dialect], PrunePlan.from_spans(6, SPANS[spans])
    operators = operators_of(plan, "network")
    operate(save(toy, tmp_path / "dense.onnx"), plan, operators, tmp_path / "out.onnx")
    got, x, past = run(tmp_path / "out.onnx", toy, plan)
    expected = compute(toy, plan, operators, x, past)
    assert np.abs(got - expected).max() < 5 * TOLERANCE * np.abs(expected).max()
