"""Operators: what is put at a cut so that the pruned model behaves like the dense one. One file per family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ghostexport.calibration import CalibrationSet
from ghostexport.models import LoadedModel
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import Execution, RecoverSection, require_name
from ghostexport.recovery.ghost import fit_ghost
from ghostexport.recovery.linearpatch import fit_diag, fit_rotate
from ghostexport.recovery.passes import Basis, BoundaryStatistics, apply, gather, measure

Fit = Callable[[BoundaryStatistics, RecoverSection], Operator]


@dataclass(frozen=True)
class Family:
    """How one kind of operator is made.

    Attributes:
        fit: from a boundary's statistics to its operator.
        bases: magnitude statistics that it needs besides the moments.
    """

    fit: Fit
    bases: tuple[Basis, ...] = ()


OPERATORS: dict[str, Family] = {
    "ghost": Family(fit_ghost),
    "linearpatch-diag": Family(fit_diag, bases=("identity",)),
    "linearpatch-rotate": Family(fit_rotate, bases=("hadamard",)),
}


def recover(
    loaded: LoadedModel,
    plan: PrunePlan,
    calibration: CalibrationSet,
    held_out: CalibrationSet,
    section: RecoverSection,
    execution: Execution | None = None,
) -> dict[str, OperatorSet]:
    """Fits every operator of the recipe at every boundary, from one pass of the dense model over the calibration set.

    A second pass over the held-out set measures them. Figures of the fit (``Operator.fit``): ``nmse_calibration`` and
    ``nmse_held_out`` (:meth:`BoundaryMoments.nmse`), ``relative_error_calibration`` (on a fixed sample of tokens) and
    ``relative_error_held_out`` (mean over tokens of ``||error|| / ||x_post||``), ``antisymmetric_share``
    ``||(M - M')/2|| / ||M||``, ``tokens``, and what the family itself reports (``condition``, ``ridge``).

    Returns:
        Operator sets by operator name, in the recipe's order.

    Raises:
        RecipeError: unknown operator.
        CalibrationError: too few tokens, tokens that do not suit the model, or non-finite activations.
        RecoveryError: a fit is singular, or an operator does not apply to this model.
    """
    execution = execution or Execution()
    for name in section.operators:
        require_name(name, OPERATORS, "operator")
    if not plan.removed:
        return {name: OperatorSet(name, (), plan, calibration.sha256) for name in section.operators}
    for tokens in (calibration, held_out):
        tokens.require_fits(loaded.vocab_size, loaded.max_length)
    calibration.require_tokens_for(loaded.hidden_size, execution)
    families = {name: OPERATORS[name] for name in section.operators}
    bases = [basis for family in families.values() for basis in family.bases]
    statistics = gather(loaded, plan, calibration, bases, execution)
    fitted = {name: [family.fit(s, section) for s in statistics] for name, family in families.items()}
    held = measure(loaded, plan, held_out, fitted, execution)
    return {
        name: OperatorSet(name, _described(operators, statistics, held[name]), plan, calibration.sha256)
        for name, operators in fitted.items()
    }


def _described(
    operators: Sequence[Operator], statistics: Sequence[BoundaryStatistics], held: Sequence[dict[str, float]]
) -> tuple[Operator, ...]:
    return tuple(
        replace(operator, fit={**operator.fit, **figures(operator, s), **errors})
        for operator, s, errors in zip(operators, statistics, held, strict=True)
    )


def figures(operator: Operator, statistics: BoundaryStatistics) -> dict[str, Any]:
    """Calibration figures of one operator."""
    moments, sample = statistics.moments, statistics.sample
    M = None if operator.matrix is None else torch.as_tensor(operator.matrix).double()
    b = None if operator.bias is None else torch.as_tensor(operator.bias).double()
    error = sample.post.double() - apply(operator, sample.pre.double())
    return {
        "tokens": moments.tokens,
        "nmse_calibration": moments.nmse(M, b),
        "relative_error_calibration": float((error.norm(dim=1) / sample.post.double().norm(dim=1)).mean()),
        "antisymmetric_share": antisymmetric_share(M),
    }


def antisymmetric_share(M: torch.Tensor | None) -> float:
    """``||(M - M')/2||_F / ||M||_F``: 0 for a symmetric matrix, 0.707 for a random one."""
    if M is None or not bool(M.any()):
        return 0.0
    return float(((M - M.T) / 2).norm() / M.norm())
