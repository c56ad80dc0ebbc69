"""How much blocks turn the residual stream: one pass over ``x_0`` to ``x_L``, which is read before the final norm.

::

    token_similarity     mean over tokens of 0.5 + 0.5 cos(x_s, x_{s+n})       LLM-Streamline, 2403.19135
    token_influence      mean over tokens of 1 - cos(x_s, x_{s+n})             ShortGPT, 2403.03853, at n = 1
    last_token_angle     mean over sequences of arccos(cos(x_s[last], x_{s+n}[last])) / pi     Gromov, 2403.17887
    channel_similarity   mean over sequences and channels of cos(x_s[:, k], x_{s+n}[:, k])     cosine over tokens
    channel_influence    1 - channel_similarity

Cosines are over channels, but for the last two: those are the scores of ``streamline`` and ``shortgpt`` as the
LinearPatch and Ghosted code has them, whose call leaves the dimension of the cosine at its default, which on one
sequence ``[1, T, C]`` is the tokens. ``last`` is the last real token of a sequence; ``angular`` protects block 0
because the published code compares the *outputs* of blocks l and l + n, so its runs begin at block 1.

``lorp`` groups the blocks by the likeness of their inputs and thins out every group (LoRP, 2605.27786)::

    S_ij = mean over tokens of cos(x_i, x_j)       x_i: input of block i
    RLS  = -log2(mean over i < j of S_ij)          K = 2 groups where RLS >= 1, 3 where RLS >= 0.7, else 4

Groups come from spectral clustering of ``(S + 1) / 2`` (seed 0). In each group the blocks are ranked by their mean
likeness to the others of it. First every group, in depth order, gives its first eligible block; then, again and again,
the group whose members left are most alike (mean pairwise ``S``) gives its next one. One-shot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.errors import RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, Shelf, read_streams
from ghostexport.moments import require_finite
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.selection.criteria import RUNNERS_UP, eligible_blocks

#: From a residual value ``(B, T, C)`` and its mask ``(B, T)`` to unit vectors.
Units = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: From the unit vectors at both ends of a run to the sum of what is measured, float64.
Measure = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: Looks on while a criterion reads every residual value: called as ``watch(batch, l, x_l)``, in depth order.
Watch = Callable[[Batch, int, torch.Tensor], None]

Similarity = NDArray[np.float64]


def unwatched(batch: Batch, point: int, x: torch.Tensor) -> None:
    """Nobody looks on."""


def token_similarity(
    loaded: LoadedModel, calibration: CalibrationSet, execution: Execution, count: int = 1, watch: Watch = unwatched
) -> list[float]:
    """Of the runs ``[s, s + count)``, for every ``s`` in ``[0, L - count]``. Raises CalibrationError: not finite."""
    sums = summed(loaded, calibration, execution, count, watch, token_units, cosines)
    return [0.5 + 0.5 * total / calibration.num_tokens for total in sums]


def token_influence(
    loaded: LoadedModel, calibration: CalibrationSet, execution: Execution, count: int = 1, watch: Watch = unwatched
) -> list[float]:
    """As :func:`token_similarity`."""
    sums = summed(loaded, calibration, execution, count, watch, token_units, cosines)
    return [1 - total / calibration.num_tokens for total in sums]


def channel_similarity(
    loaded: LoadedModel, calibration: CalibrationSet, execution: Execution, count: int = 1, watch: Watch = unwatched
) -> list[float]:
    """As :func:`token_similarity`."""
    sums = summed(loaded, calibration, execution, count, watch, channel_units, cosines)
    return [total / (len(calibration) * loaded.hidden_size) for total in sums]


def channel_influence(
    loaded: LoadedModel, calibration: CalibrationSet, execution: Execution, count: int = 1, watch: Watch = unwatched
) -> list[float]:
    """As :func:`token_similarity`."""
    return [1 - score for score in channel_similarity(loaded, calibration, execution, count, watch)]


def last_token_angle(
    loaded: LoadedModel, calibration: CalibrationSet, execution: Execution, count: int = 1, watch: Watch = unwatched
) -> list[float]:
    """As :func:`token_similarity`."""
    sums = summed(loaded, calibration, execution, count, watch, last_token_units, angles)
    return [total / len(calibration) for total in sums]


def token_units(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Each real token as a unit vector of channels, ``[n, C]``."""
    return torch.nn.functional.normalize(x[mask].float(), dim=1)


def channel_units(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Each channel of each sequence as a unit vector of its real tokens, ``(B, T, C)``."""
    return torch.nn.functional.normalize(x.float() * mask[..., None], dim=1)


def last_token_units(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Each sequence's last real token as a unit vector of channels, ``[B, C]`` float64."""
    last = mask.long().cumsum(1).argmax(1)  # first position at which all real tokens are counted
    return torch.nn.functional.normalize(x[torch.arange(len(mask), device=mask.device), last].double(), dim=1)


def cosines(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return (before * after).sum(dtype=torch.float64)


def angles(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """In half turns."""
    return (before * after).sum(1).clamp(-1, 1).arccos().sum() / math.pi


def summed(
    loaded: LoadedModel,
    calibration: CalibrationSet,
    execution: Execution,
    count: int,
    watch: Watch,
    units: Units,
    measure: Measure,
) -> list[float]:
    """Sum over the calibration set of ``measure(x_s, x_{s + count})``, for every ``s`` in ``[0, L - count]``.

    One pass; ``count + 1`` residual values of a batch are held.

    Raises:
        CalibrationError: non-finite activations.
    """
    sums = torch.zeros(loaded.num_blocks - count + 1, dtype=torch.float64)
    recent, points = Shelf(), range(loaded.num_blocks + 1)

    def visit(batch: Batch, point: int, x: torch.Tensor) -> None:
        require_finite(x[batch.mask], point)
        if point >= count:
            before = recent.take((batch.sequences.start, point - count))
            sums[point - count] += measure(units(before, batch.mask), units(x, batch.mask)).cpu()
        if point + count in points:
            recent.put((batch.sequences.start, point), x)
        watch(batch, point, x)

    read_streams(loaded, calibration.batches(loaded.device), points, visit, execution, "select", len(calibration))
    return [float(total) for total in sums]


def lorp(loaded: LoadedModel, calibration: CalibrationSet, section: SelectSection, execution: Execution) -> PrunePlan:
    """Chooses ``section.prune`` blocks.

    Raises:
        RecipeError: too few blocks are eligible.
        CalibrationError: non-finite activations.
        RuntimeUnavailableError: scikit-learn, which clusters, is missing.
    """
    num_blocks, count = loaded.num_blocks, section.prune or 0
    eligible = eligible_blocks(num_blocks, section)
    S = similarities(loaded, calibration, execution)
    spread = layer_spread(S)
    clusters = cluster(S, min(number_of_clusters(spread), num_blocks))
    order = removal_order(S, clusters, set(eligible))
    likeness = [float(np.delete(S[block], block).mean()) for block in range(num_blocks)]
    scores = {
        "mean similarity": likeness,
        "rls": spread,
        "clusters": {str(number): members for number, members in enumerate(clusters)},
        "ranking": {"removed": order[:count], "runners_up": order[count : count + RUNNERS_UP]},
    }
    return PrunePlan.from_blocks(num_blocks, order[:count], "lorp", scores)


def similarities(loaded: LoadedModel, calibration: CalibrationSet, execution: Execution) -> Similarity:
    """``S`` ``[L, L]`` in one pass, which holds the ``L`` residual values of a batch."""
    L = loaded.num_blocks
    total = torch.zeros(L, L, dtype=torch.float64)
    shelf = Shelf()

    def visit(batch: Batch, point: int, x: torch.Tensor) -> None:
        require_finite(x[batch.mask], point)
        shelf.put((batch.sequences.start, point), x)
        if point == L - 1:
            held = (shelf.take((batch.sequences.start, before)) for before in range(L))
            rows = torch.stack([token_units(value, batch.mask).flatten() for value in held])  # [L, n C]
            total.add_((rows @ rows.T).double().cpu())

    read_streams(loaded, calibration.batches(loaded.device), range(L), visit, execution, "select", len(calibration))
    return (total / calibration.num_tokens).numpy()


def layer_spread(S: Similarity) -> float:
    """``RLS``; infinite where the mean likeness is not positive."""
    mean = float(S[np.triu_indices(len(S), 1)].mean())
    return -math.log2(mean) if mean > 0 else math.inf


def number_of_clusters(spread: float) -> int:
    """``K`` by the paper's thresholds."""
    if spread >= 1.0:
        return 2
    return 3 if spread >= 0.7 else 4


def cluster(S: Similarity, count: int) -> list[list[int]]:
    """Groups of block indices, in depth order of their first members.

    Raises:
        RuntimeUnavailableError: scikit-learn is missing.
    """
    try:
        from sklearn.cluster import SpectralClustering
    except ImportError as error:
        raise RuntimeUnavailableError("lorp needs scikit-learn.", "pip install 'ghostexport[eval]'") from error
    labels = SpectralClustering(count, affinity="precomputed", random_state=0).fit_predict((S + 1) / 2)
    groups = [np.flatnonzero(labels == label).tolist() for label in sorted(set(labels.tolist()))]
    return sorted(groups, key=lambda members: members[0])


def removal_order(S: Similarity, clusters: Sequence[Sequence[int]], eligible: set[int]) -> list[int]:
    """All eligible blocks in the order in which they go."""
    left = [list(members) for members in clusters]
    queues = [
        sorted((b for b in members if b in eligible), key=lambda b, members=members: (-_likeness(S, b, members), b))  # type: ignore[misc]
        for members in clusters
    ]
    order: list[int] = []

    def take(group: int) -> None:
        block = queues[group].pop(0)
        left[group].remove(block)
        order.append(block)

    for group in range(len(clusters)):
        if queues[group]:
            take(group)
    while any(queues):
        take(max((g for g in range(len(clusters)) if queues[g]), key=lambda g: (_pairwise(S, left[g]), -g)))
    return order


def _likeness(S: Similarity, block: int, members: Sequence[int]) -> float:
    others = [m for m in members if m != block]
    return float(S[block, others].mean()) if others else -math.inf


def _pairwise(S: Similarity, members: Sequence[int]) -> float:
    if len(members) < 2:
        return -math.inf
    part = S[np.ix_(members, members)]
    return float(part[np.triu_indices(len(members), 1)].mean())
