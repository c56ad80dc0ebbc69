"""``--rank R``: the best operator of rank R, for small devices (reduced-rank regression, Izenman 1975).

::

    V_r = top-r eigenvectors of M'SM     M_r = (M V_r) V_r'        S = G + lambda I, the metric of the fit

``||X M - X M_r||^2`` then equals the Eckart-Young bound of ``S^(1/2) M``: no map of rank r fits better. A plain SVD of
``M`` ignores how often each direction is used.
"""

from __future__ import annotations

from typing import TypedDict

import torch

from ghostexport.errors import RecoveryError
from ghostexport.operators import FloatArray


class LinearForm(TypedDict, total=False):
    """The arguments of an ``Operator`` that hold its matrix."""

    delta: FloatArray
    factors: tuple[FloatArray, FloatArray]


def require_rank(rank: int | None, channels: int) -> None:
    """Raises RecoveryError where an operator of this rank has more columns than the stream has channels."""
    if rank is not None and rank > channels:
        raise RecoveryError(f"Rank {rank} exceeds the hidden size {channels}.", "Choose a smaller --rank.")


def linear_form(M: torch.Tensor, metric: torch.Tensor, rank: int | None) -> LinearForm:
    """``M`` ``[C, C]`` as a float32 ``delta``, or as factors of the given rank under the metric ``S`` ``[C, C]``."""
    if rank is None:
        return {"delta": M.float().cpu().numpy()}
    U, V = reduced_rank(M, metric, rank)
    return {"factors": (U.float().cpu().numpy(), V.float().cpu().numpy())}


def reduced_rank(M: torch.Tensor, metric: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``U`` ``[C, r]`` and ``V`` ``[r, C]`` with ``U V`` nearest to ``M`` under the metric; ``r`` is at most ``C``."""
    _, vectors = torch.linalg.eigh(M.T @ metric @ M)
    top = vectors[:, -rank:].flip(1)
    return M @ top, top.T
