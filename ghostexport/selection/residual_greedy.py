"""``residual-greedy``: remove one block after the other, each time the one whose loss the repair can undo best.

A beam of plans grows by one block per step. Candidates are ranked by the sum of their spans' errors after recovery, the
best few again by the perplexity of the repaired model (``after_recovery``). Adjacent blocks merge into one span with
one operator, so the plan ends contiguous where that is better.
"""

from __future__ import annotations

from ghostexport.calibration import CalibrationSet
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.selection.after_recovery import Judge
from ghostexport.selection.eligibility import eligible_blocks, eligible_starts

#: Plans kept after each step, and candidates per step that get a perplexity.
BEAM = 2
FINALISTS = 4


def residual_greedy(
    loaded: LoadedModel, calibration: CalibrationSet, section: SelectSection, execution: Execution
) -> PrunePlan:
    """Grows the plan block by block; one pass of the dense model per step for the spans that are new.

    Raises:
        RecipeError: the protected blocks leave too few.
        CalibrationError: too few sequences or tokens, or non-finite activations.
    """
    count = section.prune or 0
    eligible_starts(loaded.num_blocks, count, section)  # raises when too few blocks are left
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
