"""The affine fit against a dense solve with a column of ones."""

import numpy as np
import pytest
import torch

from ghostexport.recipe import RecoverSection
from ghostexport.recovery.fits.least_squares import fit_affine, fit_ghost
from tests.unit.recovery.synthetic import Planted, least_squares


def test_it_is_least_squares_with_a_constant():
    data = Planted()
    pre, post = data.rows(data.pre, data.post)
    solution = least_squares(torch.cat([pre, torch.ones(len(pre), 1)], dim=1), post - pre)
    operator = fit_affine(data.statistics, RecoverSection(ridge=0.0))
    np.testing.assert_allclose(operator.delta, solution[:-1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(operator.bias, solution[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_never_worse_than_ghost_in_sample(seed):
    data = Planted(seed)
    moments = data.statistics.moments
    affine, ghost = (fit(data.statistics, RecoverSection(ridge=0.0)) for fit in (fit_affine, fit_ghost))
    with_bias = moments.residual(torch.from_numpy(affine.delta), torch.from_numpy(affine.bias))
    assert with_bias <= moments.residual(torch.from_numpy(ghost.delta)) * (1 + 1e-6)


def test_a_planted_affine_map_is_recovered():
    data = Planted()
    M, b = 0.3 * data.normal(12, 12), data.normal(12)
    moments = type(data.statistics.moments)(12)
    pre = data.normal(500, 12)
    moments.add(pre, pre + pre @ M + b)
    data.statistics.folds[:] = [moments]
    operator = fit_affine(data.statistics, RecoverSection(ridge=1e-9))
    np.testing.assert_allclose(operator.delta, M, atol=1e-6)
    np.testing.assert_allclose(operator.bias, b, atol=1e-6)


def test_rank_keeps_the_bias_optimal():
    """With the matrix reduced to rank r, b is still the mean of what the matrix leaves."""
    data = Planted()
    pre, post = data.rows(data.pre, data.post)
    operator = fit_affine(data.statistics, RecoverSection(rank=3))
    U, V = operator.factors
    assert U.shape == (12, 3) and V.shape == (3, 12)
    left = (post - pre - pre @ torch.from_numpy(U @ V).double()).mean(0)
    np.testing.assert_allclose(operator.bias, left, rtol=1e-4, atol=1e-3)
