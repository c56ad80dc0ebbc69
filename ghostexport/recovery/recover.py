"""Fits every operator of a recipe at every cut. Start reading recovery here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ghostexport.calibration import CalibrationSet
from ghostexport.distributed import is_shared
from ghostexport.errors import RecipeError, RecoveryError
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import Boundary, PrunePlan
from ghostexport.recipe import BEST, HEAL, REFIT, RecoverSection, base_operator
from ghostexport.recovery.fits.solving import FOLDS
from ghostexport.recovery.gathering import Gathered, Request, gather
from ghostexport.recovery.held_out import figures, measure, measure_refit, say_lost_tokens
from ghostexport.recovery.last_block import last_kept, why_not_split
from ghostexport.recovery.refit.judging import JUDGES
from ghostexport.recovery.refit.parts import anatomies, refittable
from ghostexport.recovery.refit.walk import refit, require_refittable
from ghostexport.recovery.registry import OPERATORS, Kind, function
from ghostexport.recovery.several_cuts import Crossing, fit_sequential, multiplied, single_blocks
from ghostexport.validation import require_name


def shareable(section: RecoverSection, cuts: int) -> Request | None:
    """What :func:`recover` gathers at so many cuts in one pass, where any plain pass of the model could gather it.

    None where recovery would make its own pass all the same, or none: operators that look inside a block, cuts fitted
    one after the other or block by block, refits alone, several processes that share the pass out.

    Raises:
        RecipeError: unknown operator, or one that cannot be refitted.
    """
    _require_known(section)
    kinds = _gathered_kinds(section)
    request = _request(section, *kinds.values())
    apart = section.per_block or section.statistics == "sequential"
    if not kinds or request.inside or (apart and cuts > 1) or is_shared():
        return None
    return request


def recover(
    loaded: LoadedModel,
    plan: PrunePlan,
    calibration: CalibrationSet,
    held_out: CalibrationSet,
    section: RecoverSection,
    execution: Execution | None = None,
    gathered: Sequence[Gathered] | None = None,
) -> dict[str, OperatorSet]:
    """Fits every operator of the recipe at every boundary, from one pass of the dense model over the calibration set.

    That pass is left out where ``gathered`` holds what it would gather (:func:`shareable`). One pass over the held-out
    set measures the operators. Figures of the fit (``Operator.fit``): ``nmse_calibration`` and ``nmse_held_out``
    (:meth:`BoundaryMoments.nmse`), ``relative_error_calibration`` (on a fixed sample of tokens) and
    ``relative_error_held_out`` (mean over tokens of ``||error|| / ||x_post||``), ``relative_change_held_out`` (the same
    of the bare cut), ``largest_x``, ``largest_change``, ``largest_y`` (held out, for float16), ``antisymmetric_share``
    ``||(M - M')/2|| / ||M||``, ``tokens``, and what the kind itself reports (``condition``, ``ridge``).

    Returns:
        Operator sets by operator name, in the recipe's order; ``best`` under the name it stands for.

    Raises:
        RecipeError: unknown operator.
        CalibrationError: too few tokens, tokens that do not suit the model, or non-finite activations.
        RecoveryError: a fit is singular, or an operator does not apply to this model.
        ModelLayoutError: an operator needs all of the model in memory.
    """
    execution = execution or Execution()
    section = resolve_best(section, loaded, [span.start for span in plan.removed], len(calibration), execution)
    _require_known(section)
    if not plan.removed:
        return {name: OperatorSet(name, (), plan, calibration.sha256) for name in section.operators}
    for tokens in (calibration, held_out):
        tokens.require_fits(loaded.vocab_size, loaded.max_length)
    calibration.require_tokens_for(loaded.hidden_size, execution)
    _require_applicable(loaded, plan, len(calibration), section)
    say_unused(section, execution)
    say_minutes(loaded, calibration, section, execution)
    fitted = _fit(loaded, plan, calibration, held_out, section, execution, gathered)
    for name in section.operators:
        if name.endswith(REFIT):
            fitted[name] = _refit(loaded, plan, calibration, held_out, name, section, execution)
    sets = {name: OperatorSet(name, fitted[name], plan, calibration.sha256) for name in section.operators}
    for name, start in sets.items():
        if (train := OPERATORS[base_operator(name)].train) is not None:
            sets[name] = function(train)(loaded, start, calibration, held_out, section, execution)
        say_lost_tokens(name, sets[name].operators, execution)
    return sets


def best_operator(loaded: LoadedModel, cuts: Sequence[int] | None, sequences: int) -> tuple[str, str]:
    """The best closed form that applies to a model, and why; nothing but a few tokens is run.

    Args:
        cuts: first blocks of the removed runs; None while it is open what will be removed.
        sequences: of the calibration set.
    """
    if sequences < JUDGES:
        return "ghost-weighted", f"{sequences} calibration sequences are too few to judge more"
    if any(parameter.is_meta for parameter in loaded.model.parameters()):
        return "ghost-weighted", "parts of the model are on disk, so nothing can be refitted"
    found = anatomies(loaded, range(loaded.num_blocks))
    if not any(map(refittable, found.values())):
        return "ghost-weighted", "what its blocks add to the stream is no result of a projection or a norm"
    last = range(loaded.num_blocks) if cuts is None else [cut - 1 for cut in cuts if cut]
    try:
        for block in last:
            anatomy = found[block]
            why = why_not_split(anatomy) if anatomy else "adds what cannot be told apart"
            if why:
                return f"ghost-weighted{REFIT}", f"not ghost-split: block {block} {why}"
        for block in [*last][:1]:
            last_kept(loaded, block, "ghost-split")
    except RecoveryError:
        return f"ghost-weighted{REFIT}", "not ghost-split: its MLP flattens the tokens"
    return f"ghost-split{REFIT}", "the best closed form, and it applies"


def resolve_best(
    section: RecoverSection, loaded: LoadedModel, cuts: Sequence[int] | None, sequences: int, execution: Execution
) -> RecoverSection:
    """The section with ``best`` and ``heal`` replaced by what they stand for on this model, said with the reason."""
    if not {BEST, HEAL} & {*map(base_operator, section.operators)}:
        return section
    name, why = best_operator(loaded, cuts, sequences)
    healed = "ghost-healed" if base_operator(name) == "ghost-split" else "ghost-weighted-healed"
    meant = {BEST: name, BEST + REFIT: name, HEAL: healed, HEAL + REFIT: healed + REFIT}
    for asked in {*section.operators} & {*meant}:
        execution.say(f"recover: {asked} is {meant[asked]} here ({why})")
    names = dict.fromkeys(meant.get(asked, asked) for asked in section.operators)
    return section.model_copy(update={"operators": tuple(names)})


def say_unused(section: RecoverSection, execution: Execution) -> None:
    """Tells which keys of the section none of its operators reads."""
    refitted = [name.endswith(REFIT) for name in section.operators]
    for key, used in (
        ("refit_upstream", any(refitted)),
        ("per_block", not all(refitted)),
        ("rank", any(OPERATORS[base_operator(name)].ranked for name in section.operators)),
    ):
        if getattr(section, key) and not used:
            names = ", ".join(section.operators)
            execution.say(f"recover: {key} ({getattr(section, key)}) has no effect on {names}")


#: What recovery costs, in forward passes of the model over the calibration set: the shared pass of the closed forms
#: with its sums, and each refit (measured on SmolLM2; the solves of wider models weigh more).
PASS, REFIT_PASSES = 1.5, 9.0


def say_minutes(
    loaded: LoadedModel, calibration: CalibrationSet, section: RecoverSection, execution: Execution
) -> None:
    """Says how long the closed forms will take, from one product of a block; what is trained says its own minutes."""
    matrices = [p for block in loaded.blocks for p in block.parameters() if p.ndim == 2 and not p.is_meta]
    if not matrices:
        return
    weight = max(matrices, key=lambda matrix: matrix.numel()).detach()
    x = weight.new_ones(calibration.tokens.shape[1], weight.shape[1])
    float((x @ weight.T)[0, 0])  # the first one of a shape is slower
    begun = time.monotonic()
    float((x @ weight.T)[0, 0])  # a number: a GPU has finished
    sequence = (time.monotonic() - begun) * sum(matrix.numel() for matrix in matrices) / weight.numel()
    refits = sum(name.endswith(REFIT) for name in section.operators)
    passes = PASS * bool(_gathered_kinds(section)) + REFIT_PASSES * refits
    minutes = len(calibration) * passes * sequence / 60
    execution.say(f"recover: about {max(1, round(minutes))} minutes for {', '.join(section.operators)}")


def _require_known(section: RecoverSection) -> None:
    for name in section.operators:
        require_name(base_operator(name), OPERATORS, "operator")
        kind = OPERATORS[base_operator(name)]
        if name.endswith(REFIT) and kind.train is not None and not kind.heals:
            raise RecipeError(f"recover: {name}: a trained operator cannot be refitted.", "Leave +refit out.")


def _require_applicable(loaded: LoadedModel, plan: PrunePlan, sequences: int, section: RecoverSection) -> None:
    """Refuses, before any pass, what one of the operators cannot do on this model, plan or calibration set's size."""
    if section.rank is not None and section.rank > loaded.hidden_size:
        raise RecoveryError(
            f"Rank {section.rank} exceeds the hidden size {loaded.hidden_size}.", "Choose a smaller --rank."
        )
    kinds = {name: OPERATORS[base_operator(name)] for name in section.operators}
    for check in {kind.check for kind in kinds.values()} - {None}:
        function(check or "")(loaded, plan)
    for name, kind in kinds.items():
        if (name.endswith(REFIT) or "last-block" in kind.needs) and sequences < JUDGES:
            raise RecoveryError(
                f"{name} needs at least {JUDGES} calibration sequences, one of which judges.", "Use more --sequences."
            )
    refitted = [name for name in kinds if name.endswith(REFIT)]
    inside = [name for name, kind in kinds.items() if kind.inside or kind.trains_inside]
    if refitted:  # what one of them is refused for, all are: the model is probed once
        require_refittable(loaded, plan, section.refit_upstream, refitted[0])
    for boundary in plan.boundaries:
        if named := [name for name in inside if boundary.span.start or not kinds[name].first]:
            last_kept(loaded, boundary.span.start - 1, named[0])


def require_operators(
    loaded: LoadedModel, section: RecoverSection, spans: Sequence[tuple[int, int]] | None, sequences: int
) -> None:
    """Refuses what does not apply to a model, as :func:`recover` does, before it is known which blocks go.

    Raises:
        RecoveryError: an operator does not apply, whatever is removed, or with ``spans``.
    """
    _require_known(section)
    if spans is not None:
        _require_applicable(loaded, PrunePlan.from_spans(loaded.num_blocks, spans), sequences, section)
        return
    found = anatomies(loaded, range(loaded.num_blocks - 1))  # one block behind the most promising one stands for any
    cut = next((b + 1 for b, anatomy in found.items() if anatomy and not why_not_split(anatomy)), len(found))
    if cut:
        _require_applicable(loaded, PrunePlan.from_spans(loaded.num_blocks, [(cut, cut + 1)]), sequences, section)


def require_folded(section: RecoverSection) -> None:
    """Raises RecipeError where an operator adds a node, before it is fitted for a checkpoint."""
    adding = [name for name in section.operators if not OPERATORS[base_operator(name)].folded]
    if adding:
        raise RecipeError(
            f"{', '.join(adding)} adds a node at the cut, which no checkpoint of transformers holds.",
            f"Give --operator ghost-zero{REFIT} (best), or another of: "
            f"{', '.join(name for name, kind in OPERATORS.items() if kind.folded)}.",
        )


def _gathered_kinds(section: RecoverSection) -> dict[str, Kind]:
    """The kinds that are fitted without a refit, by name."""
    return {name: OPERATORS[name] for name in section.operators if not name.endswith(REFIT)}


def _request(section: RecoverSection, *kinds: Kind) -> Request:
    return Request.of(kinds, FOLDS if section.ridge == "cv" else 1)


def _fit(
    loaded: LoadedModel,
    plan: PrunePlan,
    calibration: CalibrationSet,
    held_out: CalibrationSet,
    section: RecoverSection,
    execution: Execution,
    gathered: Sequence[Gathered] | None,
) -> dict[str, tuple[Operator, ...]]:
    """One pass for what all kinds read, unless it is given, and one for their held-out errors."""
    kinds = _gathered_kinds(section)
    if not kinds:
        return {}
    done: dict[str, tuple[Operator, ...]] = {}
    if len(plan.boundaries) > 1:
        later = {n: kind for n, kind in kinds.items() if kind.heals or section.statistics == "sequential"}
        done = _sequential(loaded, plan, calibration, held_out, later, section, execution)
        kinds = {name: kind for name, kind in kinds.items() if name not in later}
    if not kinds:
        return done
    wanted = _request(section, *kinds.values())
    if gathered is None:
        gathered = gather(loaded, plan.boundaries, calibration, wanted, execution)
    if section.per_block and len(plan.boundaries) > 1:
        singles = gather(loaded, single_blocks(plan), calibration, wanted, execution)
        fitted = {n: multiplied(plan, [function(kind.fit)(g, section) for g in singles]) for n, kind in kinds.items()}
    else:
        fitted = {name: [function(kind.fit)(g, section) for g in gathered] for name, kind in kinds.items()}
    held = measure(loaded, plan, held_out, fitted, execution)
    return done | {
        name: tuple(
            replace(operator, fit={**operator.fit, **figures(operator, g), **errors})
            for operator, g, errors in zip(operators, gathered, held[name], strict=True)
        )
        for name, operators in fitted.items()
    }


def _sequential(
    loaded: LoadedModel,
    plan: PrunePlan,
    calibration: CalibrationSet,
    held_out: CalibrationSet,
    kinds: Mapping[str, Kind],
    section: RecoverSection,
    execution: Execution,
) -> dict[str, tuple[Operator, ...]]:
    """Every cut behind the repaired ones before it; one pass per operator and cut."""
    if section.per_block and kinds:
        raise RecipeError("recover: per_block measures on the dense model.", "Use --statistics dense with it.")
    fitted = {}
    for name, kind in kinds.items():
        alone = _alone(loaded, calibration, kind, section)

        def fit(boundary: Boundary, crossings: Iterator[Crossing], alone: _Alone = alone) -> Operator:
            def feed(gathered: Gathered) -> None:
                for batch, x, post, last in crossings:
                    gathered.add(batch.sequences, batch.mask, x, post, last)

            return alone(boundary, feed)

        fitted[name] = fit_sequential(loaded, plan, calibration, held_out, fit, kind.inside, execution)
    return fitted


def _refit(
    loaded: LoadedModel,
    plan: PrunePlan,
    calibration: CalibrationSet,
    held_out: CalibrationSet,
    name: str,
    section: RecoverSection,
    execution: Execution,
) -> tuple[Operator, ...]:
    """The operators of one ``+refit`` variant, each fitted on the repaired prefix, and the refitted weights."""
    kind = OPERATORS[base_operator(name)]
    fit = _alone(loaded, calibration, kind, section)
    operators = refit(loaded, plan, calibration, fit, kind.inside, section.refit_upstream, execution)
    fitted = OperatorSet(name, operators, plan)
    return fitted.with_fit(measure_refit(loaded, fitted, held_out, execution)).operators


#: Fits at one boundary from what ``feed`` fills in, with the figures of the fit.
_Alone = Callable[[Boundary, Callable[[Gathered], None]], Operator]


def _alone(loaded: LoadedModel, calibration: CalibrationSet, kind: Kind, section: RecoverSection) -> _Alone:
    request = _request(section, kind)

    def fit(boundary: Boundary, feed: Callable[[Gathered], None]) -> Operator:
        (gathered,) = request.empty(loaded, [boundary], calibration)
        feed(gathered)
        operator: Operator = function(kind.fit)(gathered, section)
        return replace(operator, fit={**operator.fit, **figures(operator, gathered)})

    return fit
