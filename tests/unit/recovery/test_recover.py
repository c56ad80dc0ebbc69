"""Recovery on real tiny models against dense float64 least squares, and on planted operators."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import CalibrationError, RecipeError, RecoveryError
from ghostexport.execution import Execution
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.fits.hadamard import hadamard
from ghostexport.recovery.fits.least_squares import fit_ghost
from ghostexport.recovery.fits.solving import solve_ridge
from ghostexport.recovery.gathering import Gathered, Request, gather
from ghostexport.recovery.recover import recover
from tests.tiny import CONFIGS, tiny

PLANS = {"first": [[0, 2]], "middle": [[2, 4]], "last": [[4, 6]], "two": [[0, 1], [3, 5]]}
ALL = RecoverSection(operators=("ghost", "linearpatch-diag", "linearpatch-rotate"))


def windows(count, seed, padded=True):
    random = np.random.default_rng(seed)
    lengths = random.integers(40, 61, count) if padded else np.full(count, 60)
    return CalibrationSet.from_tokens(random.integers(3, 128, (count, 60)), np.arange(60) < lengths[:, None])


CALIBRATION, HELD_OUT = windows(24, 0), windows(6, 1)


def pairs(loaded, span, tokens):
    """``X_pre``, ``X_post`` ``[N, C]`` float64 of all real tokens and their sequence index, in one batch."""
    mask = torch.from_numpy(tokens.attention_mask)
    states = {}
    models.read_residuals(
        loaded.model,
        [span.start, span.stop],
        lambda point, x: states.__setitem__(point, x.double()),
        torch.from_numpy(tokens.tokens),
        mask,
    )
    sequence = torch.arange(len(mask))[:, None].expand_as(mask)[mask.bool()]
    return states[span.start][mask.bool()], states[span.stop][mask.bool()], sequence


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("place", PLANS)
def test_ghost_is_the_least_squares_operator_and_the_best_on_calibration(name, place):
    loaded = models.from_memory(tiny(name))
    plan = PrunePlan.from_spans(6, PLANS[place])
    sets = recover(loaded, plan, CALIBRATION, HELD_OUT, ALL)
    assert list(sets) == list(ALL.operators)
    for boundary in plan.boundaries:
        X, Y, _ = pairs(loaded, boundary.span, CALIBRATION)
        ghost, diag, rotate = (sets[name].operators[boundary.index] for name in sets)
        expected = torch.linalg.lstsq(X, Y - X).solution
        scale = float(expected.abs().max())
        np.testing.assert_allclose(ghost.delta, expected.numpy(), rtol=1e-3, atol=1e-4 * scale)
        assert ghost.fit["nmse_calibration"] <= min(diag.fit["nmse_calibration"], rotate.fit["nmse_calibration"], 1.0)
        assert ghost.fit["tokens"] == CALIBRATION.num_tokens
        for operator in (ghost, diag, rotate):
            check_figures(loaded, operator)


def check_figures(loaded, operator):
    M = torch.as_tensor(operator.matrix).double()
    for tokens, part in ((CALIBRATION, "calibration"), (HELD_OUT, "held_out")):
        X, Y, _ = pairs(loaded, operator.boundary.span, tokens)
        error = Y - X - X @ M
        nmse = float(error.square().sum() / (Y - X).square().sum())
        assert operator.fit[f"nmse_{part}"] == pytest.approx(nmse, rel=1e-4, abs=1e-9)
        relative = float((error.norm(dim=1) / Y.norm(dim=1)).mean())
        assert operator.fit[f"relative_error_{part}"] == pytest.approx(relative, rel=1e-4, abs=1e-6)
    share = float((M - M.T).norm() / 2 / M.norm())
    assert operator.fit["antisymmetric_share"] == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_linearpatch_is_its_formula(name):
    loaded = models.from_memory(tiny(name))
    plan = PrunePlan.from_spans(6, [[2, 5]])
    sets = recover(loaded, plan, CALIBRATION, HELD_OUT, ALL)
    X, Y, sequence = pairs(loaded, plan.removed[0], CALIBRATION)

    def scales(H):
        ratios = [
            (Y[sequence == s] @ H).abs().mean(0) / (X[sequence == s] @ H).abs().mean(0) for s in range(len(CALIBRATION))
        ]
        return torch.stack(ratios).mean(0)

    eye, H = torch.eye(64, dtype=torch.float64), torch.from_numpy(hadamard(64))
    np.testing.assert_allclose(sets["linearpatch-diag"].operators[0].diagonal, scales(eye) - 1, rtol=1e-3, atol=1e-5)
    expected = H @ torch.diag(scales(H)) @ H.T - eye
    got = sets["linearpatch-rotate"].operators[0].delta
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(got, got.T, atol=1e-6)


def planted(seed=0, tokens=4000, C=64):
    """Statistics of ``X_post = X_pre W`` exactly, with channels of very different scale and sink tokens."""
    random = torch.Generator().manual_seed(seed)
    X = torch.randn(1, tokens, C, generator=random, dtype=torch.float64) * torch.logspace(-1, 2, C).double()
    X[0, ::500, 3] = 2500
    M = torch.randn(C, C, generator=random, dtype=torch.float64) / C**0.5
    boundary = PrunePlan.from_spans(6, [[2, 4]]).boundaries[0]
    statistics = Gathered(boundary, Request(), C, tokens, torch.device("cpu"))
    statistics.add(range(1), torch.ones(1, tokens, dtype=torch.bool), X, X + X @ M)
    return statistics, M


def test_a_planted_operator_is_recovered():
    statistics, M = planted()
    operator = fit_ghost(statistics, RecoverSection(ridge=1e-6))
    np.testing.assert_allclose(operator.delta, M.numpy(), rtol=1e-5, atol=1e-6)
    assert statistics.moments.nmse(torch.from_numpy(operator.delta)) < 1e-10


def test_normal_equations_hold():
    """X'(Delta - X M) = ridge M."""
    statistics, _ = planted()
    moments = statistics.moments
    for ridge in (1e-6, 10.0):
        M = solve_ridge(moments.gram, moments.cross, ridge, moments.tokens)
        left = moments.cross - moments.gram @ M
        assert float((left - ridge * M).norm() / moments.cross.norm()) < 1e-12


def test_no_change_gives_a_zero_operator():
    statistics, _ = planted()
    X = statistics.sample.pre[None].double()
    same = Gathered(statistics.boundary, Request(), 64, X.shape[1], torch.device("cpu"))
    same.add(range(1), torch.ones(X.shape[:2], dtype=torch.bool), X, X)
    assert not fit_ghost(same, RecoverSection()).delta.any()


def test_folds_add_up_and_are_by_sequence():
    loaded = models.from_memory(tiny("llama"))
    plan = PrunePlan.from_spans(6, [[2, 4]])
    one = gather(loaded, plan.boundaries, CALIBRATION, Request(folds=1), Execution())[0]
    four = gather(loaded, plan.boundaries, CALIBRATION, Request(folds=4), Execution())[0]
    torch.testing.assert_close(four.moments.gram, one.moments.gram, rtol=1e-12, atol=1e-9)
    assert [fold.tokens for fold in four.folds] == [int(CALIBRATION.attention_mask[i::4].sum()) for i in range(4)]


def test_operator_files_are_deterministic():
    loaded = models.from_memory(tiny("llama"))
    plan = PrunePlan.from_spans(6, [[2, 4]])
    first, second = (recover(loaded, plan, CALIBRATION, HELD_OUT, ALL) for _ in range(2))
    assert [s.sha256 for s in first.values()] == [s.sha256 for s in second.values()]
    assert first["ghost"].calibration_sha256 == CALIBRATION.sha256
    assert first["ghost"].operators[0].delta.dtype == np.float32


def test_patched_model_is_nearer_to_dense_than_pruned():
    """Fitted on held-out-like data, the operator brings the residual stream after the cut closer to the dense one."""
    loaded = models.from_memory(tiny("llama"))
    plan = PrunePlan.from_spans(6, [[2, 4]])
    ghost = recover(loaded, plan, CALIBRATION, HELD_OUT, RecoverSection(operators=("ghost",)))["ghost"]
    ids = torch.from_numpy(HELD_OUT.tokens)
    dense = loaded.model(ids).logits
    errors = [
        float((models.patch(loaded, plan, operators).model(ids).logits - dense).norm()) for operators in (None, ghost)
    ]
    assert errors[1] < 0.9 * errors[0]


def test_the_empty_plan_needs_no_operator():
    loaded = models.from_memory(tiny("llama"))
    sets = recover(loaded, PrunePlan(6), CALIBRATION, HELD_OUT, ALL)
    assert all(s.operators == () for s in sets.values())


def test_bad_input():
    loaded = models.from_memory(tiny("llama"))
    plan = PrunePlan.from_spans(6, [[2, 4]])
    few = windows(2, 0, padded=False)
    with pytest.raises(CalibrationError, match="120 calibration tokens are too few for hidden size 64: at least 128"):
        recover(loaded, plan, few, HELD_OUT, ALL)
    said = []
    recover(loaded, plan, windows(4, 0, padded=False), HELD_OUT, ALL, Execution(say=said.append))
    assert "240 calibration tokens are few" in said[0]
    with pytest.raises(RecipeError, match="Did you mean 'ghost'"):
        recover(loaded, plan, CALIBRATION, HELD_OUT, RecoverSection(operators=("gost",)))
    with pytest.raises(RecoveryError, match=r"condition number .* from 10 tokens for 64 channels"):
        solve_ridge(torch.ones(64, 64).double() * 1e12, torch.ones(64, 64).double(), 1e-6, 10)
    half = models.from_memory(tiny("llama").half())
    with torch.no_grad():
        models.find_blocks(half.model)[2].mlp.down_proj.weight.mul_(1e4)
    with pytest.raises(CalibrationError, match="float16"):
        recover(half, plan, CALIBRATION, HELD_OUT, ALL)


def test_progress_is_reported():
    loaded = models.from_memory(tiny("llama"))
    calls = []
    recover(
        loaded, PrunePlan.from_spans(6, [[2, 4]]), CALIBRATION, HELD_OUT, ALL,
        Execution(progress=lambda *call: calls.append(call)),
    )  # fmt: skip
    assert calls == [("recover", 24, 24), ("recover: held-out", 6, 6)]
