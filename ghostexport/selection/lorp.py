"""``lorp``: group the blocks by the likeness of their inputs and thin out every group (LoRP, 2605.27786).

::

    S_ij = mean over tokens of cos(x_i, x_j)       cosine over channels; x_i: input of block i
    RLS  = -log2(mean over i < j of S_ij)          K = 2 groups where RLS >= 1, 3 where RLS >= 0.7, else 4

Groups come from spectral clustering of ``(S + 1) / 2`` (seed 0). In each group the blocks are ranked by their mean
likeness to the others of it. First every group, in depth order, gives its first eligible block; then, again and again,
the group whose members left are most alike (mean pairwise ``S``) gives its next one. One-shot, one pass; the first and
the last block are protected by default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ghostexport.calibration import CalibrationSet
from ghostexport.errors import RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, read_residuals
from ghostexport.moments import require_finite
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.selection.eligibility import eligible_blocks, require_eligible
from ghostexport.selection.ranking import RUNNERS_UP

Similarity = NDArray[np.float64]


def lorp(loaded: LoadedModel, calibration: CalibrationSet, section: SelectSection, execution: Execution) -> PrunePlan:
    """Chooses ``section.prune`` blocks.

    Raises:
        RecipeError: too few blocks are eligible.
        CalibrationError: non-finite activations.
        RuntimeUnavailableError: scikit-learn, which clusters, is missing.
    """
    num_blocks, count = loaded.num_blocks, section.prune or 0
    eligible = eligible_blocks(num_blocks, section)
    require_eligible(eligible, num_blocks, section)
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
    """``S`` ``[L, L]`` in one pass, which holds the ``L`` residual values of one batch."""
    L = loaded.num_blocks
    total = torch.zeros(L, L, dtype=torch.float64)
    for batch in calibration.batches(loaded.device):
        mask = batch.mask
        directions: list[torch.Tensor] = []

        def visit(
            point: int, x: torch.Tensor, mask: torch.Tensor = mask, directions: list[torch.Tensor] = directions
        ) -> None:
            require_finite(x[mask], point)
            directions.append(torch.nn.functional.normalize(x[mask].float(), dim=1).flatten())

        read_residuals(loaded.model, range(L), visit, batch.input_ids, batch.attention_mask)
        rows = torch.stack(directions)  # [L, n C]
        total += (rows @ rows.T).double().cpu()
        execution.progress("select", batch.sequences.stop, len(calibration))
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
