"""``residual``: remove the run of blocks whose loss the repair can undo best.

All windows of ``n`` blocks are repaired and judged from streamed Grams (``after_recovery``); the best few are ranked
again by the perplexity of the repaired model, because the smallest error of the stream is not always the least harm.
"""

from __future__ import annotations

from ghostexport.calibration import CalibrationSet
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.selection.after_recovery import Judge
from ghostexport.selection.eligibility import eligible_starts

#: Windows that get a perplexity.
FINALISTS = 4


def residual(
    loaded: LoadedModel, calibration: CalibrationSet, section: SelectSection, execution: Execution
) -> PrunePlan:
    """Scores all windows in one pass and the finalists by perplexity.

    Raises:
        RecipeError: the protected blocks leave no window.
        CalibrationError: too few sequences or tokens, or non-finite activations.
    """
    count = section.prune or 0
    spans = [(start, start + count) for start in eligible_starts(loaded.num_blocks, count, section)]
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
