"""Every rung against brute force: gradient descent, or dense least squares over its parameters."""

from __future__ import annotations

import pytest
import torch

from ghostexport.evaluation.cut_errors import best_symmetric, ladder
from ghostexport.moments import BoundaryMoments

C = 7


@pytest.fixture
def data():
    random = torch.Generator().manual_seed(0)
    X = torch.randn(400, C, generator=random, dtype=torch.float64) * torch.logspace(-1, 1, C).double()
    Y = X @ (torch.eye(C).double() + 0.4 * torch.randn(C, C, generator=random, dtype=torch.float64))
    Y += 0.3 * torch.randn(400, C, generator=random, dtype=torch.float64)
    moments = BoundaryMoments(C)
    moments.add(X, Y)
    return X, Y, moments


def test_best_symmetric_equals_brute_force_over_its_free_entries(data):
    X, Y, moments = data
    basis = []
    for i in range(C):
        for j in range(i, C):
            E = torch.zeros(C, C, dtype=torch.float64)
            E[i, j] = E[j, i] = 1
            basis.append(E)
    design = torch.stack([(X @ E).flatten() for E in basis], 1)
    free = torch.linalg.lstsq(design, (Y - X).flatten()).solution
    expected = sum(value * E for value, E in zip(free, basis, strict=True))
    torch.testing.assert_close(best_symmetric(moments.gram, moments.cross), expected, rtol=1e-8, atol=1e-10)


def test_scalar_diagonal_and_full_equal_dense_least_squares(data):
    X, Y, moments = data
    found = ladder(moments)
    scalar = torch.linalg.lstsq(X.flatten()[:, None], Y.flatten()).solution
    torch.testing.assert_close(found["scalar"], (scalar - 1) * torch.eye(C).double())
    per_channel = [torch.linalg.lstsq(X[:, k : k + 1], Y[:, k]).solution for k in range(C)]
    torch.testing.assert_close(found["diagonal"], torch.diag(torch.cat(per_channel) - 1))
    torch.testing.assert_close(found["full"], torch.linalg.lstsq(X, Y - X).solution)


def test_procrustes_is_a_scaled_rotation_that_nearby_ones_do_not_beat(data):
    X, Y, moments = data
    W = ladder(moments)["procrustes"] + torch.eye(C).double()
    alpha2 = float((W @ W.T).diagonal().mean())
    torch.testing.assert_close(W @ W.T, alpha2 * torch.eye(C).double())
    best = float((X @ W - Y).square().sum())
    random = torch.Generator().manual_seed(1)
    for size in (1e-3, 1e-2, 0.1, 1.0):
        A = torch.randn(C, C, generator=random, dtype=torch.float64) * size
        for other in (W @ torch.matrix_exp(A - A.T), W * (1 + size), W * (1 - size)):
            assert float((X @ other - Y).square().sum()) > best


def test_freer_maps_fit_better(data):
    *_, moments = data
    nmse = {name: moments.nmse(M) for name, M in ladder(moments).items()}
    assert nmse["scalar"] >= nmse["diagonal"] >= nmse["symmetric"] >= nmse["full"]
    assert 1 >= nmse["scalar"] >= nmse["procrustes"] >= nmse["full"]


def test_a_dead_channel_changes_nothing():
    random = torch.Generator().manual_seed(2)
    X = torch.randn(50, C, generator=random, dtype=torch.float64)
    X[:, 3] = 0
    moments = BoundaryMoments(C)
    moments.add(X, 1.5 * X)
    for name, M in ladder(moments).items():
        torch.testing.assert_close(X @ M, 0.5 * X, msg=name)
