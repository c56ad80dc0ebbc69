"""A model whose parts are in memory and on disk is measured like one in memory."""

import numpy as np
import pytest
import torch

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import ModelLayoutError
from ghostexport.execution import Execution
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection, SelectSection
from ghostexport.recovery.recover import recover
from ghostexport.selection.choosing import select
from tests.tiny import tiny_folder

OPERATORS = ("ghost", "linearpatch-rotate", "ghost-split", "replaceme-lstsq")


def windows(seed, count=12):
    return CalibrationSet.from_tokens(np.random.default_rng(seed).integers(3, 200, (count, 40)))


def matrices(operator):
    return [M for M in (operator.delta, *(fold.weight for fold in operator.folds)) if M is not None]


def test_the_same_plan_and_operators_as_in_memory(tmp_path):
    folder = tiny_folder(tmp_path / "model", "llama")
    plans, sets, loaded = [], [], []
    for execution in (Execution(device="cpu"), Execution(device="split", memory={"cpu": 350_000})):
        loaded.append(models.load_model(folder, "float32", execution))
        section = SelectSection(criterion="streamline", prune=2)
        plans.append(select(loaded[-1], windows(0), section, execution))
        wanted = RecoverSection(operators=OPERATORS)
        sets.append(recover(loaded[-1], plans[-1], windows(0), windows(1, 3), wanted, execution))
    offloaded = loaded[1].model
    assert "disk" in offloaded.hf_device_map.values() and any(p.is_meta for p in offloaded.parameters())
    assert plans[0].removed == plans[1].removed
    for name in OPERATORS:
        for one, other in zip(sets[0][name].operators, sets[1][name].operators, strict=True):
            for M, same in zip(matrices(one), matrices(other), strict=True):
                np.testing.assert_allclose(M, same, rtol=1e-4, atol=1e-5)
    ids = torch.from_numpy(windows(2, 1).tokens)
    torch.testing.assert_close(offloaded(ids).logits, loaded[0].model(ids).logits)
    plan = PrunePlan.from_spans(6, [[1, 3]])
    with pytest.raises(ModelLayoutError, match="can be measured, not cut"):
        models.patch(loaded[1], plan)
    refit = RecoverSection(operators=("ghost+refit",))
    with pytest.raises(ModelLayoutError, match="a refit runs copies of its blocks"):
        recover(loaded[1], plan, windows(0), windows(1, 3), refit)
