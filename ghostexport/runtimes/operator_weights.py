"""Operators as the weights of a spliced graph: ``ghost.{b}.delta`` ``[C, C]`` and ``ghost.{b}.bias`` ``[C]``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ghostexport.errors import BuildError
from ghostexport.operators import OperatorSet


def operator_weights(
    spliced: Mapping[str, tuple[int, ...]], operators: OperatorSet, engine: Path
) -> dict[str, NDArray[Any]]:
    """New values of the initializers in ``spliced``, by name, in the operators' own precision.

    Args:
        spliced: operator initializers of the engine: name -> shape.
        operators: what to put there; low-rank and diagonal ones are multiplied out.
        engine: for messages.

    Raises:
        BuildError: the engine has no operator, or places, shapes, folds or a bias do not fit.
    """
    if not spliced:
        raise BuildError(f"{engine} has no operator to swap.", "Swap an engine of a variant with operators.")
    places = {int(name.split(".")[1]) for name in spliced}
    if places != set(range(len(operators.operators))):
        raise BuildError(
            f"{engine} has operators at boundaries {sorted(places)}, but {operators.name!r} has "
            f"{len(operators.operators)} of them.",
            "Use operators of the same plan.",
        )
    unknown = sorted(name for name in spliced if name.split(".")[-1] not in ("delta", "bias"))
    if unknown:
        raise BuildError(f"{engine} holds {', '.join(unknown)}, which cannot be swapped.", "Build the variant instead.")
    weights: dict[str, NDArray[Any]] = {}
    for b, operator in enumerate(operators.operators):
        if operator.folds:
            raise BuildError(
                f"Operator {operators.name!r} changes weights of surviving blocks; it cannot be swapped.",
                "Build an engine of that variant.",
            )
        matrix, bias = operator.matrix, operator.bias
        delta_name, bias_name = f"ghost.{b}.delta", f"ghost.{b}.bias"
        if bias is not None and bias_name not in spliced:
            raise BuildError(
                f"Operator {operators.name!r} has a bias at boundary {b}, but {engine} has no place for one.",
                "Build an engine of that variant.",
            )
        if matrix is not None and delta_name not in spliced:
            raise BuildError(f"{engine} has no {delta_name}.", "Build an engine of that variant.")
        if delta_name in spliced:
            weights[delta_name] = np.zeros(spliced[delta_name], np.float32) if matrix is None else matrix
        if bias_name in spliced:
            weights[bias_name] = np.zeros(spliced[bias_name], np.float32) if bias is None else bias
    for name, array in weights.items():
        if array.shape != tuple(spliced[name]):
            raise BuildError(
                f"{name} of {operators.name!r} has shape {list(array.shape)}, the engine's has {list(spliced[name])}.",
                "Use operators fitted on the same model.",
            )
    return weights
