"""The linear solves of recovery, in float64 from sufficient statistics."""

from __future__ import annotations

import torch

from ghostexport.errors import RecoveryError

#: Relative to the largest singular value of ``X_pre``, as published.
SVD_THRESHOLD = 1e-6


def solve_ridge(gram: torch.Tensor, cross: torch.Tensor, ridge: float, tokens: int) -> torch.Tensor:
    """``(G + ridge I)^-1 B`` by Cholesky, whose accuracy does not suffer from channels of very different scale."""
    system = gram.clone()
    system.diagonal().add_(ridge)
    factor, failed = torch.linalg.cholesky_ex(system)
    del system  # of three copies of a large G, two at a time
    solution = torch.cholesky_solve(cross, factor)
    if int(failed) or not bool(torch.isfinite(solution).all()):
        raise RecoveryError(
            f"The activations before the cut do not determine an operator: condition number "
            f"{condition(gram, ridge):.1e} from {tokens} tokens for {len(gram)} channels.",
            "Use more calibration tokens or a larger ridge.",
        )
    return solution


def solve_truncated(gram: torch.Tensor, cross: torch.Tensor) -> tuple[torch.Tensor, int]:
    """``X^+ Delta`` from ``G = X'X`` and ``B = X'Delta``, and the number of singular directions kept.

    Raises:
        RecoveryError: the solution is not finite.
    """
    eigenvalues, Q = torch.linalg.eigh(gram)
    keep = eigenvalues > SVD_THRESHOLD**2 * eigenvalues[-1]
    Q = Q[:, keep]
    solution = (Q / eigenvalues[keep]) @ (Q.T @ cross)
    if not bool(torch.isfinite(solution).all()):
        raise RecoveryError("The pseudo-inverse of the activations is not finite.", "Use more calibration tokens.")
    return solution, int(keep.sum())


def condition(gram: torch.Tensor, ridge: float) -> float:
    """Condition number of ``G + ridge I``; the smallest eigenvalue is floored at rounding level."""
    eigenvalues = torch.linalg.eigvalsh(gram)
    largest = float(eigenvalues[-1])
    smallest = max(float(eigenvalues[0]), largest * torch.finfo(gram.dtype).eps) + ridge
    return (largest + ridge) / smallest if smallest > 0 else 1.0
