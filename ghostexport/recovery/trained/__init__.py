"""Operators that are trained on from a closed form, with gradients."""

import math


def on_cosine(first: float, last: float, progress: float) -> float:
    """A learning rate that falls from ``first`` to ``last`` on half a cosine, ``progress`` running from 0 to 1."""
    return last + (first - last) * (1 + math.cos(math.pi * progress)) / 2
