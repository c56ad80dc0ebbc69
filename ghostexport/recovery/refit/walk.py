"""``+refit``: after the cut is repaired, the blocks behind it are taught to go on with what they now receive.

Every kept block behind the cut runs on the *repaired* model's stream; what it adds is re-solved so that the stream
returns to the dense model's, in depth order and without any new node (token weights as in ghost-weighted)::

    c = input of o_proj        O = argmin sum_t w_t ||x^_l   + c O - x_mid,l||^2 + lambda m ||O - O0||^2
    h = input of down_proj     V = argmin sum_t w_t ||x^_mid + h V - x_{l+1}||^2 + lambda m ||V - V0||^2
                                                                                   m = median of diag(Gram)
    x^_{l+1} = x^_mid + h V

``lambda`` is judged on every fourth calibration sequence. A weight is left alone where the change does not bring those
sequences' predictions nearer to the dense model's, by more than chance (``judging``). Every boundary is fitted on
the repaired stream too, so several cuts are fitted one behind the other.

Where a norm stands behind a projection, its gain is re-solved, then the projection (``parts``). What adds no result of
either, such as a mixture of experts, stays as it is.

``upstream`` blocks before a cut of n blocks are refitted likewise: k of them imitate k + n dense blocks.

Cost per block: about 3 1/4 runs of the block over the calibration set (4 where attention and MLP are parallel), sums
of ``2 N (C_ctx^2 + I^2 + C_ctx C + I C)`` operations and, for each weight that errs less, one or two passes of at most
8 sequences through the rest of the model, and one more for the first behind a cut; memory about ``56 I^2`` bytes (two
folds and the solve in float64, measured at I = 4 C) and ``9 T V`` bytes (predictions kept, and those of one sequence
compared) beside one batch; ``2 N C`` numbers on disk.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.errors import RecoveryError
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel
from ghostexport.models.calls import Call, block_calls
from ghostexport.moments import BoundaryMoments
from ghostexport.operators import Operator, WeightFold
from ghostexport.plan import Boundary, PrunePlan
from ghostexport.recovery.gathering import Gathered
from ghostexport.recovery.last_block import LastBlock
from ghostexport.recovery.refit.judging import JUDGES, Predictions, choose_change, surely_less
from ghostexport.recovery.refit.parts import ATTENTION, Part, SingleBlock, anatomies, refittable
from ghostexport.recovery.refit.streams import Streams, fill, open_streams

#: Judging sequences from which on chance is told from gain about as often as the standard error promises.
FEW = 4

#: ``fit(boundary, feed)``: calls ``feed(gathered)`` to fill what the fit reads, and returns the operator.
FitBoundary = Callable[[Boundary, Callable[[Gathered], None]], Operator]


def refit(
    loaded: LoadedModel,
    plan: PrunePlan,
    calibration: CalibrationSet,
    fit: FitBoundary,
    inside: bool,
    upstream: int,
    execution: Execution,
) -> tuple[Operator, ...]:
    """Fits every boundary's operator and the blocks around it, in depth order.

    Requires: :func:`require_refittable` was asked.

    Args:
        fit: makes the operator of one boundary.
        inside: the operator replaces the down-projection of the last kept block, whose inside ``fit`` is fed with.
        upstream: kept blocks before each cut that are refitted too.

    Returns:
        One operator per boundary; ``folds`` hold its own and the refitted weights, ``fit["refit"]`` what was judged.

    Raises:
        RecoveryError: a singular solve, or a scale, which is folded into weights that a refit replaces.
    """
    todo = steps(plan, inside, upstream)
    megabytes = calibration.tokens.size * loaded.hidden_size * next(loaded.model.parameters()).itemsize / 1e6
    execution.say(f"refit: {len(todo)} blocks, {calibration.num_tokens} tokens, 2 x {megabytes:.0f} MB on disk")
    if len(calibration) < FEW * JUDGES:
        execution.say(
            f"refit: {len(calibration) // JUDGES} of {len(calibration)} sequences judge, too few to tell a gain from "
            f"chance. Use {FEW * JUDGES} --sequences or more, or compare with the same operator without +refit."
        )
    with open_streams(loaded, calibration) as streams:
        operators = _Walk(loaded, calibration, streams, execution).through(plan, todo, fit, inside)
    looked_at = [entry for operator in operators for entry in operator.fit["refit"]]
    changed = sum(entry["ridge"] is not None for entry in looked_at)
    if looked_at:
        execution.say(
            f"refit: {changed} of {len(looked_at)} weights changed, the rest would not gain on judging sequences"
        )
    else:
        execution.say("refit: nothing to refit behind the last cut (refit_upstream takes blocks before it)")
    return operators


def require_refittable(loaded: LoadedModel, plan: PrunePlan, upstream: int, name: str) -> None:
    """Refuses early what the refit of an operator cannot do.

    Raises:
        RecoveryError: it could change nothing in any block it goes through.
        ModelLayoutError: parts of the model are on disk.
    """
    loaded.require_whole("a refit runs copies of its blocks", "Leave +refit out, or use a device that holds the model.")
    blocks = [step.block for step in steps(plan, False, upstream)]
    if blocks and not any(map(refittable, anatomies(loaded, blocks).values())):
        raise RecoveryError(
            f"{name} does not apply to {type(loaded.model).__name__}: what the blocks behind the cut add to the stream "
            "is no result of a projection or a norm.",
            "Use an operator that acts at the boundary, without +refit, such as ghost-weighted; best finds one.",
        )


@dataclass(frozen=True)
class _Step:
    """The refit of a kept block.

    Attributes:
        block: its index.
        teacher: the dense block that it imitates.
        boundary: the one its new weights belong to.
        whole: whether what its MLP adds is refitted too; not where the operator replaces it.
    """

    block: int
    teacher: int
    boundary: int
    whole: bool = True


def steps(plan: PrunePlan, inside: bool, upstream: int) -> list[_Step]:
    """The refit of every kept block from the first cut's upstream blocks on, in depth order."""
    found = []
    boundaries = plan.boundaries
    for index, boundary in enumerate(boundaries):
        start, stop = boundary.span.start, boundary.span.stop
        before = boundaries[index - 1].span.stop if index else 0
        first = max(before, start - upstream)
        for block in range(before if index else first, start):
            teacher, owner = block, index - 1
            if block >= first:  # k blocks imitate the k + n that end at the cut
                k = start - first
                teacher, owner = first + round((block - first + 1) * (stop - first) / k) - 1, index
            found.append(_Step(block, teacher, owner, whole=not (inside and block == start - 1)))
    last = len(boundaries) - 1
    return found + [_Step(block, block, last) for block in range(boundaries[-1].span.stop, plan.num_blocks)]


class _Walk:
    """The two streams on their way through the model.

    Attributes:
        depth: the dense stream is ``x_depth``.
        found: the blocks' anatomies, from one probe of the model.
        predictions: of the judging sequences.
        known: their divergence as things stand; None when something changed that was not looked at.
    """

    def __init__(
        self, loaded: LoadedModel, calibration: CalibrationSet, streams: Streams, execution: Execution
    ) -> None:
        self.loaded, self.calibration, self.streams, self.execution = loaded, calibration, streams, execution
        self.depth = 0
        self.found = anatomies(loaded, range(loaded.num_blocks))
        self.predictions = Predictions(loaded, calibration)
        self.known: list[float] | None = None

    def through(self, plan: PrunePlan, todo: list[_Step], fit: FitBoundary, inside: bool) -> tuple[Operator, ...]:
        start = plan.boundaries[0].span.start
        first = max(0, min([start - inside, *(step.block for step in todo)]))
        fill(self.loaded, self.calibration, first, self.streams.repaired, self.execution)
        self.streams.dense.copy_(self.streams.repaired)
        self.depth = first
        operators: list[Operator] = []
        folds: dict[int, list[WeightFold]] = {b.index: [] for b in plan.boundaries}
        judged: dict[int, list[dict[str, Any]]] = {b.index: [] for b in plan.boundaries}
        position = {step.block: step for step in todo}
        for block in range(first, plan.num_blocks + 1):
            for boundary in plan.boundaries:
                if boundary.span.start == block and not (inside and block):
                    operators.append(self.repair(boundary, fit, None))
                if boundary.span.start - 1 == block and inside:
                    step = position.get(block)
                    student = SingleBlock(self.loaded, block, self.found)
                    if step is not None:
                        self.teach(student, step, folds[step.boundary], judged[step.boundary])
                    operators.append(self.repair(boundary, fit, student))
            step = position.get(block)
            if step is not None and step.whole:
                student = SingleBlock(self.loaded, block, self.found)
                self.teach(student, step, folds[step.boundary], judged[step.boundary])
                self.advance_repaired(student)
            self.execution.progress("refit", block - first, plan.num_blocks - first)
        return tuple(
            replace(o, folds=(*o.folds, *folds[b]), fit={**o.fit, "refit": judged[b]}) for b, o in enumerate(operators)
        )

    def repair(self, boundary: Boundary, fit: FitBoundary, student: SingleBlock | None) -> Operator:
        """Fits the operator on the repaired stream before the cut and the dense one after it, and applies it."""
        self.advance_dense(boundary.span.stop)
        self.known = None

        def batches() -> Any:
            for batch, calls in self.batches():
                before = self.take(self.streams.repaired, batch)
                last = None
                if student is not None:
                    ran = student.run(calls[student.index], before)
                    assert ran.mid is not None and ran.inner is not None and ran.output is not None
                    own = LastBlock.parameters(student.mlp_output, self.loaded.device)
                    last = LastBlock(ran.mid, ran.inner, *own, student.part("mlp_output").multiplier)
                    before = ran.output
                yield batch, before, last

        def feed(gathered: Gathered) -> None:
            for batch, before, last in batches():
                gathered.add(batch.sequences, batch.mask, before, self.take(self.streams.dense, batch), last)

        operator = fit(boundary, feed)
        if operator.scale is not None:
            raise RecoveryError(
                f"{operator.kind} is folded into the weights that a refit replaces.", f"Use {operator.kind} alone."
            )
        for batch, before, last in batches():
            self.put(self.streams.repaired, batch, operator.apply(before.float(), last))  # x M may exceed float16
        return operator

    def teach(self, student: SingleBlock, step: _Step, folds: list[WeightFold], judged: list[dict[str, Any]]) -> None:
        """Re-solves the step's parts of one block, attention first; the dense stream moves past the teacher."""
        self.advance_dense(step.teacher)
        self.known = self.known if step.teacher == step.block else None  # blocks between are left out
        teacher = SingleBlock(self.loaded, step.teacher, self.found)
        at_mid = student.mid is not None and teacher.mid is not None
        attention = [part for part in student.parts if part.role in ATTENTION]
        for part in attention:
            moments = part.moments()
            for batch, calls in self.batches():
                wanted = teacher.run(calls[step.teacher], self.take(self.streams.dense, batch))
                got = student.run(calls[step.block], self.take(self.streams.repaired, batch), until_mid=at_mid)
                aim, have = (wanted.mid, got.mid) if at_mid else (wanted.output, got.output)
                assert aim is not None and have is not None and wanted.output is not None
                part.add(moments, batch, got.read[part.role], aim, have)
                if part is attention[-1]:
                    self.put(self.streams.dense, batch, wanted.output)
            self.depth = step.teacher + (part is attention[-1])
            self.change(student, part, moments, step, folds, judged)
        self.advance_dense(step.teacher + 1)
        for part in (part for part in student.parts if step.whole and part.role not in ATTENTION):
            moments = part.moments()
            for batch, calls in self.batches():
                ran = student.run(calls[step.block], self.take(self.streams.repaired, batch))
                assert ran.output is not None
                part.add(moments, batch, ran.read[part.role], self.take(self.streams.dense, batch), ran.output)
            self.change(student, part, moments, step, folds, judged)

    def change(
        self,
        student: SingleBlock,
        part: Part,
        moments: list[BoundaryMoments],
        step: _Step,
        folds: list[WeightFold],
        judged: list[dict[str, Any]],
    ) -> None:
        """Judges, and puts the change into the student and the folds when it is better."""
        choice = choose_change(*moments)
        judged.append({"block": step.block, "role": part.role, "ridge": None, "before": 1.0, "after": choice.error})
        if choice.change is None or choice.fitted is None:
            return
        saved = copy.deepcopy(part.module.state_dict())
        before = self.look(student, step) if self.known is None else self.known
        part.move(choice.fitted)
        after = self.look(student, step)
        part.module.load_state_dict(saved)
        self.known = before
        judged[-1] |= {"kl_before": float(np.mean(before)), "kl_after": float(np.mean(after))}
        if not surely_less(after, before):
            return
        judged[-1]["ridge"] = choice.ridge
        part.move(choice.change)
        self.known = self.look(student, step)
        folds.append(part.fold())

    def look(self, student: SingleBlock, step: _Step) -> list[float]:
        """Divergence of the judges' predictions when the dense model goes on behind the student."""

        def stream(batch: Batch, calls: list[Call]) -> torch.Tensor:
            output = student.run(calls[step.block], self.take(self.streams.repaired, batch)).output
            assert output is not None
            return output

        return self.predictions.divergences(step.teacher + 1, stream)

    def advance_dense(self, point: int) -> None:
        for index in range(self.depth, point):
            for batch, calls in self.batches():
                with torch.no_grad():
                    output = calls[index].on(self.loaded.blocks[index], self.take(self.streams.dense, batch))
                self.put(self.streams.dense, batch, output if isinstance(output, torch.Tensor) else output[0])
        self.depth = max(self.depth, point)

    def advance_repaired(self, student: SingleBlock) -> None:
        for batch, calls in self.batches():
            ran = student.run(calls[student.index], self.take(self.streams.repaired, batch))
            assert ran.output is not None
            self.put(self.streams.repaired, batch, ran.output)

    def batches(self) -> Any:
        for batch in self.calibration.batches(self.loaded.device):
            yield batch, block_calls(self.loaded, batch)

    def take(self, stream: torch.Tensor, batch: Batch) -> torch.Tensor:
        return stream[batch.sequences.start : batch.sequences.stop].to(self.loaded.device)

    def put(self, stream: torch.Tensor, batch: Batch, x: torch.Tensor) -> None:
        stream[batch.sequences.start : batch.sequences.stop] = x.to("cpu", stream.dtype)
