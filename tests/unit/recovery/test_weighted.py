"""Token-weighted least squares against a dense solve, with massive tokens that plain least squares follows."""

import numpy as np
import torch

from ghostexport.execution import Execution
from ghostexport.moments import token_weights
from ghostexport.operators import Operator
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.fits.least_squares import fit_ghost, fit_weighted
from ghostexport.recovery.held_out import figures, say_lost_tokens
from tests.unit.recovery.synthetic import Planted, least_squares


def test_it_is_the_weighted_least_squares_solution():
    data = Planted()
    pre, post = data.rows(data.pre, data.post)
    torch.testing.assert_close(token_weights(post), data.weights)
    for ridge in (1e-6, 0.5):
        operator = fit_weighted(data.statistics, RecoverSection(ridge=ridge))
        expected = least_squares(pre, post - pre, data.weights, ridge)
        np.testing.assert_allclose(operator.delta, expected, rtol=1e-5, atol=1e-6)


def test_massive_tokens_rule_the_plain_fit_only():
    """The plain fit has the smaller squared error, the weighted one by far the smaller relative error."""
    data = Planted()
    plain, weighted = (
        figures(fit(data.statistics, RecoverSection()), data.statistics) for fit in (fit_ghost, fit_weighted)
    )
    assert plain["nmse_calibration"] < weighted["nmse_calibration"]
    assert weighted["relative_error_calibration"] < 0.5 * plain["relative_error_calibration"]


def test_a_repair_that_misses_the_massive_tokens_says_so():
    """All of the change's energy missed, but most tokens' change made: the massive tokens are gone."""
    boundary, said = PrunePlan.from_spans(6, [(2, 4)]).boundaries[0], []
    for nmse, relative, change in ((0.99, 0.33, 0.9), (0.44, 0.33, 0.9), (0.99, 0.8, 0.9), (0.99, 0.33, 0.34)):
        fit = {"nmse_held_out": nmse, "relative_error_held_out": relative, "relative_change_held_out": change}
        operator = Operator(boundary, "ghost-zero", fit=fit)
        say_lost_tokens("ghost-zero", [operator], Execution(say=said.append))
    assert len(said) == 1 and "[2, 4)" in said[0] and "NMSE 0.99" in said[0]
