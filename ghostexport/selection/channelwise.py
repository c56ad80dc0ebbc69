"""``streamline-channelwise`` and ``shortgpt-channelwise``: the scores as the LinearPatch and Ghosted code has them.

Their call leaves the dimension of the cosine at its default, which on one sequence ``[1, T, C]`` is the tokens::

    score(s) = mean over sequences and channels of cos(x_s[:, k], x_{s+n}[:, k])     cosine over tokens

The largest window (n consecutive blocks), or the n blocks of largest ``score`` at n = 1, are removed. The papers
describe cosines over channels: ``streamline`` and ``shortgpt``.
"""

from __future__ import annotations

import torch

from ghostexport.calibration import CalibrationSet
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.selection.eligibility import eligible_starts
from ghostexport.selection.ranking import best_window, lowest_blocks
from ghostexport.selection.streamline import Watch, summed_cosines, unwatched


def streamline_channelwise(
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
    scores = channel_cosines(loaded, calibration, count, execution, watch)
    return best_window("streamline-channelwise", loaded.num_blocks, scores, section)


def shortgpt_channelwise(
    loaded: LoadedModel,
    calibration: CalibrationSet,
    section: SelectSection,
    execution: Execution,
    watch: Watch = unwatched,
) -> PrunePlan:
    """Removes the blocks of largest single-block score; listed as ``1 - score``, lowest first.

    Raises:
        RecipeError: too few blocks are eligible.
        CalibrationError: non-finite activations.
    """
    scores = [1 - score for score in channel_cosines(loaded, calibration, 1, execution, watch)]
    return lowest_blocks("shortgpt-channelwise", scores, section)


def channel_cosines(
    loaded: LoadedModel, calibration: CalibrationSet, count: int, execution: Execution, watch: Watch = unwatched
) -> list[float]:
    """``score(s)`` for every ``s`` in ``[0, L - count]``."""
    sums = summed_cosines(loaded, calibration, count, channel_directions, execution, watch)
    return [total / (len(calibration) * loaded.hidden_size) for total in sums]


def channel_directions(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Each channel of each sequence as a unit vector of its real tokens, ``(B, T, C)``."""
    return torch.nn.functional.normalize(x.float() * mask[..., None], dim=1)
