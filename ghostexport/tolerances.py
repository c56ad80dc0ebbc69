"""How far the outputs of two implementations of one model may be apart, by dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """What still counts as equal.

    Attributes:
        relative: largest absolute error of an output over the standard deviation of the reference output.
        kl: mean KL(reference || candidate) of the next-token distributions, nats per token.
    """

    relative: float
    kl: float


TOLERANCES: Mapping[str, Tolerance] = {
    # order of summation only; SmolLM2-135M shows 3e-5 and 3e-11, and KL grows with the square of the error
    "float32": Tolerance(relative=5e-4, kl=1e-8),
    # 11-bit mantissa, rounded at other places on either side; tiny models show 1e-2 and 5e-6
    "float16": Tolerance(relative=0.1, kl=1e-3),
}

#: For inputs that are rounded: where sums differ in their last bits, an input falls on the other side of a step.
ROUNDED = Tolerance(relative=0.2, kl=1e-3)

#: For the float32 twin of a bfloat16 graph: exporters round a model's Python scalars (Granite's multipliers, the limits
#: of gpt-oss) to 8 bits, so up to 2^-9 = 0.002 of their value, and PyTorch does not. Tiny models show 7e-3 and 9e-7.
ROUNDED_SCALARS = Tolerance(relative=2e-2, kl=1e-5)
