"""The constrained ladder: how well ever freer maps of the stream could do at a cut, from moments alone.

::

    scalar      alpha I         alpha = <X_pre, X_post> / ||X_pre||^2
    diagonal    diag(d)         d_k = (X_pre' X_post)_kk / G_kk
    symmetric   W = W'          in the eigenbasis G = Q diag(l) Q':   M_ij = (Q'(B + B')Q)_ij / (l_i + l_j)
    procrustes  alpha R         U S V' = svd(X_pre' X_post), R = U V', alpha = tr S / ||X_pre||^2
    full        any W           M = G^-1 B (minimum norm where G is singular)

Each is the least-squares best of its kind on the calibration tokens. Its error on held-out tokens tells what a freer
map really buys: LinearPatch's maps are symmetric (its rotated form has C degrees of freedom), ghost's are full.
"""

from __future__ import annotations

import torch

from ghostexport.moments import BoundaryMoments
from ghostexport.recovery.solving import solve_truncated


def ladder(moments: BoundaryMoments) -> dict[str, torch.Tensor]:
    """``M = W - I`` ``[C, C]`` float64 of every rung, from the most constrained to the full map."""
    identity = torch.eye(moments.channels).to(moments.gram)
    return {
        "scalar": (best_scalar(moments) - 1) * identity,
        "diagonal": torch.diag(best_diagonal(moments) - 1),
        "symmetric": best_symmetric(moments.gram, moments.cross),
        "procrustes": best_procrustes(moments) - identity,
        "full": solve_truncated(moments.gram, moments.cross)[0],
    }


def best_scalar(moments: BoundaryMoments) -> float:
    """``alpha``; 1 where the stream is zero."""
    square = float(moments.gram.trace())
    return 1 + float(moments.cross.trace()) / square if square else 1.0


def best_diagonal(moments: BoundaryMoments) -> torch.Tensor:
    """``d`` ``[C]``; 1 where a channel is zero."""
    square = moments.gram.diagonal()
    change = moments.cross.diagonal() / square
    return 1 + torch.where(square > 0, change, torch.zeros_like(change))


def best_symmetric(gram: torch.Tensor, cross: torch.Tensor) -> torch.Tensor:
    """``argmin ||X M - Delta||`` over ``M = M'``: ``G M + M G = B + B'``, solved in the eigenbasis of ``G``.

    Directions that ``G`` does not have (sums of eigenvalues at rounding level) stay as they are.
    """
    values, Q = torch.linalg.eigh(gram)
    right = Q.T @ (cross + cross.T) @ Q
    sums = values[:, None] + values[None]
    floor = torch.finfo(gram.dtype).eps * len(gram) * values[-1]
    solution = Q @ torch.where(sums > floor, right / sums, torch.zeros_like(right)) @ Q.T
    symmetric: torch.Tensor = (solution + solution.T) / 2
    return symmetric


def best_procrustes(moments: BoundaryMoments) -> torch.Tensor:
    """``alpha R`` with ``R`` orthogonal."""
    U, S, Vt = torch.linalg.svd(moments.gram + moments.cross)
    scaled: torch.Tensor = float(S.sum() / moments.gram.trace()) * (U @ Vt)
    return scaled
