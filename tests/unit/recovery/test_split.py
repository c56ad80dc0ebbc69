"""Split and zero fits against dense solves, and their place among the operators they contain."""

import numpy as np
import pytest
import torch

from ghostexport.recipe import RecoverSection
from ghostexport.recovery.fits.down_projection import fit_split, fit_zero
from ghostexport.recovery.fits.least_squares import fit_weighted
from ghostexport.recovery.gathering import Gathered, Request
from ghostexport.recovery.held_out import figures
from ghostexport.recovery.last_block import LastBlock
from tests.unit.recovery.synthetic import C, Planted, least_squares


def errors(data, W, V):
    """Weighted squared error of ``x_mid W + h V`` over the real tokens."""
    mid, inner, post = data.rows(data.mid, data.inner, data.post)
    return float(data.weights @ (post - mid @ W - inner @ V).square().sum(1))


def parts(operator):
    W = (
        torch.eye(C).double()
        if operator.matrix is None
        else torch.eye(C).double() + torch.as_tensor(operator.matrix).double()
    )
    return W, torch.from_numpy(operator.folds[0].weight).double()


def test_they_are_the_weighted_solutions_around_the_old_weights():
    data = Planted()
    mid, inner, pre, post = data.rows(data.mid, data.inner, data.pre, data.post)
    A = torch.cat([mid, inner], dim=1)
    split, zero = (fit(data.statistics, RecoverSection()) for fit in (fit_split, fit_zero))
    expected = least_squares(A, post - pre, data.weights, split.fit["ridge"])
    W, V = parts(split)
    np.testing.assert_allclose(W - torch.eye(C), expected[:C], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(V - data.V0, expected[C:], rtol=1e-5, atol=1e-5)
    expected = least_squares(inner, post - pre, data.weights, zero.fit["ridge"])
    np.testing.assert_allclose(parts(zero)[1] - data.V0, expected, rtol=1e-5, atol=1e-5)


def test_a_planted_split_is_recovered():
    data = Planted()
    post = data.mid @ data.W + data.inner @ data.V
    statistics = Gathered(data.boundary, Request(needs=frozenset({"last-block"}), folds=4), C, 480, torch.device("cpu"))
    statistics.add(range(8), data.mask, data.pre, post, LastBlock(data.mid, data.inner, data.V0))
    operator = fit_split(statistics, RecoverSection())
    W, V = parts(operator)
    assert operator.fit["judged"] < 1e-4
    np.testing.assert_allclose(W, data.W, atol=0.1)
    np.testing.assert_allclose(V, data.V, atol=0.1)


@pytest.mark.parametrize("seed", range(4))
def test_order_in_sample(seed):
    """split <= ghost-weighted, split <= replaceme, split <= zero <= replaceme, all with the same token weights."""
    data = Planted(seed)
    mid, inner, post = data.rows(data.mid, data.inner, data.post)
    split = errors(data, *parts(fit_split(data.statistics, RecoverSection())))
    zero = errors(data, *parts(fit_zero(data.statistics, RecoverSection())))
    W = torch.eye(C).double() + torch.from_numpy(fit_weighted(data.statistics, RecoverSection()).delta).double()
    ghost = errors(data, W, data.V0 @ W)
    T = least_squares(inner @ data.V0, post - mid, data.weights)
    replaceme = errors(data, torch.eye(C).double(), data.V0 @ T)
    slack = 1 + 1e-2  # the ridge towards the old weights
    assert split <= slack * min(ghost, zero, replaceme)
    assert zero <= slack * replaceme


def test_rank_solves_the_down_projection_again():
    """At rank r no other V lowers the penalised objective, and at r = C the split is the full one."""
    data = Planted()
    full, low, whole = (fit_split(data.statistics, RecoverSection(rank=r)) for r in (None, 3, C))
    for a, b in zip(parts(full), parts(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    folds = sum(data.statistics.last_block_folds[1:], start=data.statistics.last_block_folds[0])
    W, V = parts(low)
    D = torch.cat([W - torch.eye(C).double(), V - data.V0])
    gradient = folds.gram @ D - folds.cross + low.fit["ridge"] * D
    assert float(gradient[C:].abs().max()) < 1e-3 * float(folds.cross[C:].abs().max())


def test_a_rank_is_chosen_for_what_the_down_projection_cannot_make_up_for():
    """Regressors that go along with the stream: a map cut down in the stream's own metric leaves more error."""
    data = Planted()
    inner = 0.3 * data.normal(*data.inner.shape) + data.mid @ data.normal(C, data.inner.shape[-1])
    pre = data.mid + inner @ data.V0
    post = data.mid @ data.W + inner @ data.V + 0.1 * data.normal(*pre.shape)
    statistics = Gathered(data.boundary, Request(needs=frozenset({"last-block"}), folds=1), C, 480, torch.device("cpu"))
    statistics.add(range(8), data.mask, pre, post, LastBlock(data.mid, inner, data.V0))
    full, low = (fit_split(statistics, RecoverSection(rank=rank)) for rank in (None, 3))
    folds = sum(statistics.last_block_folds[1:], start=statistics.last_block_folds[0])
    ridge = low.fit["ridge"]
    G, B = folds.gram + ridge * torch.eye(len(folds.gram)).double(), folds.cross

    def left(M):
        """The penalised error of a map with the down-projection that suits it best."""
        D = torch.cat([M, torch.linalg.solve(G[C:, C:], B[C:] - G[C:, :C] @ M)])
        return float((D * (G @ D - 2 * B)).sum() + folds.square_delta)

    M, mine = (parts(operator)[0] - torch.eye(C).double() for operator in (full, low))
    _, vectors = torch.linalg.eigh(M.T @ G[:C, :C] @ M)
    top = vectors[:, -3:]
    assert left(M) < left(mine) < 0.999 * left(M @ top @ top.T)


@pytest.mark.parametrize("rank", [None, 3])
def test_what_the_judges_refuse_changes_nothing(rank):
    """The judging sequences obey the opposite of what the others do."""
    data = Planted()
    change = data.mid @ (data.W - torch.eye(C).double()) + data.inner @ (data.V - data.V0)
    change[3::4] *= -1
    statistics = Gathered(data.boundary, Request(needs=frozenset({"last-block"})), C, 480, torch.device("cpu"))
    statistics.add(range(8), data.mask, data.pre, data.pre + change, LastBlock(data.mid, data.inner, data.V0))
    operator = fit_split(statistics, RecoverSection(rank=rank))
    assert operator.fit["judged"] >= 1
    W, V = parts(operator)
    torch.testing.assert_close(W, torch.eye(C).double())
    torch.testing.assert_close(V, data.V0, rtol=1e-6, atol=1e-6)


def test_figures_measure_the_inside():
    data = Planted()
    operator = fit_split(data.statistics, RecoverSection())
    assert operator.site == "mid" and operator.folds[0].block == 1 and operator.folds[0].role == "mlp_output"
    W, V = parts(operator)
    mid, inner, post = data.rows(data.mid, data.inner, data.post)
    error = (post - mid @ W - inner @ V).norm(dim=1) / post.norm(dim=1)
    got = figures(operator, data.statistics)["relative_error_calibration"]
    assert got == pytest.approx(float(error.mean()), rel=1e-4)
