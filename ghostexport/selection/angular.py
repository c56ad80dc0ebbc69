"""``angular``: remove the run of blocks across which the last token turns least (Gromov et al., 2403.17887).

::

    d(s) = mean over sequences of arccos(cos(x_s[last], x_{s+n}[last])) / pi       the smallest is removed

``last`` is the last real token of a sequence. Block 0 is protected: the published code compares the *outputs* of
blocks l and l + n, so its windows begin at block 1. ``x_L`` is read before the final norm.
"""

from __future__ import annotations

import math
from collections import deque

import torch

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, read_residuals
from ghostexport.moments import require_finite
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.selection.eligibility import eligible_starts
from ghostexport.selection.ranking import best_window
from ghostexport.selection.streamline import Watch, unwatched


def angular(
    loaded: LoadedModel,
    calibration: CalibrationSet,
    section: SelectSection,
    execution: Execution,
    watch: Watch = unwatched,
) -> PrunePlan:
    """Scores all windows of ``section.prune`` blocks in one pass.

    Raises:
        RecipeError: the protected blocks leave no window.
        CalibrationError: non-finite activations.
    """
    count = section.prune or 0
    eligible_starts(loaded.num_blocks, count, section)
    scores = angular_distances(loaded, calibration, count, execution, watch)
    return best_window("angular", loaded.num_blocks, scores, section, lowest=True)


def angular_distances(
    loaded: LoadedModel, calibration: CalibrationSet, count: int, execution: Execution, watch: Watch = unwatched
) -> list[float]:
    """``d(s)`` for every ``s`` in ``[0, L - count]``."""
    sums = [0.0] * (loaded.num_blocks - count + 1)
    recent: deque[torch.Tensor] = deque(maxlen=count + 1)
    for batch in calibration.batches(loaded.device):
        rows = torch.arange(len(batch.mask), device=batch.mask.device)
        last = batch.mask.long().cumsum(1).argmax(1)  # first position at which all real tokens are counted
        recent.clear()

        def visit(
            point: int, x: torch.Tensor, batch: Batch = batch, rows: torch.Tensor = rows, last: torch.Tensor = last
        ) -> None:
            token = x[rows, last]  # (B, C)
            require_finite(token, point)
            recent.append(torch.nn.functional.normalize(token.double(), dim=1))
            if point >= count:
                cosine = (recent[0] * recent[-1]).sum(1).clamp(-1, 1)
                sums[point - count] += float(cosine.arccos().sum()) / math.pi
            watch(batch, point, x)

        read_residuals(loaded.model, range(loaded.num_blocks + 1), visit, batch.input_ids, batch.attention_mask)
        execution.progress("select", batch.sequences.stop, len(calibration))
    return [total / len(calibration) for total in sums]
