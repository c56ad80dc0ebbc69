"""Operators: what is put at a cut so that the pruned model behaves like the dense one. One file per family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ghostexport.calibration import CalibrationSet
from ghostexport.errors import RecipeError, RecoveryError
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import Boundary, PrunePlan
from ghostexport.recipe import REFIT, RecoverSection, base_operator, require_name
from ghostexport.recovery.affine import fit_affine
from ghostexport.recovery.cosine import train_cosine
from ghostexport.recovery.cross_validation import FOLDS
from ghostexport.recovery.distilled import distil
from ghostexport.recovery.ffn import train_network
from ghostexport.recovery.ghost import fit_ghost
from ghostexport.recovery.judging import JUDGES
from ghostexport.recovery.last_block import LastBlock, last_kept
from ghostexport.recovery.linearpatch import fit_diag, fit_rotate
from ghostexport.recovery.none import fit_none
from ghostexport.recovery.passes import (
    Basis,
    BoundaryStatistics,
    Need,
    Request,
    apply,
    gather,
    measure,
    reaches_inside,
)
from ghostexport.recovery.per_block import multiplied, single_blocks
from ghostexport.recovery.prune_and_comp import fit_scale, require_scalable
from ghostexport.recovery.rank import require_rank
from ghostexport.recovery.ranks import is_parallel
from ghostexport.recovery.refit import refit, require_refittable
from ghostexport.recovery.repaired import measure_refit
from ghostexport.recovery.replaceme import fit_lstsq
from ghostexport.recovery.sequential import Crossing, fit_sequential
from ghostexport.recovery.split import fit_split, fit_zero
from ghostexport.recovery.weighted import fit_weighted

Fit = Callable[[BoundaryStatistics, RecoverSection], Operator]

#: Trains on from fitted operators: ``train(loaded, plan, initial, calibration, held_out, section, execution)``.
Train = Callable[..., tuple[Operator, ...]]

#: Raises a GhostExportError where a kind of operator does not apply to a model and plan.
Check = Callable[[LoadedModel, PrunePlan], None]


@dataclass(frozen=True)
class Family:
    """How one kind of operator is made.

    Attributes:
        fit: from a boundary's statistics to its operator.
        bases: magnitude statistics that it needs besides the moments.
        needs: other statistics that it needs besides the moments.
        check: asked before anything is measured.
        train: continues from what ``fit`` found.
    """

    fit: Fit
    bases: tuple[Basis, ...] = ()
    needs: tuple[Need, ...] = ()
    check: Check | None = None
    train: Train | None = None


OPERATORS: dict[str, Family] = {
    "ghost": Family(fit_ghost),
    "linearpatch-diag": Family(fit_diag, bases=("identity",)),
    "linearpatch-rotate": Family(fit_rotate, bases=("hadamard",)),
    "ghost-weighted": Family(fit_weighted, needs=("weighted",)),
    "ghost-affine": Family(fit_affine),
    "ghost-split": Family(fit_split, needs=("last-block",)),
    "ghost-zero": Family(fit_zero, needs=("last-block",)),
    "none": Family(fit_none),
    "prune-and-comp": Family(fit_scale, bases=("identity",), check=require_scalable),
    "replaceme-lstsq": Family(fit_lstsq, needs=("mlp-output",)),
    "replaceme-cosine": Family(fit_none, train=train_cosine),
    "streamline-ffn": Family(fit_none, train=train_network),
    "linearpatch-distilled": Family(fit_rotate, bases=("hadamard",), train=distil),
    "ghost-distilled": Family(fit_ghost, train=distil),
}


def shareable(section: RecoverSection, cuts: int) -> Request | None:
    """What :func:`recover` gathers at so many cuts in one pass, where any plain pass of the model could gather it.

    None where recovery would make its own pass all the same, or none: operators that look inside a block, cuts fitted
    one after the other or block by block, refits alone, several processes that share the pass out.

    Raises:
        RecipeError: unknown operator, or one that cannot be refitted.
    """
    _require_known(section)
    families = [OPERATORS[name] for name in section.operators if not name.endswith(REFIT)]
    request = _request(families, section)
    apart = section.per_block or section.statistics == "sequential"
    if not families or request.inside or (apart and cuts > 1) or is_parallel():
        return None
    return request


def recover(
    loaded: LoadedModel,
    plan: PrunePlan,
    calibration: CalibrationSet,
    held_out: CalibrationSet,
    section: RecoverSection,
    execution: Execution | None = None,
    statistics: Sequence[BoundaryStatistics] | None = None,
) -> dict[str, OperatorSet]:
    """Fits every operator of the recipe at every boundary, from one pass of the dense model over the calibration set.

    That pass is left out where ``statistics`` holds what it would gather (:func:`shareable`). One pass over the
    held-out set measures the operators. Figures of the fit (``Operator.fit``): ``nmse_calibration`` and
    ``nmse_held_out`` (:meth:`BoundaryMoments.nmse`), ``relative_error_calibration`` (on a fixed sample of tokens) and
    ``relative_error_held_out`` (mean over tokens of ``||error|| / ||x_post||``), ``relative_change_held_out`` (the same
    of the bare cut), ``largest_x``, ``largest_change``, ``largest_y`` (held out, for float16), ``antisymmetric_share``
    ``||(M - M')/2|| / ||M||``, ``tokens``, and what the family itself reports (``condition``, ``ridge``).

    Returns:
        Operator sets by operator name, in the recipe's order.

    Raises:
        RecipeError: unknown operator.
        CalibrationError: too few tokens, tokens that do not suit the model, or non-finite activations.
        RecoveryError: a fit is singular, or an operator does not apply to this model.
        ModelLayoutError: an operator needs all of the model in memory.
    """
    execution = execution or Execution()
    _require_known(section)
    if not plan.removed:
        return {name: OperatorSet(name, (), plan, calibration.sha256) for name in section.operators}
    for tokens in (calibration, held_out):
        tokens.require_fits(loaded.vocab_size, loaded.max_length)
    calibration.require_tokens_for(loaded.hidden_size, execution)
    _require_applicable(loaded, plan, calibration, section)
    say_unused(section, execution)
    families = {name: OPERATORS[name] for name in section.operators if not name.endswith(REFIT)}
    fitted = _fit(loaded, plan, calibration, held_out, families, section, execution, statistics)
    for name, family in families.items():
        if family.train is not None:
            fitted[name] = family.train(loaded, plan, fitted[name], calibration, held_out, section, execution)
    for name in section.operators:
        if name.endswith(REFIT):
            fitted[name] = _refit(loaded, plan, calibration, held_out, name, section, execution)
    for name in section.operators:
        say_lost_tokens(name, fitted[name], execution)
    return {name: OperatorSet(name, fitted[name], plan, calibration.sha256) for name in section.operators}


def _require_known(section: RecoverSection) -> None:
    for name in section.operators:
        require_name(base_operator(name), OPERATORS, "operator")
        if name.endswith(REFIT) and OPERATORS[base_operator(name)].train is not None:
            raise RecipeError(f"recover: {name}: a trained operator cannot be refitted.", "Leave +refit out.")


def _require_applicable(
    loaded: LoadedModel, plan: PrunePlan, calibration: CalibrationSet, section: RecoverSection
) -> None:
    """Refuses, before any pass, what one of the operators cannot do on this model, plan or calibration set."""
    require_rank(section.rank, loaded.hidden_size)
    for check in {OPERATORS[base_operator(name)].check for name in section.operators}:
        if check is not None:
            check(loaded, plan)
    requests = {name: _request([OPERATORS[base_operator(name)]], section) for name in section.operators}
    for name, request in requests.items():
        if (name.endswith(REFIT) or "last-block" in request.needs) and len(calibration) < JUDGES:
            raise RecoveryError(
                f"{name} needs at least {JUDGES} calibration sequences, one of which judges.", "Use more --sequences."
            )
    refitted = [name for name in requests if name.endswith(REFIT)]
    inside = [name for name, request in requests.items() if request.inside]
    if refitted:  # what one of them is refused for, all are: the model is probed once
        require_refittable(loaded, plan, refitted[0])
    if inside:
        for boundary in plan.boundaries:
            last_kept(loaded, boundary.span.start - 1, inside[0])


def say_unused(section: RecoverSection, execution: Execution) -> None:
    """Tells which keys of the section none of its operators reads."""
    refitted = [name.endswith(REFIT) for name in section.operators]
    kinds = {base_operator(name) for name in section.operators}
    for key, used in (
        ("refit_upstream", any(refitted)),
        ("per_block", not all(refitted)),
        ("rank", bool(kinds & RANKED)),
    ):
        if getattr(section, key) and not used:
            names = ", ".join(section.operators)
            execution.say(f"recover: {key} ({getattr(section, key)}) has no effect on {names}")


#: Kinds whose matrix can be of a lower rank.
RANKED = frozenset({"ghost", "ghost-weighted", "ghost-affine", "ghost-split"})

#: From this NMSE on an operator misses the tokens that make up the change, whatever its error on the others.
LOST = 0.9


def say_lost_tokens(name: str, operators: Sequence[Operator], execution: Execution) -> None:
    """Tells where an operator, good on most tokens, gets the few massive ones wrong that make up the squared change."""
    for operator in operators:
        nmse, relative, change = (
            operator.fit.get(f"{figure}_held_out", 0.0) for figure in ("nmse", "relative_error", "relative_change")
        )
        alike = (relative / change) ** 2 if change else 1.0  # about the NMSE if all tokens were alike
        if operator.kind != "none" and nmse > LOST and alike < nmse / 2:
            execution.say(
                f"{name}: behind the removed run {operator.boundary.span} this repair gets a few massive tokens wrong "
                f"(NMSE {nmse:.2f}; mean relative error {relative:.2f}, without repair {change:.2f}). "
                "Look at its perplexity: ghostexport eval RUN"
            )


def _fit(
    loaded: LoadedModel,
    plan: PrunePlan,
    calibration: CalibrationSet,
    held_out: CalibrationSet,
    families: Mapping[str, Family],
    section: RecoverSection,
    execution: Execution,
    statistics: Sequence[BoundaryStatistics] | None,
) -> dict[str, tuple[Operator, ...]]:
    """One pass for the statistics of all families, unless they are given, and one for their held-out errors."""
    if not families:
        return {}
    if section.statistics == "sequential" and len(plan.boundaries) > 1:
        return _sequential(loaded, plan, calibration, held_out, families, section, execution)
    wanted = _request(families.values(), section)
    if statistics is None:
        statistics = gather(loaded, plan.boundaries, calibration, wanted, execution)
    if section.per_block and len(plan.boundaries) > 1:
        singles = gather(loaded, single_blocks(plan), calibration, wanted, execution)
        fitted = {n: multiplied(plan, [family.fit(s, section) for s in singles]) for n, family in families.items()}
    else:
        fitted = {name: [family.fit(s, section) for s in statistics] for name, family in families.items()}
    held = measure(loaded, plan, held_out, fitted, execution)
    return {name: _described(operators, statistics, held[name]) for name, operators in fitted.items()}


def _sequential(
    loaded: LoadedModel,
    plan: PrunePlan,
    calibration: CalibrationSet,
    held_out: CalibrationSet,
    families: Mapping[str, Family],
    section: RecoverSection,
    execution: Execution,
) -> dict[str, tuple[Operator, ...]]:
    """Every cut behind the repaired ones before it; one pass per operator and cut."""
    if section.per_block:
        raise RecipeError("recover: per_block measures on the dense model.", "Use --statistics dense with it.")
    fitted = {}
    for name, family in families.items():
        request = _request([family], section)

        def fit(
            boundary: Boundary, crossings: Iterator[Crossing], family: Family = family, request: Request = request
        ) -> Operator:
            (statistics,) = request.empty(loaded, [boundary], calibration)
            for batch, x, post, last in crossings:
                statistics.add(batch.sequences, batch.mask, x, post, last)
            operator = family.fit(statistics, section)
            return replace(operator, fit={**operator.fit, **figures(operator, statistics)})

        fitted[name] = fit_sequential(loaded, plan, calibration, held_out, fit, request.inside, execution)
    return fitted


def _request(families: Iterable[Family], section: RecoverSection) -> Request:
    families = list(families)
    return Request(
        frozenset(basis for family in families for basis in family.bases),
        frozenset(need for family in families for need in family.needs),
        FOLDS if section.ridge == "cv" else 1,
    )


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
    family = OPERATORS[base_operator(name)]
    request = _request([family], section)

    def fit(boundary: Boundary, feed: Callable[[BoundaryStatistics], None]) -> Operator:
        (statistics,) = request.empty(loaded, [boundary], calibration)
        feed(statistics)
        operator = family.fit(statistics, section)
        return replace(operator, fit={**operator.fit, **figures(operator, statistics)})

    operators = refit(loaded, plan, calibration, fit, request.inside, section.refit_upstream, execution)
    measured = measure_refit(loaded, OperatorSet(name, operators, plan), held_out, execution)
    return tuple(replace(o, fit={**o.fit, **errors}) for o, errors in zip(operators, measured, strict=True))


def _described(
    operators: Sequence[Operator], statistics: Sequence[BoundaryStatistics], held: Sequence[dict[str, float]]
) -> tuple[Operator, ...]:
    return tuple(
        replace(operator, fit={**operator.fit, **figures(operator, s), **errors})
        for operator, s, errors in zip(operators, statistics, held, strict=True)
    )


def figures(operator: Operator, statistics: BoundaryStatistics) -> dict[str, Any]:
    """Calibration figures of one operator; those that reach inside the last block are measured on its token sample."""
    M = None if operator.matrix is None else torch.as_tensor(operator.matrix).double()
    if operator.scale is not None:
        M = (operator.scale - 1) * torch.eye(statistics.moments.channels).double()
    b = None if operator.bias is None else torch.as_tensor(operator.bias).double()
    inside = reaches_inside(operator)
    sample = statistics.last_block_sample if inside else statistics.sample
    pre, post = sample.pre.double(), sample.post.double()
    last = None
    if inside:
        assert statistics.last_block_weight is not None
        mid, inner = sample.column(2).split([pre.shape[1], len(statistics.last_block_weight)], dim=1)
        bias = statistics.last_block_bias
        last = LastBlock(mid, inner, statistics.last_block_weight.cpu(), None if bias is None else bias.cpu())
    error = post - apply(operator, pre, last)
    measured = float(error.square().sum() / (post - pre).square().sum().clamp_min(torch.finfo(pre.dtype).tiny))
    return {
        "tokens": statistics.moments.tokens,
        "nmse_calibration": measured if inside else statistics.moments.nmse(M, b),
        "relative_error_calibration": float((error.norm(dim=1) / post.norm(dim=1)).mean()),
        "antisymmetric_share": antisymmetric_share(M),
    }


def antisymmetric_share(M: torch.Tensor | None) -> float:
    """``||(M - M')/2||_F / ||M||_F``: 0 for a symmetric matrix, 0.707 for a random one."""
    if M is None or not bool(M.any()):
        return 0.0
    return float(((M - M.T) / 2).norm() / M.norm())
