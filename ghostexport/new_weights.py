"""Weights of kept blocks that are no longer the dense model's, and what a graph recognises them by: their content.

A graph's initializers need not have the parameters' names, and may be transposed, reshaped or shared. So with every new
weight go some numbers of the *dense* parameter, at fixed places; what of the graph has the same numbers is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Numbers of a parameter that are compared, at most.
COMPARED = 512


@dataclass(frozen=True, eq=False)
class NewWeight:
    """The new value of one parameter.

    Attributes:
        value: as the PyTorch model keeps it (an ``nn.Linear`` ``[out, in]``), float32 or float16.
        known: float32, the numbers at :func:`places` of the parameter that it replaces.
        block: index of its block in the *dense* model; None outside the blocks (embedding, final norm, head).
        twin, twins: it is the ``twin``-th, in the order in which they run, of so many parameters of its block that
            had the same content.
        near: ``known`` is only near what a graph holds: the numbers are the new ones, the dense ones are not at hand.
    """

    value: NDArray[Any]
    known: NDArray[np.float32]
    block: int | None
    twin: int = 0
    twins: int = 1
    near: bool = False


def places(shape: Sequence[int]) -> NDArray[np.int64]:
    """Flat indices of the numbers that are compared: all of a small tensor, else :data:`COMPARED` drawn ones."""
    size = int(np.prod(shape, dtype=np.int64))
    if size <= COMPARED:
        return np.arange(size)
    return np.random.default_rng(0).integers(0, size, COMPARED)


def to_file(weights: Mapping[str, NewWeight]) -> tuple[dict[str, NDArray[Any]], list[dict[str, Any]]]:
    """Tensors by their key in an operator file, and the entries of its header."""
    tensors: dict[str, NDArray[Any]] = {}
    entries = []
    for name, weight in weights.items():
        tensors |= {f"weight.{name}": np.ascontiguousarray(weight.value), f"known.{name}": weight.known}
        own = {key: getattr(weight, key) for key in ("block", "twin", "twins", "near")}
        entries.append({"name": name} | own)
    return tensors, entries


def from_file(tensors: Mapping[str, NDArray[Any]], entries: Sequence[Mapping[str, Any]]) -> dict[str, NewWeight]:
    """The inverse of :func:`to_file`.

    Raises:
        KeyError, ValueError: header and tensors do not belong together.
    """
    found = {}
    for entry in entries:
        own = {key: value for key, value in entry.items() if key != "name"}
        value, known = tensors[f"weight.{entry['name']}"], tensors[f"known.{entry['name']}"]
        if len(known) != len(places(value.shape)):
            raise ValueError(f"{entry['name']} has {len(known)} known numbers")
        found[entry["name"]] = NewWeight(value, known, **own)
    return found
