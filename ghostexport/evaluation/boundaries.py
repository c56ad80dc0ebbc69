"""Errors of the stream behind every cut on held-out text: of the operators, and of the ladder of constrained maps.

The first token of a window, which carries the massive activations of an attention sink, is measured apart from the
rest: its error alone would rule every mean of squares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ghostexport.calibration import CalibrationSet
from ghostexport.evaluation.ladder import ladder
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import Boundary, PrunePlan
from ghostexport.recovery.last_block import LastBlock
from ghostexport.recovery.passes import BoundaryErrors, Request, gather, reaches_inside, stream_boundaries


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
    statistics = gather(loaded, plan.boundaries, drawn, Request(), execution)
    rungs = [{name: _map(s.boundary, name, M) for name, M in ladder(s.moments).items()} for s in statistics]
    operators = [{name: found.operators[b.index] for name, found in sets.items()} for b in plan.boundaries]
    meters = [{key: _Apart() for key in ({**rungs[i], **operators[i]})} for i in range(len(plan.boundaries))]
    inside = any(reaches_inside(operator) for named in operators for operator in named.values())

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
