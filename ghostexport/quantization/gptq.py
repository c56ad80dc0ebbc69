"""Rounding one input after the other, each error made good by the inputs still to come (GPTQ, arXiv 2210.17323).

The scales are given; what is minimised is the output's squared error on the calibration text, per output ``n``::

    e_n' H e_n,   e_n = w_n - s_n q_n,   H = X'X   [K, K]

With ``U'U = (H + damping)^-1``, ``U`` upper triangular, input ``k`` is rounded and the others change by
``w_j -= (w_k - s_k q_k) U_kj / U_kk`` for ``j > k``. Inputs go in the order of falling ``H_kk``. An output for which
that error is not below nearest rounding's keeps nearest rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ghostexport.quantization.forms import Form
from ghostexport.quantization.scales import spread

#: Added to the diagonal of ``H``, as a share of its mean.
DAMPING = 0.01
#: Inputs whose errors reach the rest in one product, and weights handled at once (they bound the temporaries).
_LAZY = 128
_AT_ONCE = 1 << 24


def round_in_turn(
    weight: NDArray[Any],
    q: NDArray[Any],
    scale: NDArray[Any],
    unit: NDArray[np.float32] | float,
    form: Form,
    gram: NDArray[Any],
) -> tuple[NDArray[Any], float, float]:
    """Rounds anew with the scales of :func:`ghostexport.quantization.scales.quantize`.

    Args:
        weight: ``[K, N]`` floating.
        q, scale, unit: nearest rounding's, as ``quantize`` returned them.
        form: their form.
        gram: ``H [K, K]``.

    Returns:
        ``q [K, N]``; the output's relative error ``sqrt(sum e'He / sum w'Hw)`` with nearest rounding, and with this.
    """
    factor = _factor(gram)
    if factor is None:
        return q, 0.0, 0.0
    order, upper = factor
    new = np.array(q)
    whole = before = after = 0.0
    step = max(1, _AT_ONCE // len(weight))
    for start in range(0, weight.shape[1], step):
        part = slice(start, min(start + step, weight.shape[1]))
        W = weight[:, part].astype(np.float32)
        S = spread(scale[..., part], unit, len(W))
        Q = np.empty_like(W)
        Q[order] = _round(W[order], S[order], upper, form)
        nearest = q[:, part].astype(np.float32)
        old_error, new_error = _errors(W - S * nearest, gram), _errors(W - S * Q, gram)
        better = new_error < old_error
        new[:, part] = np.where(better, Q, nearest).astype(form.numpy)
        whole += float(_errors(W, gram).sum())
        before += float(old_error.sum())
        after += float(np.where(better, new_error, old_error).sum())
    return new, _relative(before, whole), _relative(after, whole)


def _factor(gram: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.float32]] | None:
    """The order of the inputs and ``U`` in it; None where no input ever fired."""
    diagonal = np.diagonal(gram).astype(np.float64)
    if not diagonal.any():
        return None
    order = np.argsort(-diagonal, kind="stable")
    H = gram[np.ix_(order, order)].astype(np.float64)
    H[np.diag_indices_from(H)] += DAMPING * diagonal.mean()
    return order, np.linalg.cholesky(np.linalg.inv(H)).T.astype(np.float32)


def _round(W: NDArray[np.float32], S: NDArray[np.float32], U: NDArray[np.float32], form: Form) -> NDArray[np.float32]:
    """``W [K, n]`` in the order of ``U``, changed in place -> ``q``."""
    Q = np.empty_like(W)
    for start in range(0, len(W), _LAZY):
        stop = min(start + _LAZY, len(W))
        E = np.empty((stop - start, W.shape[1]), np.float32)
        for k in range(start, stop):
            Q[k] = form.nearest(W[k], S[k])
            E[k - start] = (W[k] - S[k] * Q[k]) / U[k, k]
            W[k + 1 : stop] -= U[k, k + 1 : stop, None] * E[k - start]
        W[stop:] -= U[start:stop, stop:].T @ E
    return Q


def _errors(E: NDArray[np.float32], gram: NDArray[Any]) -> NDArray[np.float64]:
    """``e_n' H e_n`` of every column."""
    return np.asarray(np.einsum("kn,kn->n", E, gram.astype(np.float32, copy=False) @ E, dtype=np.float64))


def _relative(part: float, whole: float) -> float:
    return float(np.sqrt(max(part, 0.0) / whole)) if whole > 0 else 0.0
