"""Plans of several runs. ``--statistics sequential``: every cut is fitted behind those already made and repaired.

::

    cut k:   M_k = argmin ||x^_s M - (x_e - x^_s)||^2       x^: stream of the model cut and repaired before s
                                                            x:  stream of the dense model

The first cut is fitted as always, so a plan of one run is not changed. Each later cut takes one pass of both models for
each operator, because the repaired stream is the operator's own. Held-out figures are measured on that stream too.

``--per-block``, as in the published code: the product of one map per removed block::

    run [s, e):   y = x (I + M_s) (I + M_{s+1}) ... (I + M_{e-1})        M_p fitted on x_p -> x_{p+1} of the dense model
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.composing import product
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, Shelf, patch, read_streams
from ghostexport.moments import require_finite
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import BlockSpan, Boundary, PrunePlan
from ghostexport.recovery.held_out import BoundaryErrors
from ghostexport.recovery.last_block import LastBlock, tapped

#: One batch across one boundary: ``x^_s``, ``x_e`` ``(B, T, C)`` and the inside of the last kept block.
Crossing = tuple[Batch, torch.Tensor, torch.Tensor, LastBlock | None]

#: ``fit(boundary, crossings)``: the operator of one boundary.
Fit = Callable[[Boundary, Iterator[Crossing]], Operator]


def fit_sequential(
    loaded: LoadedModel,
    plan: PrunePlan,
    calibration: CalibrationSet,
    held_out: CalibrationSet,
    fit: Fit,
    inside: bool,
    execution: Execution,
) -> tuple[Operator, ...]:
    """Fits one kind of operator at every boundary, in depth order.

    Args:
        fit: makes the operator of one boundary from its crossings.
        inside: it needs the inside of the last kept block.

    Raises:
        CalibrationError: non-finite activations.
        RecoveryError: a fit is singular, or the operator does not apply.
    """
    done: list[Operator] = []
    for boundary in plan.boundaries:
        prefix = repaired_prefix(loaded, plan, done)
        operator = fit(boundary, crossings(loaded, prefix, boundary, calibration, inside, execution, "recover"))
        errors = BoundaryErrors()
        for batch, x, post, last in crossings(loaded, prefix, boundary, held_out, inside, execution, "held-out"):
            mask = batch.mask
            errors.add(operator, x[mask], post[mask], None if last is None else last[mask])
        done.append(replace(operator, fit={**operator.fit, **errors.figures()}))
    return tuple(done)


def repaired_prefix(loaded: LoadedModel, plan: PrunePlan, done: list[Operator]) -> LoadedModel:
    """The model with the first ``len(done)`` cuts made and repaired; block indices behind them move forward."""
    if not done:
        return loaded
    prefix = PrunePlan(plan.num_blocks, plan.removed[: len(done)])
    return patch(loaded, prefix, OperatorSet(done[0].kind, tuple(done), prefix))


def crossings(
    loaded: LoadedModel,
    prefix: LoadedModel,
    boundary: Boundary,
    tokens: CalibrationSet,
    inside: bool,
    execution: Execution,
    task: str,
) -> Iterator[Crossing]:
    """Runs both models over the tokens."""
    blocks = [boundary.position - 1] if inside and boundary.position else []
    shelf, quiet = Shelf(), replace(execution, progress=lambda *_: None)
    found = list(tokens.batches(loaded.device))

    def keep_both(batch: Batch, point: int, x: torch.Tensor) -> None:
        keep(batch, point, x, "before")
        if inner := last.get(point - 1):
            inner.put(shelf, batch.sequences.start)

    def keep(batch: Batch, point: int, x: torch.Tensor, name: str = "after") -> None:
        require_finite(x[batch.mask], point)
        shelf.put((batch.sequences.start, name), x)

    with tapped(prefix, blocks, "This operator") as last:
        for batches in [found] if loaded.walked else [[batch] for batch in found]:
            read_streams(prefix, batches, [boundary.position], keep_both, quiet, task, len(tokens))
            read_streams(loaded, batches, [boundary.span.stop], keep, quiet, task, len(tokens))
            for batch in batches:
                first, inner = batch.sequences.start, last.get(boundary.position - 1)
                inner = None if inner is None else inner.taken(shelf, first)
                yield batch, shelf.take((first, "before")), shelf.take((first, "after")), inner
                execution.progress(f"{task}: cut {boundary.index + 1}", batch.sequences.stop, len(tokens))


def single_blocks(plan: PrunePlan) -> tuple[Boundary, ...]:
    """One boundary per removed block, in depth order; ``index`` counts them, ``position`` is that of their run."""
    blocks = ((b, block) for b in plan.boundaries for block in range(b.span.start, b.span.stop))
    return tuple(
        Boundary(index, BlockSpan(block, block + 1), boundary.position)
        for index, (boundary, block) in enumerate(blocks)
    )


def multiplied(plan: PrunePlan, singles: Sequence[Operator]) -> list[Operator]:
    """One operator per run from one per removed block.

    Raises:
        RecoveryError: as :func:`ghostexport.operators.product`.
    """
    return [product(b, [o for o in singles if o.boundary.span.start in b.span]) for b in plan.boundaries]
