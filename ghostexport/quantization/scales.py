"""Scales of blocks: from the largest magnitude, or searched so that the layer's output changes least.

The search minimises ``sum_k d_k (W_kn - s q_kn)^2`` in every block, ``d`` the diagonal of ``X'X`` of the linear's input
(ones without calibration): the output's squared error with the inputs taken as uncorrelated. Candidates are fractions
of the largest magnitude; then ``q`` and the least-squares ``s = sum d W q / sum d q^2`` are improved in turn.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ghostexport.quantization.forms import E4M3_MAX, Form

#: Fractions of the largest magnitude that are tried; an outlier is clipped where that helps the others.
FRACTIONS = np.linspace(1.1, 0.55, 23, dtype=np.float32)
REFINEMENTS = 2
#: Weights that a thread searches at once, and threads: they bound the temporaries to some 200 MB whatever the tensor.
_AT_ONCE = 1 << 20
_THREADS = min(4, os.cpu_count() or 1)


def quantize(
    weight: NDArray[Any],
    form: Form,
    block: int | None,
    scale_dtype: np.dtype[Any],
    importance: NDArray[np.float64] | None = None,
    search: bool = True,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float32]]:
    """Quantises ``weight``.

    Args:
        weight: ``[K, N]`` floating.
        form: the form.
        block: rows of ``K`` that share a scale; None for all.
        scale_dtype: dtype of the scales (of the tensor's one float for a double form).
        importance: ``d [K]``; None for ones.
        search: search the scales instead of taking the largest magnitude.

    Returns:
        ``q [K, N]`` in the form's type; scales ``[K / B, N]``, or ``[N]`` per channel, rounded to ``scale_dtype``
        (E4M3 for a double form, E8M0 for powers of two); the tensor's own float ``[]`` of a double form, 1 otherwise.
    """
    inputs, outputs = weight.shape
    size = inputs if block is None else block
    unit = np.float32(1)
    if form.double:
        largest = float(np.abs(weight).max(initial=0).astype(np.float32))
        unit = np.float32(np.asarray(max(largest, 1e-30) / form.reach, scale_dtype))
    q = np.empty((inputs, outputs), form.numpy)
    scale = np.empty((inputs // size, outputs), form.scale_dtype(scale_dtype))
    d = np.ones(inputs, np.float32) if importance is None else _normalised(importance)

    def round_part(part: slice) -> None:
        W = weight[:, part].astype(np.float32).reshape(inputs // size, size, -1)
        D = d.reshape(inputs // size, size, 1)
        s = _searched(W, D, form, unit, scale.dtype) if search else largest_scales(W, form, unit, scale.dtype)
        scale[:, part] = (s / unit).astype(scale.dtype)[:, 0]
        exact = scale[:, None, part].astype(np.float32) * unit  # as the runtime will read it
        q[:, part] = form.encode(W, exact).reshape(inputs, -1)

    step = max(1, _AT_ONCE // inputs)
    with ThreadPoolExecutor(_THREADS) as pool:  # NumPy lets go of the interpreter; parts are independent
        list(pool.map(round_part, [slice(start, min(start + step, outputs)) for start in range(0, outputs, step)]))
    return q, scale[0] if block is None else scale, np.asarray(unit, np.float32)


def dequantize(q: NDArray[Any], scale: NDArray[Any], unit: NDArray[np.float32] | float = 1.0) -> NDArray[np.float32]:
    """``W' = q * s`` as float32 ``[K, N]``; ``scale`` as :func:`quantize` returns it."""
    return np.asarray(q.astype(np.float32) * spread(scale, unit, q.shape[0]), np.float32)


def spread(scale: NDArray[Any], unit: NDArray[np.float32] | float, inputs: int) -> NDArray[np.float32]:
    """``s``, ``[N]`` or ``[K / B, N]``, as float32 ``[K, N]``, the scale of every weight."""
    blocks = scale[None] if scale.ndim == 1 else scale
    return np.repeat(blocks.astype(np.float32) * np.float32(unit), inputs // blocks.shape[0], axis=0)


def relative_error(weight: NDArray[Any], rounded: NDArray[np.float32], importance: NDArray[Any] | None) -> float:
    """``sqrt(sum d (W - W')^2 / sum d W^2)``: relative error of the output for uncorrelated inputs."""
    d = np.ones(len(weight)) if importance is None else importance
    W = weight.astype(np.float32)
    rows = np.einsum("kn,kn->k", W - rounded, W - rounded, dtype=np.float64)
    whole = np.einsum("kn,kn->k", W, W, dtype=np.float64)
    return float(np.sqrt((d @ rows) / max(float(d @ whole), 1e-300)))


def _normalised(importance: NDArray[np.float64]) -> NDArray[np.float32]:
    mean = float(importance.mean())
    # an input that never fired still has a weight; a thousandth keeps its rounding sane without steering the scale
    return np.asarray(importance / mean + 1e-3 if mean > 0 else np.ones_like(importance), np.float32)


def _stored(s: NDArray[np.float32], unit: np.float32, dtype: np.dtype[Any]) -> NDArray[np.float32]:
    """What a scale reads back as after it was stored."""
    if dtype == ml_dtypes.float8_e8m0fnu:
        s = np.maximum(s, np.float32(2.0**-126))  # it has no zero
    limit = E4M3_MAX if dtype == ml_dtypes.float8_e4m3fn else np.inf
    return np.asarray(np.minimum(s / unit, limit).astype(dtype).astype(np.float32) * unit, np.float32)


def largest_scales(W: NDArray[np.float32], form: Form, unit: np.float32, dtype: np.dtype[Any]) -> NDArray[np.float32]:
    """``W [G, B, n]`` -> scales ``[G, 1, n]`` that map each block's largest magnitude to the end of the grid."""
    s = np.abs(W).max(axis=1, keepdims=True) / np.float32(form.grid)
    if form.powers:  # the next above, so that nothing is clipped
        part, exponent = np.frexp(s)
        s = np.ldexp(np.float32(1), exponent - (part == 0.5))
    return _stored(s, unit, dtype)


def _searched(
    W: NDArray[np.float32], d: NDArray[np.float32], form: Form, unit: np.float32, dtype: np.dtype[Any]
) -> NDArray[np.float32]:
    """``W [G, B, n]``, ``d [G, B, 1]`` -> the best scales ``[G, 1, n]`` as they read back."""
    largest = np.abs(W).max(axis=1, keepdims=True) / np.float32(form.grid)
    best = largest_scales(W, form, unit, dtype)
    least = _error(W, d, form, best)
    for fraction in FRACTIONS:
        best, least = _better(W, d, form, _stored(largest * fraction, unit, dtype), best, least)
    for _ in range(REFINEMENTS):
        q = form.nearest(W, best)
        top = (d * W * q).sum(axis=1, keepdims=True)
        bottom = (d * q * q).sum(axis=1, keepdims=True)
        solved = np.where(bottom > 0, np.maximum(top, 0) / np.where(bottom > 0, bottom, 1), best)
        best, least = _better(W, d, form, _stored(solved.astype(np.float32), unit, dtype), best, least)
    return best


def _better(
    W: NDArray[np.float32],
    d: NDArray[np.float32],
    form: Form,
    s: NDArray[np.float32],
    best: NDArray[np.float32],
    least: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    error = _error(W, d, form, s)
    wins = error < least
    return np.where(wins, s, best), np.where(wins, error, least)


def _error(W: NDArray[np.float32], d: NDArray[np.float32], form: Form, s: NDArray[np.float32]) -> NDArray[np.float32]:
    miss = form.nearest(W, s)
    miss *= s
    np.subtract(W, miss, out=miss)
    np.square(miss, out=miss)
    return np.asarray(np.einsum("gbn,gbi->gin", miss, d, optimize=False))
