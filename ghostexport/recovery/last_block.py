"""The inside of the last kept block before a cut, for repairs that reach into its MLP.

::

    x_s = x_mid + m h V0      x_mid: stream between attention and MLP; h [n, I]: input of the down-projection V0 [I, C]
                              m: 1, or what the model multiplies it by
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import nn

from ghostexport.errors import ModelLayoutError, RecoveryError
from ghostexport.models import Addition, Anatomy, LoadedModel, Shelf, find_anatomies, find_mid, right_multiply

_REMEDY = "Use an operator that acts at the boundary, such as ghost-weighted or ghost-weighted+refit; best finds one."


@dataclass(frozen=True, eq=False)
class LastBlock:
    """Values of some tokens inside the block.

    Attributes:
        mid: ``x_mid`` ``(..., C)``.
        inner: ``h`` ``(..., I)``.
        weight: ``V0`` ``[I, C]``, right-multiply.
        bias: ``[C]`` of the same layer, or None.
        multiplier: of what the layer returns, before it is added (Granite).
    """

    mid: torch.Tensor
    inner: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    multiplier: float = 1.0

    @staticmethod
    def parameters(projection: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``V0`` and its bias, float64."""
        bias = None if projection.bias is None else projection.bias.double().to(device)
        return right_multiply(projection).double().to(device), bias

    def __getitem__(self, mask: Any) -> LastBlock:
        return replace(self, mid=self.mid[mask], inner=self.inner[mask])

    def put(self, shelf: Shelf, key: int) -> None:
        """Puts the values away."""
        shelf.put((key, "mid"), self.mid)
        shelf.put((key, "inner"), self.inner)

    def taken(self, shelf: Shelf, key: int) -> LastBlock:
        """The same block with the values put away under a key."""
        return replace(self, mid=shelf.take((key, "mid")), inner=shelf.take((key, "inner")))

    @property
    def regressors(self) -> torch.Tensor:
        """``[x_mid, h]`` ``(..., C + I)`` float64, ``h`` times the multiplier."""
        return torch.cat([self.mid.double(), self.multiplier * self.inner.double()], dim=-1)


def last_kept(loaded: LoadedModel, block: int, what: str) -> tuple[Addition, nn.Module]:
    """What the MLP of the last kept block before a cut adds, and the module that reads the block's ``x_mid``.

    Raises:
        RecoveryError: the block is -1 (nothing is kept before the cut), its MLP adds no linear layer's result (mixture
            of experts, a norm in between), or there is no stream between attention and MLP.
    """
    if block < 0:
        raise RecoveryError(f"{what} needs a kept block before the cut; block 0 is removed.", _REMEDY)
    try:
        anatomy = find_anatomies(loaded.model, [block])[block]
        why = why_not_split(anatomy)
        if not why:
            assert anatomy.mlp is not None
            return anatomy.mlp, find_mid(loaded.model, block)
    except ModelLayoutError as error:
        raise RecoveryError(f"{what} does not apply to this model: {error.message}", _REMEDY) from error
    raise RecoveryError(f"{what} does not apply to {type(loaded.model).__name__}: block {block} {why}.", _REMEDY)


def why_not_split(anatomy: Anatomy) -> str:
    """Why a block's down-projection cannot be solved together with the stream before its MLP; empty where it can."""
    if not anatomy.complete or anatomy.others:
        return "adds something else to its stream than the results of attention and MLP"
    if anatomy.mid is None or anatomy.mlp is None:
        return "has no stream between attention and MLP: they run in parallel"
    if anatomy.mlp.projection is None:
        return "has no single MLP output projection (a mixture of experts)"
    return "has a norm between its MLP's projection and the residual addition" if anatomy.mlp.norm is not None else ""


@contextmanager
def tapped(loaded: LoadedModel, blocks: list[int], what: str) -> Iterator[dict[int, LastBlock]]:
    """While open, the returned dict holds the newest values inside each of ``blocks`` after it ran.

    Raises:
        RecoveryError: as :func:`last_kept`.
    """
    seen: dict[int, LastBlock] = {}
    handles = []
    try:
        for block in blocks:
            mlp, mid = last_kept(loaded, block, what)
            handles += _tap(block, mid, mlp, seen, loaded.device)
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _tap(block: int, mid: Any, mlp: Addition, seen: dict[int, LastBlock], device: torch.device) -> list[Any]:
    with align_module_device(mlp.projection):  # parts of a split model may be on another device or on disk
        weight, bias = LastBlock.parameters(mlp.projection, device)
    stream: list[torch.Tensor] = []

    def read_mid(module: Any, args: tuple[Any, ...]) -> None:
        stream[:] = [args[0].to(device).clone()]  # some models go on to add to it in place

    def read_inner(module: Any, args: tuple[Any, ...]) -> None:
        inner = args[0].to(device).reshape(*stream[0].shape[:-1], -1)  # some models flatten tokens inside the MLP
        seen[block] = LastBlock(stream[0], inner, weight, bias, mlp.multiplier)

    return [mid.register_forward_pre_hook(read_mid), mlp.projection.register_forward_pre_hook(read_inner)]
