"""Reduced-rank regression: the Eckart-Young bound under the fit's metric, monotone in the rank, full at r = C."""

import numpy as np
import pytest
import torch

from ghostexport.recipe import RecoverSection
from ghostexport.recovery.fits.least_squares import fit_ghost
from ghostexport.recovery.fits.solving import reduced_rank
from tests.unit.recovery.synthetic import Planted


def test_it_meets_the_eckart_young_bound():
    data = Planted()
    (pre,) = data.rows(data.pre)
    M = data.normal(12, 12)
    G = pre.T @ pre
    values = torch.linalg.svdvals(pre @ M)
    errors = []
    for rank in range(1, 13):
        U, V = reduced_rank(M, G, rank)
        assert U.shape == (12, rank) and V.shape == (rank, 12)
        error = float((pre @ (M - U @ V)).square().sum())
        assert error == pytest.approx(float(values[rank:].square().sum()), rel=1e-6, abs=1e-9 * float(values[0] ** 2))
        errors.append(error)
    assert errors == sorted(errors, reverse=True)
    torch.testing.assert_close(U @ V, M)


def test_it_beats_plain_truncation_of_the_matrix():
    data = Planted()
    (pre,) = data.rows(data.pre)
    M = data.normal(12, 12)
    U, V = reduced_rank(M, pre.T @ pre, 4)
    left, values, right = torch.linalg.svd(M)
    truncated = left[:, :4] * values[:4] @ right[:4]
    assert (pre @ (M - U @ V)).norm() < 0.5 * (pre @ (M - truncated)).norm()


def test_recipes_may_ask_for_it():
    statistics = Planted().statistics
    full = fit_ghost(statistics, RecoverSection())
    whole = fit_ghost(statistics, RecoverSection(rank=12))
    np.testing.assert_allclose(whole.factors[0] @ whole.factors[1], full.delta, rtol=1e-3, atol=1e-4)
    assert fit_ghost(statistics, RecoverSection(rank=2)).num_parameters == 2 * 2 * 12
