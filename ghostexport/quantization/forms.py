"""The forms a weight can take: grid, scales, and the ONNX types that hold them. One table, one row a form.

A weight ``W [K, N]`` (inputs x outputs) is cut along ``K`` into blocks of ``B``; with ``s [K / B, N]``::

    q = round(W / s) onto the grid         W' = q * s

``block None`` is one block of all of ``K``: a scale per output channel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

#: Largest finite value of the scales of NVFP4, which are E4M3 themselves.
E4M3_MAX = 448.0


@dataclass(frozen=True)
class Form:
    """One way to hold a weight.

    Attributes:
        name: in recipes, and the suffix of a variant (``ghost.int4``).
        dtype: ONNX type of ``q``.
        grid: largest magnitude of ``q`` that scales map the largest weight to.
        low: smallest value of the grid (two's complement has one more below zero).
        blocks: block sizes in order of preference; None is a scale per output channel. Blocks come first for int8,
            too: ONNX Runtime fuses only those into its kernels (SmolLM2 cut by 7 of 30 blocks decodes 2.6 times as fast
            as the dense float graph on a CPU, with scales per channel 2.1).
        opset: smallest opset whose ``DequantizeLinear`` takes it.
        double: the scales are quantised too (E4M3 times one float per tensor).
        powers: the scales are powers of two (E8M0, held as its eight bits), unpacked by TensorRT's own operator.
        mantissa: of a float: bits of its mantissa, and its smallest normal exponent; None for an integer.
    """

    name: str
    dtype: ir.DataType
    grid: float
    low: float
    blocks: tuple[int | None, ...]
    opset: int
    double: bool = False
    powers: bool = False
    mantissa: tuple[int, int] | None = None

    def scale_dtype(self, stream: np.dtype[Any]) -> np.dtype[Any]:
        """What a scale is rounded to where the weight meets a stream of that dtype."""
        return np.dtype(ml_dtypes.float8_e8m0fnu if self.powers else ml_dtypes.float8_e4m3fn if self.double else stream)

    @property
    def reach(self) -> float:
        """Largest magnitude of a tensor whose own float is 1."""
        return self.grid * (E4M3_MAX if self.double else 1)

    @property
    def numpy(self) -> np.dtype[Any]:
        return self.dtype.numpy()

    def block_for(self, inputs: Iterable[int]) -> int | None:
        """The first of ``blocks`` that divides every one of ``inputs``.

        Raises:
            ValueError: none does.
        """
        sizes = sorted(set(inputs))
        for block in self.blocks:
            if block is None or all(size % block == 0 for size in sizes):
                return block
        raise ValueError(f"no block of {self.name} ({', '.join(map(str, self.blocks))}) divides {sizes}")

    def nearest(self, weight: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.float32]:
        """Nearest grid value of ``weight / scale`` (ties to even), clipped, as float32; shapes broadcast."""
        ratio = weight / np.where(scale == 0, np.float32(np.inf), scale)
        np.clip(ratio, self.low, self.grid, out=ratio)
        if self.mantissa is None:
            return np.rint(ratio, out=ratio)
        bits, smallest = self.mantissa
        tiny = np.float32(2.0 ** (bits - smallest))  # below 2^smallest the grid is even
        even = np.rint(ratio * tiny) / tiny
        drop = np.uint32(23 - bits)
        raw = ratio.view(np.uint32)
        raw += ((raw >> drop) & np.uint32(1)) + np.uint32((1 << (22 - bits)) - 1)
        raw &= ~np.uint32((1 << (23 - bits)) - 1)
        return np.where(np.abs(even) <= np.float32(2.0**smallest), even, ratio)

    def encode(self, weight: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[Any]:
        """:meth:`nearest` in the form's own type."""
        return self.nearest(weight, scale).astype(self.numpy)


FORMS: Mapping[str, Form] = {
    "int8": Form("int8", ir.DataType.INT8, 127, -127, (128, 64, 32, 16, None), 21),
    "int4": Form("int4", ir.DataType.INT4, 7, -8, (128, 64, 32, 16), 21),
    "fp8": Form("fp8", ir.DataType.FLOAT8E4M3FN, E4M3_MAX, -E4M3_MAX, (None,), 21, mantissa=(3, -6)),
    "mxfp8": Form("mxfp8", ir.DataType.FLOAT8E4M3FN, E4M3_MAX, -E4M3_MAX, (32,), 21, powers=True, mantissa=(3, -6)),
    "nvfp4": Form("nvfp4", ir.DataType.FLOAT4E2M1, 6, -6, (16,), 23, double=True, mantissa=(1, 0)),
}

#: Operators that make a weight of its numbers and scales. The second is TensorRT's, of domain ``trt``, for MXFP8, whose
#: scales in ONNX's own type (E8M0) its parser does not read.
UNPACK, UNPACK_MX = "DequantizeLinear", "TRT_MXFP8DequantizeLinear"

#: dtypes a scale can have, by the dtype of the stream that the weight meets.
SCALE_DTYPES: Mapping[ir.DataType, np.dtype[Any]] = {
    ir.DataType.FLOAT: np.dtype(np.float32),
    ir.DataType.FLOAT16: np.dtype(np.float16),
    ir.DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
