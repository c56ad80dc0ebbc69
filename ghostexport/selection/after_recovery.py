"""What a cut costs once it is repaired: shared by the criteria ``residual`` and ``residual-greedy``.

Three quarters of the calibration sequences fit a token-weighted operator per span, the others judge it::

    error(s, e) = mean over judging tokens of ||x_e - x_s - x_s M||^2 / ||x_e||^2     from moments alone

The held-out set that figures are reported on is never looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.errors import CalibrationError
from ghostexport.evaluation import evaluate, torch_forward
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, patch, read_residuals
from ghostexport.moments import BoundaryMoments, require_finite, token_weights
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recovery.cross_validation import median_diagonal
from ghostexport.recovery.judging import JUDGES, judges
from ghostexport.recovery.solving import solve_ridge

#: Ridge of the fits, relative to the median diagonal of the Gram matrix: three quarters of few sequences fit.
RIDGE = 1e-3

Span = tuple[int, int]


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
        for batch in self.calibration.batches(self.loaded.device):
            self._add(batch, moments)
            self.execution.progress("select", batch.sequences.stop, len(self.calibration))
        for span, (fitting, judging) in moments.items():
            ridge = RIDGE * median_diagonal(fitting)
            M = solve_ridge(fitting.gram, fitting.cross, ridge, fitting.tokens)
            self.repairs[span] = SpanRepair(M, judging.residual(M) / (fitting.channels * judging.tokens))

    def _add(self, batch: Batch, moments: dict[Span, tuple[BoundaryMoments, BoundaryMoments]]) -> None:
        last = {start: max(stop for s, stop in moments if s == start) for start, _ in moments}
        held: dict[int, torch.Tensor] = {}

        def visit(point: int, x: torch.Tensor) -> None:
            require_finite(x[batch.mask], point)
            for (start, stop), folds in moments.items():
                if stop == point:
                    for fold, mask in zip(folds, _masks(batch), strict=True):
                        fold.add(held[start][mask], x[mask], token_weights(x[mask]))
            for start in [s for s in held if last[s] <= point]:
                del held[start]
            if point in last:
                held[point] = x

        points = {point for span in moments for point in span}
        read_residuals(self.loaded.model, points, visit, batch.input_ids, batch.attention_mask)

    def error(self, plan: PrunePlan) -> float:
        """Sum of the plan's span errors, each measured by :meth:`measure` before."""
        return sum(self.repairs[span.start, span.stop].error for span in plan.removed)

    def perplexity(self, plan: PrunePlan) -> float:
        """Perplexity of the repaired model on the judging sequences."""
        operators = tuple(
            Operator(b, "ghost-weighted", delta=self.repairs[b.span.start, b.span.stop].delta.float().cpu().numpy())
            for b in plan.boundaries
        )
        model = patch(self.loaded, plan, OperatorSet("judged", operators, plan)).model
        rows = slice(JUDGES - 1, None, JUDGES)
        judging = CalibrationSet.from_tokens(self.calibration.tokens[rows], self.calibration.attention_mask[rows])
        return evaluate({"judged": torch_forward(model)}, judging)["judged"].perplexity


def _masks(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The real tokens ``(B, T)`` of fitting and of judging sequences."""
    judging = torch.tensor([judges(s) for s in batch.sequences], device=batch.mask.device)[:, None]
    return batch.mask & ~judging, batch.mask & judging
