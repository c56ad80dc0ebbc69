"""One block by itself, and the parts of it that a refit may change, each linear in what it adds to the stream.

::

    projection              m c O                        regressors m c
    gain of a norm          m g z      z = u / |u|       regressors m z, each channel by itself        u = c O
    projection before it    m g (c O) / |u|              regressors m c / |u|, the change over g

The last is one step of an iteration: ``|u|`` stays what it is. The judges, who see the block as it then is, decide.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ghostexport.calibration import Batch
from ghostexport.errors import ModelLayoutError
from ghostexport.models import Addition, Anatomy, LoadedModel, find_anatomies, gain, right_multiply, scale_gain
from ghostexport.models.blocks import StopForwardError, output_states
from ghostexport.models.calls import Call
from ghostexport.moments import BoundaryMoments, ChannelMoments, token_weights
from ghostexport.operators import FoldRole, WeightFold
from ghostexport.recovery.refit.judging import judges

#: Gains below this part of the median stay out of a step of the projection before them: it would be divided by them.
SMALL_GAIN = 1e-2

_OUTPUTS: dict[str, FoldRole] = {"attention": "attention_output", "mlp": "mlp_output"}
_GAINS: dict[str, FoldRole] = {"attention": "attention_gain", "mlp": "mlp_gain"}

#: Roles of parts before the stream between attention and MLP.
ATTENTION = frozenset({"attention_output", "attention_gain"})


class Part:
    """A projection, or the norm behind one, in a copy of a block.

    Attributes:
        block: index of the block.
        role: what it is.
        module: the layer or the norm itself.
        multiplier: of what the block adds.
    """

    def __init__(self, block: int, role: FoldRole, module: Any, norm: Any, multiplier: float) -> None:
        self.block, self.role, self.module = block, role, module
        self._norm, self.multiplier = norm, multiplier
        if norm is not None:
            self._old_gain = gain(norm)
            self._unit_norm = copy.deepcopy(norm).float()
            (weight,) = self._unit_norm.parameters()
            weight.add_(1 - gain(norm))

    @property
    def is_gain(self) -> bool:
        return self.module is self._norm

    def moments(self) -> list[BoundaryMoments]:
        """Of the fitting and of the judging sequences, without tokens yet."""
        weight = self.module.weight if not self.is_gain else self._old_gain
        if self.is_gain:
            return [ChannelMoments(len(weight), weight.device) for _ in range(2)]
        inputs, outputs = right_multiply(self.module).shape
        rows = inputs + (self.module.bias is not None)
        return [BoundaryMoments(outputs, weight.device, rows) for _ in range(2)]

    def add(
        self, moments: list[BoundaryMoments], batch: Batch, read: torch.Tensor, aim: torch.Tensor, have: torch.Tensor
    ) -> None:
        """Adds what is missing, ``aim - have`` ``(B, T, C)``, explained by what the part reads (and a constant)."""
        for fold in range(2):
            rows = [r for r, s in enumerate(batch.sequences) if judges(s) == bool(fold)]
            if rows:
                mask = batch.mask[rows]
                target = aim[rows][mask].double()
                missing = target - have[rows][mask].double()
                moments[fold].add_change(self._regressors(read[rows][mask]), missing, token_weights(target))

    def move(self, change: torch.Tensor) -> None:
        """Applies a change: ``[in (+ 1 for the bias), C]`` of a projection, ``[C]`` of a gain."""
        with torch.no_grad():
            if self.is_gain:
                now = gain(self._norm)
                scale_gain(self._norm, torch.where(now == 0, 1.0, 1 + change.to(now) / torch.where(now == 0, 1.0, now)))
                return
            if self._norm is not None:
                now = gain(self._norm).double()
                small = now.abs() < SMALL_GAIN * now.abs().median()
                change = torch.where(small, 0.0, change / torch.where(small, 1.0, now))
            weight = right_multiply(self.module)
            weight.copy_(weight.double() + change[: len(weight)])
            if self.module.bias is not None:
                self.module.bias.add_(change[len(weight)].to(self.module.bias))

    def fold(self) -> WeightFold:
        """The part as it is now."""
        if self.is_gain:
            old = self._old_gain
            factor = torch.where(old == 0, 1.0, gain(self._norm) / torch.where(old == 0, 1.0, old))
            return WeightFold(self.block, self.role, factor.cpu().numpy())
        weight = np.ascontiguousarray(right_multiply(self.module).detach().float().cpu().numpy())
        bias = None if self.module.bias is None else self.module.bias.detach().float().cpu().numpy()
        return WeightFold(self.block, self.role, weight, bias)

    def _regressors(self, read: torch.Tensor) -> torch.Tensor:
        """``[n, R]`` float64 of tokens ``[n, in]``; of a gain ``[n, C]``."""
        if self.is_gain:
            normed: torch.Tensor = self._unit_norm(read.float()).double()
            return self.multiplier * normed
        x = read.double()
        if self.module.bias is not None:
            x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
        if self._norm is not None:
            u = self.module(read).float()
            size = self._unit_norm(u).norm(dim=1) / u.norm(dim=1).clamp_min(torch.finfo(u.dtype).tiny)
            x = x * size.double()[:, None]
        return self.multiplier * x


@dataclass(frozen=True, eq=False)
class Inside:
    """What a block did with one batch.

    Attributes:
        read: ``(B, T, in)`` what every :class:`Part` reads, by its role: the input of a projection or of a norm.
        mid: stream between attention and MLP ``(B, T, C)``; None in blocks that have none (parallel blocks).
        output: ``(B, T, C)``; None when the run ended at ``mid``.
    """

    read: Mapping[FoldRole, torch.Tensor]
    mid: torch.Tensor | None
    output: torch.Tensor | None

    @property
    def context(self) -> torch.Tensor:
        """Input of the attention output projection ``(B, T, C_ctx)``."""
        return self.read["attention_output"]

    @property
    def inner(self) -> torch.Tensor | None:
        """Input of the MLP output projection ``(B, T, I)``; None when the run ended before it."""
        return self.read.get("mlp_output")


class SingleBlock:
    """One decoder block that runs on given residual values, with what it adds to them exchangeable.

    A copy: the model it comes from is not changed. ``found``: its :func:`anatomies`, where they are known.

    Attributes:
        parts: what a refit may change, in order of depth; empty where what the block adds cannot be told apart.
        mid: the module that reads the stream between attention and MLP.
    """

    def __init__(self, loaded: LoadedModel, index: int, found: Mapping[int, Anatomy | None] | None = None) -> None:
        original = loaded.blocks[index]
        self.index = index
        self.block = copy.deepcopy(original)
        names = {module: name for name, module in original.named_modules()}

        def own(module: nn.Module | None) -> Any:
            return None if module is None else self.block.get_submodule(names[module])

        anatomy = (anatomies(loaded, [index]) if found is None else found)[index]
        self.parts: list[Part] = []
        self.mid = own(anatomy.mid) if anatomy and anatomy.complete else None
        for side, addition in refittable(anatomy):
            projection, norm = own(addition.projection), own(addition.norm)
            if norm is not None:
                self.parts.append(Part(index, _GAINS[side], norm, norm, addition.multiplier))
            if projection is not None:
                self.parts.append(Part(index, _OUTPUTS[side], projection, norm, addition.multiplier))

    @property
    def attention_output(self) -> Any:
        """The attention output projection."""
        return self.part("attention_output").module

    @property
    def mlp_output(self) -> Any:
        """The MLP output projection."""
        return self.part("mlp_output").module

    def part(self, role: FoldRole) -> Part:
        return next(part for part in self.parts if part.role == role)

    def run(self, call: Call, x: torch.Tensor, until_mid: bool = False) -> Inside:
        """Runs the block on ``x`` ``(B, T, C)``; ``until_mid`` leaves out the MLP where a mid stream exists."""
        seen: dict[str, torch.Tensor] = {}

        def keep(name: str, stop: bool = False) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                seen[name] = args[0].clone() if name == "mid" else args[0]  # some blocks go on to add in place
                if stop:
                    raise StopForwardError

            return hook

        handles = [part.module.register_forward_pre_hook(keep(part.role)) for part in self.parts]
        if self.mid is not None:
            handles.append(self.mid.register_forward_pre_hook(keep("mid", until_mid)))
        try:
            with torch.no_grad():
                seen["output"] = output_states(call.on(self.block, x))
        except StopForwardError:
            pass
        finally:
            for handle in handles:
                handle.remove()
        shaped = {name: value.reshape(*x.shape[:-1], -1) for name, value in seen.items()}  # OPT flattens tokens
        roles = {part.role: shaped[part.role] for part in self.parts if part.role in shaped}
        return Inside(roles, shaped.get("mid"), shaped.get("output"))


def anatomies(loaded: LoadedModel, blocks: Iterable[int]) -> dict[int, Anatomy | None]:
    """The anatomy of some blocks; None where what one adds cannot be told apart."""
    blocks = list(blocks)
    try:
        return dict(find_anatomies(loaded.model, blocks))
    except ModelLayoutError:
        if len(blocks) == 1:
            return {blocks[0]: None}
    return {block: anatomies(loaded, [block])[block] for block in blocks}


def refittable(anatomy: Anatomy | None) -> list[tuple[str, Addition]]:
    """What a refit may change in a block: ``attention`` and ``mlp`` with what each adds, where that can be told apart.

    A projection is linear in what it adds; a norm behind it is, in its gain, if that is its one parameter.
    """
    if anatomy is None or not anatomy.complete or anatomy.others:
        return []
    sides = (("attention", anatomy.mixer), ("mlp", anatomy.mlp))
    plain = [(side, a) for side, a in sides if a is not None and (a.projection is not None or a.norm is not None)]
    return [(side, a) for side, a in plain if a.norm is None or len(list(a.norm.parameters())) == 1]
