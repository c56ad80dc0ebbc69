"""Operators as the weights of a spliced graph: ``ghost.{b}.delta`` ``[C, C]``, ``.bias`` ``[C]``, other forms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ghostexport.errors import BuildError
from ghostexport.operators import Operator, OperatorSet


def operator_weights(
    spliced: Mapping[str, tuple[int, ...]], operators: OperatorSet, engine: Path
) -> dict[str, NDArray[Any]]:
    """New values of the initializers in ``spliced``, by name, in the operators' own precision.

    A dense place ``ghost.{b}.delta`` takes any operator (low-rank and diagonal ones are multiplied out); factors and a
    diagonal take only their own form; a bias the new operator lacks becomes zero.

    Args:
        spliced: operator initializers of the engine: name -> shape.
        operators: what to put there.
        engine: for messages.

    Raises:
        BuildError: the engine has no operator, or places, forms, shapes, folds or a bias do not fit.
    """
    if not spliced:
        raise BuildError(f"{engine} has no operator to swap.", "Swap an engine of a variant with operators.")
    places = {int(name.split(".")[1]) for name in spliced}
    if not places <= set(range(len(operators.operators))):
        raise BuildError(
            f"{engine} has operators at boundaries {sorted(places)}, {operators.name!r} is for {operators.plan}.",
            "Use operators of the same plan.",
        )
    weights: dict[str, NDArray[Any]] = {}
    for b, operator in enumerate(operators.operators):
        prefix, offered = f"ghost.{b}.", _forms(operator)
        own = {name.removeprefix(prefix): shape for name, shape in spliced.items() if name.startswith(prefix)}
        needed = _stored(operator)
        if operator.matrix is not None and "delta" in own:  # multiplied out
            needed = {"delta"} | needed & {"bias"}
        if operator.folds or not needed <= own.keys():
            what = "changes weights of surviving blocks" if operator.folds else f"needs {', '.join(sorted(needed))}"
            raise BuildError(
                f"Operator {operators.name!r} {what} at boundary {b}; {engine} has {', '.join(sorted(own)) or 'none'}.",
                "Build an engine of that variant.",
            )
        for key, shape in own.items():
            array = offered.get(key)
            weights[prefix + key] = np.zeros(shape, np.float32) if array is None else array
    for name, array in weights.items():
        if array.shape != tuple(spliced[name]):
            raise BuildError(
                f"{name} of {operators.name!r} has shape {list(array.shape)}, the engine's has {list(spliced[name])}.",
                "Use operators fitted on the same model, of the same rank.",
            )
    return weights


def _forms(operator: Operator) -> dict[str, NDArray[Any] | None]:
    """Every spelling of an operator by initializer suffix."""
    factor_u, factor_v = operator.factors or (None, None)
    return {
        "delta": operator.matrix,
        "factor_u": factor_u,
        "factor_v": factor_v,
        "diagonal": operator.diagonal,
        "bias": operator.bias,
    }


def _stored(operator: Operator) -> set[str]:
    """The suffixes under which the operator is stored."""
    fields = {"delta": operator.delta, "diagonal": operator.diagonal, "bias": operator.bias}
    stored = {key for key, array in fields.items() if array is not None}
    return stored | ({"factor_u", "factor_v"} if operator.factors is not None else set())
