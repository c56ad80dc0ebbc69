"""``none``: the cut without repair, the baseline."""

from __future__ import annotations

from ghostexport.operators import Operator
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.passes import BoundaryStatistics


def fit_none(statistics: BoundaryStatistics, section: RecoverSection) -> Operator:
    """An operator that does nothing; its figures are those of the bare cut."""
    return Operator(statistics.boundary, "none")
