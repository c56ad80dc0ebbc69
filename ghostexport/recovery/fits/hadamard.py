"""Orthonormal Hadamard matrices of the sizes language models have, by Paley's and Sylvester's constructions.

Paley (1933), for a prime q and the Legendre symbol chi, Q[i, j] = chi(i - j):

* I,  q = 3 mod 4, order q + 1:      ``H = I + S``,  ``S = [[0, 1], [-1, Q]]``
* II, q = 1 mod 4, order 2 (q + 1):  ``H = S x [[1, 1], [1, -1]] + I x [[1, -1], [-1, -1]]``,  ``S = [[0, 1], [1, Q]]``

Sylvester (1867): ``[[1, 1], [1, -1]]`` Kronecker an order K is an order 2 K.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ghostexport.errors import RecoveryError


def hadamard(size: int) -> NDArray[np.float64]:
    """``H`` ``[size, size]`` with ``H H' = I``; used with row vectors, ``z = x H``.

    The size is written ``K 2^m`` with the smallest order K that Paley's constructions reach.

    Raises:
        RecoveryError: no such K exists (sizes not divisible by 4 among them).
    """
    odd = size
    while odd and odd % 2 == 0:
        odd //= 2
    order = 1 if odd == 1 else 4 * odd
    while size and size % order == 0:
        base = _base(order)
        if base is not None:
            sylvester = _sylvester(size // order)
            return np.ascontiguousarray(np.kron(base, sylvester).T / math.sqrt(size))
        order *= 2
    raise RecoveryError(
        f"No Hadamard matrix is constructed here for hidden size {size}.", "Use linearpatch-diag or ghost instead."
    )


def _base(order: int) -> NDArray[np.float64] | None:
    if order == 1:
        return np.ones((1, 1))
    if _is_prime(order - 1) and (order - 1) % 4 == 3:
        return np.eye(order) + _bordered(order - 1, -1.0)
    if order % 2 == 0 and _is_prime(order // 2 - 1) and (order // 2 - 1) % 4 == 1:
        symmetric = _bordered(order // 2 - 1, 1.0)
        pair, diagonal = np.array([[1.0, 1.0], [1.0, -1.0]]), np.array([[1.0, -1.0], [-1.0, -1.0]])
        return np.kron(symmetric, pair) + np.kron(np.eye(order // 2), diagonal)
    return None


def _bordered(q: int, sign: float) -> NDArray[np.float64]:
    symbol = np.full(q, -1.0)
    symbol[(np.arange(1, q) ** 2) % q] = 1.0
    symbol[0] = 0.0
    matrix = np.zeros((q + 1, q + 1))
    matrix[0, 1:], matrix[1:, 0] = 1.0, sign
    matrix[1:, 1:] = symbol[(np.arange(q)[:, None] - np.arange(q)) % q]
    return matrix


def _sylvester(size: int) -> NDArray[np.float64]:
    matrix: NDArray[np.float64] = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
