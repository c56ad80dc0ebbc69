"""The cross-validation formula against explicit fits on explicit folds."""

import pytest
import torch

from ghostexport.errors import RecoveryError
from ghostexport.moments import BoundaryMoments
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.fits.least_squares import fit_affine, fit_ghost
from ghostexport.recovery.fits.solving import GRID, choose_ridge, left_out_errors, median_diagonal
from tests.unit.recovery.synthetic import Planted, least_squares


def explicit(data, fold, folds, ridge, centred):
    """Fits on the sequences of the other folds and sums the squared error over the tokens of the left-out ones."""
    sequence = torch.arange(8)[:, None].expand_as(data.mask)[data.mask]
    pre, post = data.rows(data.pre, data.post)
    left = sequence % folds == fold
    mean_x, mean_d = (v[~left].mean(0) * centred for v in (pre, post - pre))
    M = least_squares(pre[~left] - mean_x, (post - pre)[~left] - mean_d, None, ridge)
    error = (post - pre)[left] - mean_d - (pre[left] - mean_x) @ M
    return float(error.square().sum())


@pytest.mark.parametrize("centred", [False, True])
def test_the_formula_equals_explicit_folds(centred):
    data = Planted(folds=4)
    folds = data.statistics.folds
    ridges = [1e-2, 10.0, 1e4]
    for v in range(4):
        train = sum((folds[i] for i in range(4) if i != v), start=BoundaryMoments(12))
        got = left_out_errors(train, folds[v], torch.tensor(ridges).double(), centred)
        expected = [explicit(data, v, 4, ridge, centred) for ridge in ridges]
        torch.testing.assert_close(got, torch.tensor(expected).double(), rtol=1e-6, atol=0)


def test_the_choice_is_the_grid_minimum():
    folds = Planted(noise=3.0, folds=4).statistics.weighted_folds
    choice = choose_ridge(folds)
    scale = median_diagonal(sum(folds[1:], start=folds[0]))
    assert [ridge for ridge, _ in choice.errors] == pytest.approx([g * scale for g in GRID])
    assert choice.ridge == min(choice.errors, key=lambda pair: pair[1])[0]


def test_noise_gets_a_larger_ridge_than_signal():
    random = torch.Generator().manual_seed(0)
    chosen = []
    for signal in (1.0, 0.0):
        folds = []
        M = torch.randn(12, 12, generator=random).double()
        for _ in range(4):
            X = torch.randn(15, 12, generator=random).double()
            fold = BoundaryMoments(12)
            fold.add_change(X, signal * X @ M + 0.5 * torch.randn(15, 12, generator=random).double())
            folds.append(fold)
        chosen.append(choose_ridge(folds).ridge)
    assert chosen[1] > 10 * chosen[0]


def test_recipes_may_ask_for_it():
    data = Planted(folds=4)
    for fit in (fit_ghost, fit_affine):
        assert fit(data.statistics, RecoverSection(ridge="cv")).fit["ridge"] > 0
    with pytest.raises(RecoveryError, match="at least two"):
        choose_ridge(Planted(folds=1).statistics.folds)
