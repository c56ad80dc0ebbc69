"""``streamline``: remove the run of blocks that turns the residual stream least (LLM-Streamline, 2403.19135).

::

    score(s) = mean over tokens of 0.5 + 0.5 cos(x_s, x_{s+n})       cosine over channels; the largest is removed

``x_L``, the end of the last window, is read before the final norm.
"""

from __future__ import annotations

from collections import deque

import torch

from ghostexport.calibration import CalibrationSet
from ghostexport.models import LoadedModel, read_residuals
from ghostexport.moments import require_finite
from ghostexport.plan import PrunePlan
from ghostexport.recipe import Execution, SelectSection
from ghostexport.selection.eligibility import eligible_starts


def streamline(
    loaded: LoadedModel, calibration: CalibrationSet, section: SelectSection, execution: Execution
) -> PrunePlan:
    """Scores all windows of ``section.prune`` blocks in one pass that holds ``n + 1`` residual values of a batch.

    Raises:
        RecipeError: the protected blocks leave no window.
        CalibrationError: non-finite activations.
    """
    count = section.prune or 0
    starts = eligible_starts(loaded.num_blocks, count, section)
    scores = window_scores(loaded, calibration, count, execution)
    best = max(starts, key=lambda start: (scores[start], -start))
    return PrunePlan.from_spans(
        loaded.num_blocks,
        [(best, best + count)],
        "streamline",
        {"windows": [[start, start + count, scores[start]] for start in starts], "best": scores[best]},
    )


def window_scores(loaded: LoadedModel, calibration: CalibrationSet, count: int, execution: Execution) -> list[float]:
    """``score(s)`` for every ``s`` in ``[0, L - count]``."""
    sums = torch.zeros(loaded.num_blocks - count + 1, dtype=torch.float64)
    recent: deque[torch.Tensor] = deque(maxlen=count + 1)

    for batch in calibration.batches(loaded.device):
        mask = batch.mask
        recent.clear()

        def visit(point: int, x: torch.Tensor, mask: torch.Tensor = mask) -> None:
            tokens = x[mask]  # [n, C]
            require_finite(tokens, point)
            recent.append(torch.nn.functional.normalize(tokens.float(), dim=1))
            if point >= count:
                cosine = (recent[0] * recent[-1]).sum(1, dtype=torch.float64)
                sums[point - count] += (0.5 + 0.5 * cosine).sum().cpu()

        read_residuals(loaded.model, range(loaded.num_blocks + 1), visit, batch.input_ids, batch.attention_mask)
        execution.progress("select", batch.sequences.stop, len(calibration))
    return [float(score) for score in sums / calibration.num_tokens]
