"""The commuting square for every published operator, fitted on real tiny models; folded kinds add no node."""

import numpy as np
import onnx
import pytest

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.recover import recover
from ghostexport.surgery import operate
from ghostexport.verification import verify

PLANS = {"first": [(0, 2)], "last": [(4, 6)], "two": [(1, 2), (3, 5)]}
FOLDED = ("none", "prune-and-comp", "replaceme-lstsq")
ALL = (*FOLDED, "ghost", "linearpatch-diag", "linearpatch-rotate", "streamline-ffn")
WINDOWS = [CalibrationSet.from_tokens(np.random.default_rng(seed).integers(3, 128, (12, 60))) for seed in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "place", "names"),
    [
        ("llama", "two", ALL),
        ("qwen3", "last", ALL),  # tied head
        ("gemma3", "first", ("none", "prune-and-comp", "ghost")),  # post-norms; replaceme is refused
        ("gemma3", "two", ("prune-and-comp",)),
        ("gpt2", "two", ("prune-and-comp", "replaceme-lstsq")),  # biases, tied head, learned positions
    ],
)
def test_fitted_operators_commute_with_the_export(exported, tmp_path, name, place, names):
    case = exported(name)
    loaded = models.from_memory(case.model)
    plan = PrunePlan.from_spans(6, PLANS[place])
    sets = recover(loaded, plan, *WINDOWS, RecoverSection(operators=names, epochs=1))
    operate(case.path, plan, None, tmp_path / "pruned.onnx")
    pruned = onnx.load(tmp_path / "pruned.onnx", load_external_data=False)
    for operator in names:
        graph = tmp_path / f"{operator}.onnx"
        operate(case.path, plan, sets[operator], graph)
        patched = models.patch(loaded, plan, sets[operator]).model
        assert verify(patched, graph, operator).worst_relative < 1e-4
        if operator in FOLDED:
            kinds = [[n.op_type for n in m.graph.node] for m in (pruned, onnx.load(graph, load_external_data=False))]
            assert kinds[0] == kinds[1]
