"""Judged changes of a weight: learnt where they carry over to other sequences, as strongly as those allow."""

import pytest
import torch

from ghostexport.errors import RecoveryError
from ghostexport.moments import BoundaryMoments
from ghostexport.recovery.refit.judging import RIDGES, choose_change, surely_less
from tests.unit.recovery.synthetic import least_squares


def test_judges_refuse_what_does_not_carry_over():
    """A relation that holds in the fitting sequences only is not learnt; one that holds everywhere is."""
    random = torch.Generator().manual_seed(0)
    X = [torch.randn(40, 12, generator=random).double() for _ in range(2)]
    D = torch.randn(12, 12, generator=random).double()
    noise = [torch.randn(40, 12, generator=random).double() for _ in range(2)]
    fitting, judging = BoundaryMoments(12), BoundaryMoments(12)
    fitting.add_change(X[0], X[0] @ D)
    judging.add_change(X[1], noise[1])
    assert choose_change(fitting, judging).change is None
    judging = BoundaryMoments(12)
    judging.add_change(X[1], X[1] @ D)
    choice = choose_change(fitting, judging)
    assert choice.ridge == RIDGES[0] and choice.error < 1e-3
    torch.testing.assert_close(choice.change, D, rtol=0.01, atol=0.01)


def test_noise_gets_a_large_ridge_and_the_winner_is_solved_on_all():
    random = torch.Generator().manual_seed(1)
    D = 0.3 * torch.randn(12, 5, generator=random).double()
    X = [torch.randn(30, 12, generator=random).double() for _ in range(2)]
    Y = [x @ D + 2 * torch.randn(30, 5, generator=random).double() for x in X]
    folds = [BoundaryMoments(5, regressors=12) for _ in range(2)]
    for fold, x, y in zip(folds, X, Y, strict=True):
        fold.add_change(x, y)
    choice = choose_change(*folds)
    assert choice.ridge > RIDGES[0] and choice.error < 1
    scale = float((folds[0] + folds[1]).gram.diagonal().median())
    expected = least_squares(torch.cat(X), torch.cat(Y), None, choice.ridge * scale)
    torch.testing.assert_close(choice.change, expected)
    scale = float(folds[0].gram.diagonal().median())
    torch.testing.assert_close(choice.fitted, least_squares(X[0], Y[0], None, choice.ridge * scale))


def test_chance_is_no_fall():
    """Twice the standard error, by hand: falls of 3, 5, 4 are 4 +- 0.58; falls of -1, 5, 2 are 2 +- 1.73."""
    assert surely_less([7, 5, 6], [10, 10, 10])
    assert not surely_less([11, 5, 8], [10, 10, 10])
    assert not surely_less([13, 15, 14], [10, 10, 10])
    assert not surely_less([10, 10], [10, 10])
    assert surely_less([9.9], [10])


def test_nobody_to_judge_is_an_error():
    fold = BoundaryMoments(12)
    fold.add_change(torch.eye(12).double(), torch.eye(12).double())
    with pytest.raises(RecoveryError, match="at least 4 calibration sequences"):
        choose_change(fold, BoundaryMoments(12))
