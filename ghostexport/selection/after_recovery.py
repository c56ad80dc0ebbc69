"""Criteria that ask what a cut costs once it is repaired.

Three quarters of the calibration sequences fit a token-weighted operator per span, the others judge it::

    error(s, e) = mean over judging tokens of ||x_e - x_s - x_s M||^2 / ||x_e||^2     from moments alone

The best few are ranked again by the perplexity of the repaired model on the judging sequences, because the smallest
error of the stream is not always the least harm. The held-out set that figures are reported on is never looked at.

``residual`` removes the run of blocks whose loss the repair can undo best, of all runs of ``n``. ``residual-greedy``
grows a beam of plans by one block per step, ranked by the sum of their spans' errors. Adjacent blocks merge into one
span with one operator, so its plan ends contiguous where that is better.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.errors import CalibrationError
from ghostexport.evaluation.text import evaluate, forward_of
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, Shelf, patch, read_streams
from ghostexport.models.walking import Visit
from ghostexport.moments import BoundaryMoments, require_finite, token_weights
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.recovery.fits.solving import median_diagonal, solve_ridge
from ghostexport.recovery.refit.judging import JUDGES, judges
from ghostexport.selection.criteria import eligible_blocks, eligible_starts

#: Ridge of the fits, relative to the median diagonal of the Gram matrix: three quarters of few sequences fit.
RIDGE = 1e-3

#: Plans that get a perplexity: of all runs, and of every step.
FINALISTS = 4

#: Plans kept after each step of the search.
BEAM = 2

Span = tuple[int, int]


def residual(
    loaded: LoadedModel, calibration: CalibrationSet, section: SelectSection, execution: Execution
) -> PrunePlan:
    """Scores all windows in one pass and the finalists by perplexity.

    Raises:
        RecipeError: the protected blocks leave no window.
        CalibrationError: too few sequences or tokens, or non-finite activations.
    """
    count = section.prune or 0
    spans = [(start, start + count) for start in eligible_starts(loaded.num_blocks, section)]
    calibration.require_tokens_for(loaded.hidden_size, execution)
    judge = Judge(loaded, calibration, execution)
    judge.measure(spans)
    ranked = sorted(spans, key=lambda span: judge.repairs[span].error)
    perplexities = {}
    for span in ranked[:FINALISTS]:
        perplexities[span] = judge.perplexity(PrunePlan.from_spans(loaded.num_blocks, [span]))
        execution.progress("select: finalists", len(perplexities), min(FINALISTS, len(ranked)))
    best = min(perplexities, key=lambda span: perplexities[span])
    scores = {
        "windows": [[*span, judge.repairs[span].error] for span in spans],
        "perplexity": [[*span, perplexity] for span, perplexity in perplexities.items()],
        "best": perplexities[best],
    }
    return PrunePlan.from_spans(loaded.num_blocks, [best], "residual", scores)


def residual_greedy(
    loaded: LoadedModel, calibration: CalibrationSet, section: SelectSection, execution: Execution
) -> PrunePlan:
    """Grows the plan block by block; one pass of the dense model per step for the spans that are new.

    Raises:
        RecipeError: the protected blocks leave too few.
        CalibrationError: too few sequences or tokens, or non-finite activations.
    """
    count = section.prune or 0
    calibration.require_tokens_for(loaded.hidden_size, execution)
    judge = Judge(loaded, calibration, execution)
    beam = [PrunePlan(loaded.num_blocks)]
    steps = []
    for step in range(count):
        plans = _grown(beam, section)
        judge.measure((span.start, span.stop) for plan in plans for span in plan.removed)
        finalists = sorted(plans, key=judge.error)[:FINALISTS]
        perplexities = {plan.removed: judge.perplexity(plan) for plan in finalists}
        beam = sorted(finalists, key=lambda plan: perplexities[plan.removed])[:BEAM]
        best = [[span.start, span.stop] for span in beam[0].removed]
        steps.append({"removed": best, "perplexity": perplexities[beam[0].removed], "error": judge.error(beam[0])})
        execution.progress("select: blocks", step + 1, count)
    blocks = [[*span, repair.error] for span, repair in sorted(judge.repairs.items()) if span[1] - span[0] == 1]
    return PrunePlan(loaded.num_blocks, beam[0].removed, "residual-greedy", {"blocks": blocks, "steps": steps})


def _grown(beam: list[PrunePlan], section: SelectSection) -> list[PrunePlan]:
    """Every plan of the beam with one more eligible block removed, each cut once."""
    grown = {}
    for plan in beam:
        removed = [block for span in plan.removed for block in range(span.start, span.stop)]
        for block in set(eligible_blocks(plan.num_blocks, section)) - set(removed):
            candidate = PrunePlan.from_blocks(plan.num_blocks, [*removed, block])
            grown[candidate.removed] = candidate
    return list(grown.values())


@dataclass(frozen=True, eq=False)
class SpanRepair:
    """A removed span ``[start, stop)`` after its repair.

    Attributes:
        delta: ``M`` ``[C, C]`` float64, fitted on the fitting sequences.
        error: mean squared relative error on the judging tokens.
    """

    delta: torch.Tensor
    error: float


@dataclass(eq=False)
class Judge:
    """Repairs spans and judges plans; spans once measured are remembered.

    Memory of one pass: four ``C x C`` float64 matrices per span asked for.
    """

    loaded: LoadedModel
    calibration: CalibrationSet
    execution: Execution
    repairs: dict[Span, SpanRepair] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.calibration) < JUDGES:
            raise CalibrationError(
                f"This criterion needs at least {JUDGES} calibration sequences, one of which judges.",
                "Use more --sequences.",
            )

    def measure(self, spans: Iterable[Span]) -> None:
        """Repairs the spans not yet known, all in one pass of the dense model.

        Raises:
            CalibrationError: non-finite activations.
            RecoveryError: a singular fit.
        """
        wanted = sorted(set(spans) - set(self.repairs))
        if not wanted:
            return
        options = (self.loaded.hidden_size, self.loaded.device)
        moments = {span: (BoundaryMoments(*options), BoundaryMoments(*options)) for span in wanted}
        self._add(moments)
        for span, (fitting, judging) in moments.items():
            ridge = RIDGE * median_diagonal(fitting)
            M = solve_ridge(fitting.gram, fitting.cross, ridge, fitting.tokens)
            self.repairs[span] = SpanRepair(M, judging.residual(M) / (fitting.channels * judging.tokens))

    def _add(self, moments: dict[Span, tuple[BoundaryMoments, BoundaryMoments]]) -> None:
        last = {start: max(stop for s, stop in moments if s == start) for start, _ in moments}
        held = Shelf()

        def visit(batch: Batch, point: int, x: torch.Tensor) -> None:
            require_finite(x[batch.mask], point)
            first = batch.sequences.start
            for (start, stop), folds in moments.items():
                if stop == point:
                    before = held.take((first, start)) if last[start] == stop else held.look((first, start))
                    for fold, mask in zip(folds, _masks(batch), strict=True):
                        fold.add(before[mask], x[mask], token_weights(x[mask]))
            if point in last:
                held.put((first, point), x)

        self.read({point for span in moments for point in span}, visit)

    def read(self, points: Iterable[int], visit: Visit) -> None:
        """Hands residual values of all batches to ``visit(batch, l, x_l)``, of each in depth order."""
        batches = self.calibration.batches(self.loaded.device)
        read_streams(self.loaded, batches, points, visit, self.execution, "select", len(self.calibration))

    def error(self, plan: PrunePlan) -> float:
        """Sum of the plan's span errors, each measured by :meth:`measure` before."""
        return sum(self.repairs[span.start, span.stop].error for span in plan.removed)

    def perplexity(self, plan: PrunePlan) -> float:
        """Perplexity of the repaired model on the judging sequences."""
        operators = tuple(
            Operator(b, "ghost-weighted", delta=self.repairs[b.span.start, b.span.stop].delta.float().cpu().numpy())
            for b in plan.boundaries
        )
        repaired = patch(self.loaded, plan, OperatorSet("judged", operators, plan))
        rows = slice(JUDGES - 1, None, JUDGES)
        judging = CalibrationSet.from_tokens(self.calibration.tokens[rows], self.calibration.attention_mask[rows])
        forward = forward_of(repaired, judging.batches(tokens=1), Execution())
        return evaluate({"judged": forward}, judging)["judged"].perplexity


def _masks(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The real tokens ``(B, T)`` of fitting and of judging sequences."""
    judging = torch.tensor([judges(s) for s in batch.sequences], device=batch.mask.device)[:, None]
    return batch.mask & ~judging, batch.mask & judging
