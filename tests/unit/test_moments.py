"""Streaming moments against dense float64 computations, with massive activations among the channels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ghostexport.errors import CalibrationError
from ghostexport.moments import BoundaryMoments, MagnitudeRatios, TokenSample, require_finite

C, N = 24, 700


@pytest.fixture
def data():
    random = np.random.default_rng(0)
    x = random.normal(size=(N, C)) * np.logspace(-2, 2, C)
    x[::100, 3] = 2500  # sink tokens
    post = x + 0.3 * x @ random.normal(size=(C, C)) / C**0.5 + random.normal(size=(N, C))
    return torch.from_numpy(x), torch.from_numpy(post), torch.from_numpy(random.uniform(0.1, 2, N))


def streamed(x, post, weights=None, step=97):
    moments = BoundaryMoments(C)
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        moments.add(x[rows], post[rows], None if weights is None else weights[rows])
    return moments


@pytest.mark.parametrize("weighted", [False, True])
def test_streaming_equals_batched(data, weighted):
    x, post, w = data
    moments = streamed(x, post, w if weighted else None)
    w = w if weighted else torch.ones(N, dtype=torch.float64)
    delta = post - x
    for got, expected in [
        (moments.gram, x.T @ torch.diag(w) @ x),
        (moments.cross, x.T @ torch.diag(w) @ delta),
        (moments.sum_x, w @ x),
        (moments.sum_delta, w @ delta),
        (moments.square_delta, (w * delta.square().sum(1)).sum()),
        (moments.weight, w.sum()),
    ]:
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-11, atol=1e-9)
    assert moments.tokens == N


def test_moments_of_a_concatenation_are_the_sum(data):
    x, post, w = data
    whole, parts = streamed(x, post, w), streamed(x[:300], post[:300], w[:300]) + streamed(x[300:], post[300:], w[300:])
    for name in ("gram", "cross", "sum_x", "sum_delta"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-11, atol=1e-9)
    assert parts.tokens == whole.tokens and parts.weight == pytest.approx(whole.weight)


def test_residual_from_moments_equals_the_residual_itself(data):
    x, post, w = data
    random = torch.Generator().manual_seed(0)
    M = torch.randn(C, C, generator=random, dtype=torch.float64) / C
    b = torch.randn(C, generator=random, dtype=torch.float64)
    moments = streamed(x, post, w)
    for matrix, bias in [(M, b), (M, None), (None, b), (None, None)]:
        error = post - x - (0 if matrix is None else x @ matrix) - (0 if bias is None else bias)
        assert moments.residual(matrix, bias) == pytest.approx(float((w * error.square().sum(1)).sum()), rel=1e-9)
    assert moments.nmse(None) == 1.0


def test_magnitude_ratios_are_means_over_sequences(data):
    x, post, _ = data
    basis = torch.linalg.qr(torch.randn(C, C, generator=torch.Generator().manual_seed(1)))[0]
    ratios = MagnitudeRatios(C, basis)
    for rows in (slice(0, 200), slice(200, N)):
        ratios.add(x[rows].float(), post[rows].float())
    z = [((part @ basis.double()).abs()) for part in (x, post)]
    pre = torch.stack([z[0][:200].mean(0), z[0][200:].mean(0)])
    after = torch.stack([z[1][:200].mean(0), z[1][200:].mean(0)])
    torch.testing.assert_close(ratios.mean_of_ratios, (after / pre).mean(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(ratios.ratio_of_means, after.sum(0) / pre.sum(0), rtol=1e-5, atol=0)


def test_token_sample_is_evenly_spread_and_bounded(data):
    x, post, _ = data
    sample = TokenSample(N, limit=100)
    for start in range(0, N, 33):
        sample.add(x[start : start + 33], post[start : start + 33])
    torch.testing.assert_close(sample.pre, x[::7].float())
    torch.testing.assert_close(sample.post, post[::7].float())


def test_token_sample_does_not_hold_on_to_the_batches():
    sample = TokenSample(1000, limit=10)
    sample.add(torch.zeros(1000, C), torch.zeros(1000, C))
    assert sum(values.untyped_storage().nbytes() for values in sample.columns) == 2 * 10 * C * 4


def test_activations_are_guarded():
    require_finite(torch.tensor([1e30]), 3)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(CalibrationError, match="before block 3 holds NaN"):
            require_finite(torch.tensor([1.0, bad]), 3)
    with pytest.raises(CalibrationError, match="reaches 40000, too near"):
        require_finite(torch.tensor([4e4], dtype=torch.float16), 3)
