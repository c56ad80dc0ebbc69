"""The constructions are orthonormal with entries of one magnitude, at every width language models have."""

from __future__ import annotations

import numpy as np
import pytest

from ghostexport.errors import RecoveryError
from ghostexport.recovery.fits.hadamard import hadamard

SIZES = [1, 2, 4, 12, 20, 28, 36, 44, 60, 64, 76, 84, 108, 140, 180, 284, 576, 768, 896, 960, 1536, 1600, 2048, 2880]


@pytest.mark.parametrize("size", SIZES)
def test_orthonormal(size):
    H = hadamard(size)
    assert np.abs(H @ H.T - np.eye(size)).max() < 1e-12
    np.testing.assert_allclose(np.abs(H), size**-0.5, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("size", [3584, 4096, 4544, 5120, 5376, 6656])
def test_orthonormal_at_large_sizes(size):
    H = hadamard(size)
    rows = np.random.default_rng(0).choice(size, 40, replace=False)
    assert np.abs(H[rows] @ H.T - np.eye(size)[rows]).max() < 1e-12


@pytest.mark.parametrize("size", [0, 3, 6, 50, 92])
def test_impossible_or_unknown_sizes_are_refused(size):
    with pytest.raises(RecoveryError, match=f"hidden size {size}"):
        hadamard(size)
