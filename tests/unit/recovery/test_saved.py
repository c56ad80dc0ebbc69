"""A model repaired by what was recovered, and by what was saved and loaded, computes the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.operators import load_operators
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.recover import recover
from ghostexport.recovery.registry import OPERATORS
from tests.tiny import tiny

TOKENS = np.random.default_rng(0).integers(3, 128, (12, 40))
NAMES = (*(name for name, kind in OPERATORS.items() if kind.train is None), "ghost+refit", "ghost-split+refit")


@pytest.mark.parametrize("model", ["llama", "gpt2"])  # projections without and with a bias
def test_logits_survive_the_operator_file(model, tmp_path):
    loaded = models.from_memory(tiny(model))
    plan = PrunePlan.from_spans(6, [[1, 2], [3, 5]])
    calibration, held_out = CalibrationSet.from_tokens(TOKENS), CalibrationSet.from_tokens(TOKENS[:2])
    sets = recover(loaded, plan, calibration, held_out, RecoverSection(operators=NAMES))
    ids = torch.from_numpy(TOKENS[:3])
    seen = []
    for name, operators in sets.items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(operators.to_bytes())
        with torch.no_grad():
            own, again = (models.patch(loaded, plan, o).model(ids).logits for o in (operators, load_operators(path)))
        assert torch.equal(own, again), name
        seen.append(own)
    assert all(not torch.equal(one, other) for i, one in enumerate(seen) for other in seen[:i])
