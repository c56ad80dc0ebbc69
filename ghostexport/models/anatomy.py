"""How a decoder block adds to the residual stream, found by what its modules compute, not by their names.

::

    y = x + m_1 * a_1 + m_2 * a_2 + ...     a: result of a projection, of a norm behind one, or of a mixture of experts
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ghostexport.errors import ModelLayoutError
from ghostexport.models.blocks import find_blocks, run_probe

#: Mean relative difference of two orders of the same few additions: some roundings of the format.
SUM_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9, torch.float16: 2e-3, torch.bfloat16: 1e-2}

#: Fewer additions explain a block unless one more leaves less than this part of their error (more than rounding).
GAIN = 0.25

#: Most additions looked for: a mixer, an MLP, and what some blocks add besides.
MOST = 3

_REMEDY = "Use an operator that acts at the boundary, such as ghost."

#: A module, what it read and what it returned.
Call = tuple[nn.Module, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Addition:
    """One of the things that a block adds to its stream: ``multiplier`` times what ``module`` returns.

    Attributes:
        module: the projection itself, the norm behind it, or what has no single last projection (mixture of experts).
        projection: ``nn.Linear`` (weight ``[out, in]``) or GPT-2's ``Conv1D`` (weight ``[in, out]``); None without.
        norm: the norm between projection and addition, with a gain ``[C]`` (Gemma, OLMo 2); None without.
        multiplier: 1 but where the model scales what it adds (Granite, MiniCPM).
    """

    module: nn.Module
    projection: Any
    norm: nn.Module | None = None
    multiplier: float = 1.0


@dataclass(frozen=True)
class Anatomy:
    """What one decoder block adds to the residual stream.

    Attributes:
        mixer: attention, or what takes its place (a recurrence, a convolution).
        mlp: None where the block adds once (Mamba).
        mid: the module that reads the stream between the two; None where both read the same (parallel blocks).
        others: what it adds besides (a second mixer, a shared expert, per-layer inputs).
        complete: whether the block's output is its input plus these additions and nothing else.
    """

    mixer: Addition
    mlp: Addition | None
    mid: nn.Module | None
    complete: bool
    others: tuple[Addition, ...] = ()

    @property
    def attention_output(self) -> Any:
        """The mixer's projection."""
        return self.mixer.projection

    @property
    def mlp_output(self) -> Any:
        """The MLP's projection."""
        return None if self.mlp is None else self.mlp.projection

    @property
    def additive(self) -> bool:
        """Whether the block's output is exactly its input plus the results of two projections."""
        both = (self.mixer, self.mlp)
        return (
            self.complete
            and not self.others
            and all(a and a.projection and a.norm is None and a.multiplier == 1 for a in both)
        )


def right_multiply(projection: Any) -> torch.Tensor:
    """The weight ``[in, out]`` of a linear layer, a view of its own, whichever way round the layer keeps it."""
    weight: torch.Tensor = projection.weight
    return weight.T if isinstance(projection, nn.Linear) else weight


def set_right_multiply(projection: Any, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Gives a linear layer new parameters: ``weight`` ``[in, out]`` and, unless None, ``bias`` ``[out]``."""
    weight = weight.T.contiguous() if isinstance(projection, nn.Linear) else weight
    projection.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        projection.bias = nn.Parameter(bias, requires_grad=False)


def gain(norm: nn.Module) -> torch.Tensor:
    """What a norm multiplies its channels by ``[C]`` float32: its parameter ``w``, or ``1 + w`` (Gemma)."""
    _, weight = next(iter(norm.named_parameters()))
    return weight.detach().float() + _gain_shift(norm)


def scale_gain(norm: nn.Module, factor: float | torch.Tensor) -> None:
    """Multiplies a norm's gain by ``factor`` (a number or ``[C]``), in a new parameter."""
    name, weight = next(iter(norm.named_parameters()))
    changed = (gain(norm) * factor - _gain_shift(norm)).to(weight.dtype)
    setattr(norm, name, nn.Parameter(changed, requires_grad=False))


def _gain_shift(norm: nn.Module) -> float:
    """1 where the gain is ``1 + w``; a zero parameter tells."""
    name, weight = next(iter(norm.named_parameters()))
    x = torch.linspace(-1, 1, len(weight), device=weight.device, dtype=weight.dtype)[None]
    setattr(norm, name, nn.Parameter(torch.zeros_like(weight), requires_grad=False))
    with torch.no_grad():
        shift = float(bool(norm(x).any()))
    setattr(norm, name, weight)
    return shift


def find_anatomies(model: Any, indices: Iterable[int]) -> dict[int, Anatomy]:
    """The anatomy of several blocks, from one probe pass.

    Raises:
        ModelLayoutError: what a block adds cannot be told apart.
    """
    blocks = find_blocks(model)
    wanted = {index: blocks[index] for index in indices}
    modules = {module for block in wanted.values() for module in block.modules()}
    calls = probe_calls(model, modules, max(wanted)) if wanted else []
    return {index: _anatomy(model, index, block, calls) for index, block in wanted.items()}


def find_projections(model: Any, index: int) -> Anatomy:
    """The anatomy of a block that has both an attention output and an MLP output projection.

    Raises:
        ModelLayoutError: it has not, as with a mixture of experts instead of one MLP.
    """
    found = find_anatomies(model, [index])[index]
    if found.attention_output is None or found.mlp_output is None:
        raise ModelLayoutError(
            f"Block {index} of {type(model).__name__} has no single attention output and MLP output projection.",
            "Use an operator that does not fold weights, such as ghost.",
        )
    return found


def find_mid(model: Any, index: int, flattened: bool = False) -> nn.Module:
    """The module that reads the stream between attention and MLP (the block's second norm).

    ``flattened`` also finds one that reads ``(B T, C)`` (OPT).

    Raises:
        ModelLayoutError: there is none, as in blocks whose attention and MLP are parallel.
    """
    block = find_blocks(model)[index]
    calls = probe_calls(model, set(block.modules()), index)
    found = _anatomy(model, index, block, calls).mid
    read = next((value for module, value, _ in calls if module is found), None)
    if found is None or read is None or (read.ndim != 3 and not flattened):
        raise ModelLayoutError(
            f"Block {index} of {type(model).__name__} has no module that reads the stream between attention and MLP as "
            "[batch, tokens, hidden]: they run in parallel, or the block flattens its tokens.",
            _REMEDY,
        )
    return found


def probe_calls(model: Any, modules: Iterable[nn.Module], last: int | None = None) -> list[Call]:
    """Every call of the modules in one forward pass, in the order of their ends; calls without tensors are left out.

    The pass ends behind block ``last``, where it is given.

    Values are copied when they are seen: some models go on to change them in place.
    """
    calls: list[Call] = []
    open_calls: dict[nn.Module, list[torch.Tensor | None]] = {}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered = args[0] if args else kwargs.get("hidden_states")
        kept = entered.detach().clone() if isinstance(entered, torch.Tensor) else None
        open_calls.setdefault(module, []).append(kept)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        entered = open_calls[module].pop()
        left = output[0] if isinstance(output, tuple | list) and output else output
        if entered is not None and isinstance(left, torch.Tensor):
            calls.append((module, entered, left.detach().clone()))

    handles: list[Any] = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
    run_probe(model, handles, last)
    return calls


def _anatomy(model: Any, index: int, block: nn.Module, calls: Sequence[Call]) -> Anatomy:
    own = set(block.modules())
    entered, left = next((entered, left) for module, entered, left in calls if module is block)
    wide = [c for c in calls if c[0] in own and c[0] is not block and c[2].numel() == left.numel()]
    wide = [call for call in wide if call[2].shape[-1] == left.shape[-1]]
    attention = _attention_modules(block)
    found = _added(wide, entered, left)
    if not found:
        linear = [call for call in wide if _is_linear(call[0])]
        sides = [[c for c in linear if (c[0] in attention) == inside] for inside in (True, False)]
        if not all(sides):
            raise ModelLayoutError(
                f"Block {index} of {type(model).__name__} adds something else to its stream than the results of two of "
                "its modules.",
                _REMEDY,
            )
        mixer, mlp = (_addition(block, side[-1], 1.0, wide, left.dtype) for side in sides)
        return Anatomy(mixer, mlp, None, complete=False)
    if len(found) == 2 and found[1][0][0] in attention and found[0][0][0] not in attention:
        found.reverse()
    additions = [_addition(block, call, factor, wide, left.dtype) for call, factor in found]
    results = [
        a.multiplier * call[2].reshape(entered.shape).double() for a, (call, _) in zip(additions, found, strict=True)
    ]
    reads = [(c[0], c[1].reshape(entered.shape)) for c in calls if c[0] in own and c[1].numel() == entered.numel()]
    stream = entered.double()
    for first in range(len(additions) - 1):  # the additions before mid are mixers
        stream = stream + results[first]
        for module, value in reads:
            if agree(value, stream, left.dtype) and not agree(value, entered, left.dtype):
                mixer, mlp = additions[first], additions[first + 1]
                others = (*additions[:first], *additions[first + 2 :])
                return Anatomy(mixer, mlp, module, True, others)
    return Anatomy(additions[0], additions[1] if additions[1:] else None, None, True, tuple(additions[2:]))


def _added(wide: Sequence[Call], entered: torch.Tensor, left: torch.Tensor) -> list[tuple[Call, float]]:
    """The calls whose results, times constants, the block adds: the fewest and innermost; none that explain it: []."""
    weight = _weight(entered, left)  # rounding is relative to each element: massive ones must not hide the others
    target = (weight * (left.double() - entered.double())).flatten()
    values = [(weight * output.double().reshape(left.shape)).flatten() for _, _, output in wide]
    found: list[tuple[Call, float]] = []
    error = math.inf
    for count in range(1, MOST + 1):
        if error <= SUM_TOLERANCE[left.dtype] and len(found) < count - 1:
            break  # one more explained no more
        for chosen in itertools.combinations(range(len(wide)), count):
            rows = torch.stack([values[i] for i in chosen])
            gram = rows @ rows.T
            if torch.linalg.det(gram / gram.diagonal().amax().clamp(min=1e-300)) < 1e-9:
                continue  # the same value twice
            factors = torch.linalg.solve(gram, rows @ target)
            left_over = float((factors @ rows - target).abs().mean())
            if left_over < error * (GAIN if len(found) < count else 1 - 1e-6):
                error = left_over
                found = [(wide[i], float(factor)) for i, factor in zip(chosen, factors, strict=True)]
    return found if error <= SUM_TOLERANCE[left.dtype] else []


def _addition(block: nn.Module, call: Call, factor: float, wide: Sequence[Call], dtype: torch.dtype) -> Addition:
    module, read, _ = call
    near = 5 * SUM_TOLERANCE[dtype]
    own = [float(value) for value in vars(block).values() if isinstance(value, float)]
    exact = (value for value in (1.0, *own) if value and abs(factor / value - 1) < near)
    multiplier = next(exact, factor)
    if _is_linear(module):
        return Addition(module, module, None, multiplier)
    if [p.ndim for p in module.parameters()][:1] != [1] or any(True for _ in module.children()):
        return Addition(module, None, None, multiplier)
    behind = (m for m, _, output in wide if _is_linear(m) and agree(output.reshape(read.shape), read, dtype))
    return Addition(module, next(behind, None), module, multiplier)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def _attention_modules(block: nn.Module) -> set[nn.Module]:
    return {
        inner
        for module in block.modules()
        if module is not block and "attention" in type(module).__name__.lower() and any(True for _ in module.children())
        for inner in module.modules()
    }


def agree(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether two values are the same up to roundings of ``dtype``, in the mean over their elements."""
    return bool((_weight(b) * (a.double() - b.double())).abs().mean() <= SUM_TOLERANCE[dtype])


def _weight(*values: torch.Tensor) -> torch.Tensor:
    size = sum(value.double().abs() for value in values)
    assert isinstance(size, torch.Tensor)
    return 1 / (size + size.median()).clamp(min=1e-300)
