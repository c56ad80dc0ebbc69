"""Errors of the stream behind every cut on held-out text: of the operators, and of the ladder of constrained maps.

The first token of a window, which carries the massive activations of an attention sink, is measured apart from the
rest: its error alone would rule every mean of squares.

The constrained ladder: how well ever freer maps of the stream could do at a cut, from moments alone.

::

    scalar      alpha I         alpha = <X_pre, X_post> / ||X_pre||^2
    diagonal    diag(d)         d_k = (X_pre' X_post)_kk / G_kk
    symmetric   W = W'          in the eigenbasis G = Q diag(l) Q':   M_ij = (Q'(B + B')Q)_ij / (l_i + l_j)
    procrustes  alpha R         U S V' = svd(X_pre' X_post), R = U V', alpha = tr S / ||X_pre||^2
    full        any W           M = G^-1 B (minimum norm where G is singular)

Each is the least-squares best of its kind on the calibration tokens. Its error on held-out tokens tells what a freer
map really buys: LinearPatch's maps are symmetric (its rotated form has C degrees of freedom), ghost's are full.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ghostexport.calibration import CalibrationSet
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel
from ghostexport.moments import BoundaryMoments
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import Boundary, PrunePlan
from ghostexport.recovery.fits.solving import solve_truncated
from ghostexport.recovery.gathering import Request, gather, stream_boundaries
from ghostexport.recovery.held_out import BoundaryErrors
from ghostexport.recovery.last_block import LastBlock


def boundary_errors(
    loaded: LoadedModel,
    plan: PrunePlan,
    sets: Mapping[str, OperatorSet],
    drawn: CalibrationSet,
    held_out: CalibrationSet,
    execution: Execution,
) -> list[dict[str, Any]]:
    """Fits the ladder on ``drawn`` and measures it and the operators on ``held_out``, on the dense model's stream.

    Returns:
        Per boundary ``{"span", "ladder": {rung: figures}, "operators": {name: figures}}``; figures are ``nmse`` and
        ``relative_error`` (mean over tokens of ``||error|| / ||x_post||``) without first tokens, and
        ``sink_relative_error`` of first tokens.
    """
    gathered = gather(loaded, plan.boundaries, drawn, Request(), execution)
    rungs = [{name: _map(s.boundary, name, M) for name, M in ladder(s.moments).items()} for s in gathered]
    operators = [{name: found.operators[b.index] for name, found in sets.items()} for b in plan.boundaries]
    meters = [{key: _Apart() for key in ({**rungs[i], **operators[i]})} for i in range(len(plan.boundaries))]
    inside = any(operator.reaches_inside for named in operators for operator in named.values())

    def add(
        index: int, sequences: range, mask: torch.Tensor, x: torch.Tensor, post: torch.Tensor, last: LastBlock | None
    ) -> None:
        for name, operator in {**rungs[index], **operators[index]}.items():
            meters[index][name].add(operator, mask, x, post, last)

    batches = held_out.batches(loaded.device)
    stream_boundaries(loaded, plan.boundaries, batches, len(held_out), add, execution, "evaluate: cuts", inside)
    return [
        {
            "span": [boundary.span.start, boundary.span.stop],
            "ladder": {name: meters[i][name].figures() for name in rungs[i]},
            "operators": {name: meters[i][name].figures() for name in operators[i]},
        }
        for i, boundary in enumerate(plan.boundaries)
    ]


class _Apart:
    """Errors of first tokens and of the others."""

    def __init__(self) -> None:
        self.sink, self.rest = BoundaryErrors(), BoundaryErrors()

    def add(
        self, operator: Operator, mask: torch.Tensor, x: torch.Tensor, post: torch.Tensor, last: LastBlock | None
    ) -> None:
        first = mask & (mask.long().cumsum(1) == 1)
        for errors, part in ((self.sink, first), (self.rest, mask & ~first)):
            errors.add(operator, x[part], post[part], None if last is None else last[part])

    def figures(self) -> dict[str, float]:
        sink, rest = self.sink.figures(), self.rest.figures()
        return {
            "nmse": rest["nmse_held_out"],
            "relative_error": rest["relative_error_held_out"],
            "sink_relative_error": sink["relative_error_held_out"],
        }


def _map(boundary: Boundary, name: str, M: torch.Tensor) -> Operator:
    return Operator(boundary, name, delta=M.cpu().numpy())


def ladder(moments: BoundaryMoments) -> dict[str, torch.Tensor]:
    """``M = W - I`` ``[C, C]`` float64 of every rung, from the most constrained to the full map."""
    identity = torch.eye(moments.channels).to(moments.gram)
    return {
        "scalar": (best_scalar(moments) - 1) * identity,
        "diagonal": torch.diag(best_diagonal(moments) - 1),
        "symmetric": best_symmetric(moments.gram, moments.cross),
        "procrustes": best_procrustes(moments) - identity,
        "full": solve_truncated(moments.gram, moments.cross)[0],
    }


def best_scalar(moments: BoundaryMoments) -> float:
    """``alpha``; 1 where the stream is zero."""
    square = float(moments.gram.trace())
    return 1 + float(moments.cross.trace()) / square if square else 1.0


def best_diagonal(moments: BoundaryMoments) -> torch.Tensor:
    """``d`` ``[C]``; 1 where a channel is zero."""
    square = moments.gram.diagonal()
    change = moments.cross.diagonal() / square
    return 1 + torch.where(square > 0, change, torch.zeros_like(change))


def best_symmetric(gram: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
    """``argmin ||X M - Delta||`` over ``M = M'``: ``G M + M G = B + B'``, solved in the eigenbasis of ``G``.

    Directions that ``G`` does not have (sums of eigenvalues at rounding level) stay as they are.
    """
    values, Q = torch.linalg.eigh(gram)
    right = Q.T @ (cross + cross.T) @ Q
    sums = values[:, None] + values[None]
    floor = torch.finfo(gram.dtype).eps * len(gram) * values[-1]
    solution = Q @ torch.where(sums > floor, right / sums, torch.zeros_like(right)) @ Q.T
    symmetric: torch.Tensor = (solution + solution.T) / 2
    return symmetric


def best_procrustes(moments: BoundaryMoments) -> torch.Tensor:
    """``alpha R`` with ``R`` orthogonal."""
    U, S, Vt = torch.linalg.svd(moments.gram + moments.cross)
    scaled: torch.Tensor = float(S.sum() / moments.gram.trace()) * (U @ Vt)
    return scaled
