"""Operators that are trained on from a closed form, with gradients."""
