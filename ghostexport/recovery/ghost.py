"""``ghost``: the least-squares operator of a removed run (Ghosted Layers, 2605.15491, Appendix H).

::

    M = argmin ||X_pre M - Delta||^2 + ridge ||M||^2  =  (G + ridge I)^-1 B         W = I + M
"""

from __future__ import annotations

import torch

from ghostexport.errors import RecoveryError
from ghostexport.operators import Operator
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.passes import BoundaryStatistics


def fit_ghost(statistics: BoundaryStatistics, section: RecoverSection) -> Operator:
    """Solves the ridge normal equations in float64; the delta is stored as float32.

    Raises:
        RecoveryError: the Gram matrix is singular to working precision, or the solution is not finite.
    """
    moments = statistics.moments
    M = solve_ridge(moments.gram, moments.cross, section.ridge, moments.tokens)
    return Operator(
        statistics.boundary,
        "ghost",
        delta=M.float().cpu().numpy(),
        fit={"ridge": section.ridge, "condition": condition(moments.gram, section.ridge)},
    )


def solve_ridge(gram: torch.Tensor, cross: torch.Tensor, ridge: float, tokens: int) -> torch.Tensor:
    """``(G + ridge I)^-1 B`` by Cholesky, whose accuracy does not suffer from channels of very different scale."""
    system = gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor, failed = torch.linalg.cholesky_ex(system)
    solution = torch.cholesky_solve(cross, factor)
    if int(failed) or not bool(torch.isfinite(solution).all()):
        raise RecoveryError(
            f"The activations before the cut do not determine an operator: condition number "
            f"{condition(gram, ridge):.1e} from {tokens} tokens for {len(gram)} channels.",
            "Use more calibration tokens or a larger ridge.",
        )
    return solution


def condition(gram: torch.Tensor, ridge: float) -> float:
    """Condition number of ``G + ridge I``; the smallest eigenvalue is floored at rounding level."""
    eigenvalues = torch.linalg.eigvalsh(gram)
    largest = float(eigenvalues[-1])
    smallest = max(float(eigenvalues[0]), largest * torch.finfo(gram.dtype).eps) + ridge
    return (largest + ridge) / smallest if smallest > 0 else 1.0
