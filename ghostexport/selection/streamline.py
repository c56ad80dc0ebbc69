"""``streamline``: remove the run of blocks that turns the residual stream least (LLM-Streamline, 2403.19135).

::

    score(s) = mean over tokens of 0.5 + 0.5 cos(x_s, x_{s+n})       cosine over channels; the largest is removed

``x_L``, the end of the last window, is read before the final norm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, read_residuals
from ghostexport.moments import require_finite
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.selection.eligibility import eligible_starts
from ghostexport.selection.ranking import best_window

#: From a residual value ``(B, T, C)`` and its mask ``(B, T)`` to unit vectors, two of whose products give cosines.
Directions = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: Looks on while a criterion reads every residual value: called as ``watch(batch, l, x_l)``, in depth order.
Watch = Callable[[Batch, int, torch.Tensor], None]


def unwatched(batch: Batch, point: int, x: torch.Tensor) -> None:
    """Nobody looks on."""


def streamline(
    loaded: LoadedModel,
    calibration: CalibrationSet,
    section: SelectSection,
    execution: Execution,
    watch: Watch = unwatched,
) -> PrunePlan:
    """Scores all windows of ``section.prune`` blocks in one pass that holds ``n + 1`` residual values of a batch.

    Raises:
        RecipeError: the protected blocks leave no window.
        CalibrationError: non-finite activations.
    """
    count = section.prune or 0
    eligible_starts(loaded.num_blocks, count, section)
    sums = summed_cosines(loaded, calibration, count, token_directions, execution, watch)
    scores = [0.5 + 0.5 * total / calibration.num_tokens for total in sums]
    return best_window("streamline", loaded.num_blocks, scores, section)


def token_directions(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Each real token as a unit vector of channels, ``[n, C]``."""
    return torch.nn.functional.normalize(x[mask].float(), dim=1)


def summed_cosines(
    loaded: LoadedModel,
    calibration: CalibrationSet,
    count: int,
    directions: Directions,
    execution: Execution,
    watch: Watch = unwatched,
) -> list[float]:
    """Sum over the calibration set of ``cos(x_s, x_{s + count})``, for every ``s`` in ``[0, L - count]``, in float64.

    One pass; ``count + 1`` residual values of one batch are held.

    Raises:
        CalibrationError: non-finite activations.
    """
    sums = torch.zeros(loaded.num_blocks - count + 1, dtype=torch.float64)
    recent: deque[torch.Tensor] = deque(maxlen=count + 1)
    for batch in calibration.batches(loaded.device):
        recent.clear()

        def visit(point: int, x: torch.Tensor, batch: Batch = batch) -> None:
            require_finite(x[batch.mask], point)
            recent.append(directions(x, batch.mask))
            if point >= count:
                sums[point - count] += (recent[0] * recent[-1]).sum(dtype=torch.float64).cpu()
            watch(batch, point, x)

        read_residuals(loaded.model, range(loaded.num_blocks + 1), visit, batch.input_ids, batch.attention_mask)
        execution.progress("select", batch.sequences.stop, len(calibration))
    return [float(total) for total in sums]
