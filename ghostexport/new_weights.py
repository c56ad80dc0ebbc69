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

from ghostexport.errors import ModelLayoutError

#: Numbers of a parameter that are compared, at most.
COMPARED = 512

#: A fine-tuned parameter is nearer than this to its start, relative to its norm; unrelated ones are near 1.4.
NEAR = 0.5


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


def kept_blocks(distances: NDArray[np.float64], what: str) -> tuple[int, ...]:
    """Which blocks of a dense model those of a cut and tuned one were, the nearest ones in order.

    Args:
        distances: ``[K, L]`` relative distances of K blocks to L dense ones.
        what: that has the K blocks, for the message.

    Raises:
        ModelLayoutError: a block is near none, or their order is another.
    """
    nearest = distances.argmin(axis=1)
    for position, block in enumerate(nearest):
        if not distances[position, block] <= NEAR:
            raise ModelLayoutError(
                f"Block {position} of {what} is near none of the {distances.shape[1]} dense blocks (nearest: block "
                f"{block}, relative distance {distances[position, block]:.2f}).",
                "It was made from another model, or trained far: use the dense model that it comes from.",
            )
    if not (np.diff(nearest) > 0).all():
        raise ModelLayoutError(
            f"The blocks of {what} are nearest to the dense blocks {', '.join(map(str, nearest))}, which is no order "
            "that removing blocks leaves.",
            "Use a checkpoint made by removing blocks of this model.",
        )
    return tuple(int(block) for block in nearest)


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
