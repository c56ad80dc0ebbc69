"""LoRP: likeness against direct cosines, thresholds, and the removal order worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.execution import Execution
from ghostexport.recipe import SelectSection
from ghostexport.selection.choosing import select
from ghostexport.selection.cosines import cluster, layer_spread, number_of_clusters, removal_order, similarities
from tests.tiny import tiny

TOKENS = np.random.default_rng(0).integers(3, 128, (5, 30))
MASK = np.arange(30) < np.array([30, 20, 30, 12, 30])[:, None]


def test_similarities_are_mean_cosines_and_the_plan_follows():
    loaded = models.from_memory(tiny("llama"))
    windows = CalibrationSet.from_tokens(TOKENS, MASK)
    states = {}
    mask = torch.from_numpy(windows.attention_mask)
    models.read_residuals(
        loaded.model, range(6), lambda point, x: states.__setitem__(point, x.double()), torch.from_numpy(TOKENS), mask
    )
    unit = [torch.nn.functional.normalize(states[b][mask.bool()], dim=1) for b in range(6)]
    expected = np.array([[float((a * b).sum(1).mean()) for b in unit] for a in unit])
    S = similarities(loaded, windows, Execution())
    np.testing.assert_allclose(S, expected, atol=1e-5)
    plan = select(loaded, windows, SelectSection(criterion="lorp", prune=3))
    order = removal_order(S, cluster(S, number_of_clusters(layer_spread(S))), {1, 2, 3, 4})
    assert sorted(order[:3]) == [b for span in plan.removed for b in range(span.start, span.stop)]
    assert plan.scores["rls"] == pytest.approx(-np.log2(expected[np.triu_indices(6, 1)].mean()), rel=1e-4)
    assert plan.scores["ranking"] == {"removed": order[:3], "runners_up": order[3:]}


def test_thresholds():
    assert [number_of_clusters(rls) for rls in (1.149, 1.0, 0.941, 0.7, 0.685)] == [2, 2, 3, 3, 4]
    assert layer_spread(np.array([[1, 0.5], [0.5, 1]])) == 1.0
    assert layer_spread(np.array([[1, -0.5], [-0.5, 1]])) == np.inf


def test_removal_order_by_hand():
    """Two groups. In {0, 1, 2, 3} block 2 is nearest to its mates, then 1; {4, 5, 6} are nearer to each other."""
    S = np.full((7, 7), 0.1)
    likeness = {"01": 0.3, "02": 0.4, "03": 0.1, "12": 0.6, "13": 0.2, "23": 0.5, "45": 0.9, "46": 0.7, "56": 0.8}
    for (a, b), value in likeness.items():
        S[int(a), int(b)] = S[int(b), int(a)] = value
    order = removal_order(S, [[0, 1, 2, 3], [4, 5, 6]], eligible={1, 2, 3, 4, 5})
    # 2 (mean 0.5) and 5 (0.85) go first; then {4, 6} at 0.7 beats {0, 1, 3} at 0.2; then 1 (0.367), 3 (0.267)
    assert order == [2, 5, 4, 1, 3]


def test_clusters_are_in_depth_order_and_cover_all_blocks():
    S = np.kron(np.eye(3), np.ones((4, 4))) * 0.9 + 0.05
    assert cluster(S, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
