"""The published operators and their options against independent dense float64 computations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import RecipeError, RecoveryError
from ghostexport.files import write_bytes
from ghostexport.operators import Operator, OperatorSet, load_operators
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.fits.least_squares import fit_ghost
from ghostexport.recovery.fits.solving import solve_truncated
from ghostexport.recovery.gathering import Gathered, Request
from ghostexport.recovery.recover import recover
from tests.tiny import tiny

PLANS = {"first": [[0, 2]], "middle": [[2, 4]], "last": [[4, 6]], "two": [[1, 2], [3, 5]]}
MID = {"llama": "post_attention_layernorm", "llama-tied": "post_attention_layernorm", "gpt2": "ln_2"}


def windows(count, seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(40, 61, count)
    tokens = random.integers(3, 128, (count, 60))
    tokens[:, 0] = 1  # BOS
    return CalibrationSet.from_tokens(tokens, np.arange(60) < lengths[:, None])


CALIBRATION, HELD_OUT = windows(24, 0), windows(6, 1)
MASK = torch.from_numpy(CALIBRATION.attention_mask).bool()


def recovered(loaded, plan, *names, **options):
    return recover(loaded, plan, CALIBRATION, HELD_OUT, RecoverSection(operators=names, **options))


def stream(model, *points):
    """``x_l`` ``[N, C]`` float64 of the real calibration tokens."""
    found = {}
    models.read_residuals(
        model,
        points,
        lambda point, x: found.__setitem__(point, x.double()[MASK]),
        torch.from_numpy(CALIBRATION.tokens),
        MASK.long(),
    )
    return [found[point] for point in points]


def mid(model, block, name):
    seen = []
    norm = getattr(models.find_blocks(model)[block], name)
    handle = norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].double()[MASK]))
    with torch.no_grad():
        model(torch.from_numpy(CALIBRATION.tokens), attention_mask=MASK.long())
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("place", PLANS)
def test_none_is_the_bare_cut(place):
    loaded = models.from_memory(tiny("llama"))
    plan = PrunePlan.from_spans(6, PLANS[place])
    operators = recovered(loaded, plan, "none")["none"]
    ids = torch.from_numpy(HELD_OUT.tokens)
    repaired, bare = (models.patch(loaded, plan, o).model(ids).logits for o in (operators, None))
    assert torch.equal(repaired, bare)
    assert [o.fit["nmse_held_out"] for o in operators.operators] == [1.0] * len(plan.boundaries)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2"])
@pytest.mark.parametrize("place", ["middle", "last", "two"])
@pytest.mark.parametrize("ridge", [0.0, 5.0])
def test_replaceme_is_least_squares_on_the_mlp_output(name, place, ridge):
    loaded = models.from_memory(tiny(name))
    plan = PrunePlan.from_spans(6, PLANS[place])
    operators = recovered(loaded, plan, "replaceme-lstsq", ridge=ridge)["replaceme-lstsq"]
    ids = torch.from_numpy(CALIBRATION.tokens)
    for operator in operators.operators:
        span = operator.boundary.span
        start, stop = stream(loaded.model, span.start, span.stop)
        middle = mid(loaded.model, span.start - 1, MID[name])
        m = start - middle
        A = torch.cat([m, ridge**0.5 * torch.eye(64).double()])
        T = torch.linalg.lstsq(A, torch.cat([stop - middle, torch.zeros(64, 64).double()])).solution
        projection = models.find_projections(loaded.model, span.start - 1).mlp_output
        V = projection.weight.double() if name == "gpt2" else projection.weight.double().T
        (fold,) = operator.folds
        assert not operator.adds_nodes and (fold.block, fold.role) == (span.start - 1, "mlp_output")
        np.testing.assert_allclose(fold.weight, (V @ T).detach().numpy(), rtol=1e-3, atol=1e-4)
        if name == "gpt2":
            np.testing.assert_allclose(fold.bias, (projection.bias.double() @ T).detach().numpy(), rtol=1e-3, atol=1e-4)
        error = stop - middle - m @ T
        nmse = float(error.square().sum() / (stop - start).square().sum())
        assert operator.fit["nmse_calibration"] == pytest.approx(nmse, rel=0.05)  # on its token sample
    if place == "middle":  # the fold is m T: the stream behind the cut is x_mid + m T
        patched = models.patch(loaded, plan, operators).model
        (got,) = stream(patched, 2)
        torch.testing.assert_close(got, middle + m @ T, rtol=1e-3, atol=1e-3)
        assert patched(ids).logits.shape == (24, 60, 128)


def test_replaceme_refusals():
    plan = PrunePlan.from_spans(6, PLANS["middle"])
    for name in ("gemma2", "olmo2"):
        with pytest.raises(RecoveryError, match="has a norm between its MLP's projection and the residual addition"):
            recovered(models.from_memory(tiny(name)), plan, "replaceme-lstsq")
    with pytest.raises(RecoveryError, match="block 0 is removed"):
        recovered(models.from_memory(tiny("llama")), PrunePlan.from_spans(6, [[0, 2]]), "replaceme-lstsq")


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma2", "gemma3", "gpt2", "gpt-neox", "phi"])
@pytest.mark.parametrize("place", PLANS)
def test_a_folded_scale_is_the_inserted_scale(name, place):
    """Tied and untied heads, biases, post-norms, parallel blocks, spans at both ends."""
    eps = {"gpt2": "layer_norm_epsilon", "gpt-neox": "layer_norm_eps", "phi": "layer_norm_eps"}.get(
        name, "rms_norm_eps"
    )
    loaded = models.from_memory(tiny(name, **{eps: 1e-10}))
    before = {key: value.clone() for key, value in loaded.model.state_dict().items()}
    plan = PrunePlan.from_spans(6, PLANS[place])
    operators = recovered(loaded, plan, "prune-and-comp")["prune-and-comp"]
    dense = []
    for operator in operators.operators:
        span = operator.boundary.span
        ratios = []
        for i in range(24):
            one = CalibrationSet.from_tokens(CALIBRATION.tokens[i : i + 1], CALIBRATION.attention_mask[i : i + 1])
            found = {}
            models.read_residuals(
                loaded.model, (span.start, span.stop), lambda p, x, f=found: f.__setitem__(p, x.double()[0]),
                torch.from_numpy(one.tokens), torch.from_numpy(one.attention_mask),
            )  # fmt: skip
            real = one.attention_mask[0] == 1
            ratios.append(found[span.stop][real].abs().mean(0) / found[span.start][real].abs().mean(0))
        alpha = float(torch.stack(ratios).mean())
        assert operator.scale == pytest.approx(alpha, rel=1e-4) and not operator.adds_nodes
        dense.append(Operator(operator.boundary, "diag", diagonal=np.full(64, alpha - 1, np.float32)))
        assert operator.fit["antisymmetric_share"] == 0 and operator.fit["nmse_held_out"] > 0
    ids = torch.from_numpy(HELD_OUT.tokens)
    folded = models.patch(loaded, plan, operators).model(ids).logits
    inserted = models.patch(loaded, plan, OperatorSet("diag", tuple(dense), plan)).model(ids).logits
    torch.testing.assert_close(folded, inserted, rtol=1e-3, atol=1e-3 * float(inserted.abs().max()))
    after = loaded.model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_a_scale_is_refused_where_blocks_read_the_raw_stream():
    with pytest.raises(RecoveryError, match="its blocks read the stream without a norm"):
        recovered(models.from_memory(tiny("olmo2")), PrunePlan.from_spans(6, [[2, 4]]), "prune-and-comp")


def test_scales_survive_the_operator_file(tmp_path):
    plan = PrunePlan.from_spans(6, [[2, 4]])
    operators = OperatorSet("prune-and-comp", (Operator(plan.boundaries[0], "prune-and-comp", scale=1.75),), plan)
    write_bytes(tmp_path / "o.safetensors", operators.to_bytes())
    assert load_operators(tmp_path / "o.safetensors").operators[0].scale == 1.75
    assert operators.num_parameters == 0
    np.testing.assert_array_equal(operators.operators[0].apply(np.ones((2, 3), np.float32)), np.full((2, 3), 1.75))
    with pytest.raises(ValueError, match="positive and finite"):
        Operator(plan.boundaries[0], "x", scale=0.0)


def made_up(C, tokens, rank=None, seed=0):
    """Statistics of random tokens, in a subspace when a rank is given, with massive ones; ``X`` and ``Delta``."""
    random = torch.Generator().manual_seed(seed)
    X = torch.randn(tokens, rank or C, generator=random, dtype=torch.float64)
    if rank is not None:
        X = X @ torch.randn(rank, C, generator=random, dtype=torch.float64)
    X = X * torch.logspace(-1, 1, C).double()
    X[::50] *= 100
    delta = X @ torch.randn(C, C, generator=random, dtype=torch.float64) / C**0.5
    delta += 0.1 * torch.randn(tokens, C, generator=random, dtype=torch.float64)
    boundary = PrunePlan.from_spans(6, [[2, 4]]).boundaries[0]
    statistics = Gathered(boundary, Request(), C, tokens, torch.device("cpu"))
    for part in range(0, tokens, 100):
        x = X[None, part : part + 100]
        statistics.add(range(1), torch.ones(x.shape[:2], dtype=torch.bool), x, x + delta[None, part : part + 100])
    return statistics, X, delta


@pytest.mark.parametrize("C", [64, 80, 96, 112, 576, 896])
def test_ghost_of_every_width_by_both_solvers(C):
    statistics, X, delta = made_up(C, 3 * C)
    expected = torch.linalg.lstsq(X, delta).solution.numpy()
    for solver in ("normal", "svd"):
        operator = fit_ghost(statistics, RecoverSection(ridge=0.0, solver=solver))
        np.testing.assert_allclose(operator.delta, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_ghost_at_width_2880():
    statistics, X, delta = made_up(2880, 4000)
    M = torch.as_tensor(fit_ghost(statistics, RecoverSection(ridge=0.0)).delta).double()
    residual = X.T @ (delta - X @ M)
    assert float(residual.norm() / (X.T @ delta).norm()) < 1e-5  # delta is stored as float32


def test_svd_is_the_minimum_norm_solution_below_full_rank():
    statistics, X, delta = made_up(64, 400, rank=20)
    moments = statistics.moments
    solution, kept = solve_truncated(moments.gram, moments.cross)
    expected = torch.linalg.pinv(X, rtol=1e-6) @ delta
    torch.testing.assert_close(solution, expected, rtol=1e-5, atol=1e-7)
    assert kept == 20
    operator = fit_ghost(statistics, RecoverSection(solver="svd"))
    assert operator.fit["directions"] == 20


def test_ratio_of_means_is_the_papers_scale():
    loaded = models.from_memory(tiny("llama"))
    plan = PrunePlan.from_spans(6, [[2, 5]])
    diagonals = {
        ratio: recovered(loaded, plan, "linearpatch-diag", ratio=ratio)["linearpatch-diag"].operators[0].diagonal
        for ratio in ("mean-of-ratios", "ratio-of-means")
    }
    found = {}
    models.read_residuals(
        loaded.model, (2, 5), lambda p, x: found.__setitem__(p, x.double()), torch.from_numpy(CALIBRATION.tokens),
        MASK.long(),
    )  # fmt: skip
    means = {p: torch.stack([x[i][MASK[i]].abs().mean(0) for i in range(24)]) for p, x in found.items()}
    expected = means[5].sum(0) / means[2].sum(0) - 1
    np.testing.assert_allclose(diagonals["ratio-of-means"], expected.numpy(), rtol=1e-3, atol=1e-6)
    assert np.abs(diagonals["mean-of-ratios"] - diagonals["ratio-of-means"]).max() > 1e-4


@pytest.mark.parametrize("name", ["ghost", "linearpatch-rotate", "replaceme-lstsq", "prune-and-comp"])
def test_sequential_statistics_are_of_the_repaired_prefix(name):
    loaded = models.from_memory(tiny("llama"))
    plan = PrunePlan.from_spans(6, PLANS["two"])
    dense = recovered(loaded, plan, name)[name].operators
    first, second = recovered(loaded, plan, name, statistics="sequential")[name].operators
    assert [t.tobytes() for t in only(first).values()] == [t.tobytes() for t in only(dense[0]).values()]
    assert any(not np.allclose(a, b) for a, b in zip(only(second).values(), only(dense[1]).values(), strict=True))
    assert second.fit["nmse_held_out"] > 0 and second.fit["tokens"] == CALIBRATION.num_tokens
    if name == "ghost":
        prefix_plan = PrunePlan(6, plan.removed[:1])
        prefix = models.patch(loaded, prefix_plan, OperatorSet(name, (first,), prefix_plan))
        (x,), (target,) = stream(prefix.model, 2), stream(loaded.model, 5)
        expected = torch.linalg.lstsq(x, target - x).solution
        np.testing.assert_allclose(second.delta, expected.numpy(), rtol=1e-3, atol=1e-4)


def only(operator):
    """The arrays of one operator."""
    plan = PrunePlan(6, (operator.boundary.span,))
    return OperatorSet("x", (replace(operator, boundary=plan.boundaries[0]),), plan).tensors()


def test_per_block_is_the_product_of_single_maps():
    loaded = models.from_memory(tiny("llama"))
    plan = PrunePlan.from_spans(6, PLANS["two"])
    names = ("ghost", "ghost-affine", "linearpatch-diag", "prune-and-comp", "none")
    sets = recovered(loaded, plan, *names, per_block=True)
    x3, x4, x5 = stream(loaded.model, 3, 4, 5)
    W = [torch.eye(64).double() + torch.linalg.lstsq(a, b - a).solution for a, b in ((x3, x4), (x4, x5))]
    got = sets["ghost"].operators[1]
    np.testing.assert_allclose(got.delta + np.eye(64), (W[0] @ W[1]).numpy(), rtol=1e-3, atol=1e-3)
    assert len(got.fit["blocks"]) == 2 and 0 < got.fit["nmse_calibration"] < 1
    affine = sets["ghost-affine"].operators[1]
    ones = [torch.cat([x, torch.ones(len(x), 1).double()], 1) for x in (x3, x4)]
    maps = [torch.linalg.lstsq(a, b).solution for a, b in zip(ones, (x4, x5), strict=True)]
    y = torch.cat([x3, ones[0][:, -1:]], 1) @ maps[0]
    y = torch.cat([y, ones[0][:, -1:]], 1) @ maps[1]
    np.testing.assert_allclose(affine.apply(x3.numpy()), y.numpy(), rtol=1e-2, atol=1e-2)
    single = recovered(loaded, PrunePlan.from_spans(6, [[3, 5]]), "ghost", per_block=True)["ghost"].operators[0]
    direct = torch.linalg.lstsq(x3, x5 - x3).solution
    np.testing.assert_allclose(single.delta, direct.numpy(), rtol=1e-3, atol=1e-4)  # one run: one direct fit
    with pytest.raises(RecoveryError, match="--per-block does not apply to replaceme-lstsq"):
        recovered(loaded, plan, "replaceme-lstsq", per_block=True)
    with pytest.raises(RecipeError, match="--statistics dense"):
        recovered(loaded, plan, "ghost", per_block=True, statistics="sequential")
