"""The inside of the last kept block before a cut, for repairs that reach into its MLP.

::

    x_s = x_mid + h V0        x_mid: stream between attention and MLP; h [n, I]: input of the down-projection V0 [I, C]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import nn

from ghostexport.errors import ModelLayoutError, RecoveryError
from ghostexport.models import Anatomy, LoadedModel, find_mid, find_projections, right_multiply

_REMEDY = "Use an operator that acts at the boundary, such as ghost-weighted or ghost-weighted+refit."
_REMEDY_ADDITIVE = "Use an operator that acts at the boundary, without +refit, such as ghost-weighted."


@dataclass(frozen=True, eq=False)
class LastBlock:
    """Values of some tokens inside the block.

    Attributes:
        mid: ``x_mid`` ``(..., C)``.
        inner: ``h`` ``(..., I)``.
        weight: ``V0`` ``[I, C]``, right-multiply.
        bias: ``[C]`` of the same layer, or None.
    """

    mid: torch.Tensor
    inner: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __getitem__(self, mask: Any) -> LastBlock:
        return LastBlock(self.mid[mask], self.inner[mask], self.weight, self.bias)

    @property
    def regressors(self) -> torch.Tensor:
        """``[x_mid, h]`` ``(..., C + I)`` float64."""
        return torch.cat([self.mid.double(), self.inner.double()], dim=-1)


def additive_projections(loaded: LoadedModel, block: int, what: str) -> Anatomy:
    """The projections of a block whose output is the plain sum of its stream and their results.

    Raises:
        RecoveryError: a norm stands between a projection and the addition (Gemma 2 and 3, OLMo 2), or the block has no
            such projections (mixture of experts).
    """
    try:
        projections = find_projections(loaded.model, block)
    except ModelLayoutError as error:
        raise RecoveryError(f"{what} does not apply to this model: {error.message}", _REMEDY_ADDITIVE) from error
    if not projections.additive:
        raise RecoveryError(
            f"{what} does not apply to {type(loaded.model).__name__}: a norm stands between its projections and the "
            "residual addition, so the fit is not linear in their weights.",
            _REMEDY_ADDITIVE,
        )
    return projections


def last_kept(loaded: LoadedModel, block: int, what: str) -> tuple[Anatomy, nn.Module]:
    """The projections of the last kept block before a cut, and the module that reads its ``x_mid``.

    Raises:
        RecoveryError: the block is -1 (nothing is kept before the cut), its MLP is not a plain addition to the stream,
            or there is no stream between attention and MLP.
    """
    if block < 0:
        raise RecoveryError(f"{what} needs a kept block before the cut; block 0 is removed.", _REMEDY)
    projections = additive_projections(loaded, block, what)
    try:
        return projections, find_mid(loaded.model, block)
    except ModelLayoutError as error:
        raise RecoveryError(f"{what} does not apply to this model: {error.message}", _REMEDY) from error


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
            projections, mid = last_kept(loaded, block, what)
            handles += _tap(block, mid, projections.mlp_output, seen, loaded.device)
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _tap(block: int, mid: Any, projection: Any, seen: dict[int, LastBlock], device: torch.device) -> list[Any]:
    with align_module_device(projection):  # parts of a split model may be on another device or on disk
        weight = right_multiply(projection).double().to(device)
        bias = None if projection.bias is None else projection.bias.double().to(device)
    stream: list[torch.Tensor] = []

    def read_mid(module: Any, args: tuple[Any, ...]) -> None:
        stream[:] = [args[0].to(device)]

    def read_inner(module: Any, args: tuple[Any, ...]) -> None:
        inner = args[0].to(device).view(*stream[0].shape[:-1], -1)  # some models flatten tokens inside the MLP
        seen[block] = LastBlock(stream[0], inner, weight, bias)

    return [mid.register_forward_pre_hook(read_mid), projection.register_forward_pre_hook(read_inner)]
