"""Inserting operators into a pruned model in memory: the PyTorch twin of the graph's splice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from ghostexport.errors import RecoveryError
from ghostexport.models.anatomy import find_mid, find_projections
from ghostexport.models.blocks import find_blocks, hidden_states, output_states
from ghostexport.models.cutting import require_blocks, share_weights
from ghostexport.models.scaling import scale_blocks
from ghostexport.operators import Operator, OperatorSet, WeightFold


class BoundaryModule(nn.Module):
    """``y = x + x @ M (+ b)`` for ``x`` ``(B, T, C)``; M dense, as factors or as a diagonal.

    ``x @ M (+ b)`` is computed in the dtype of ``like`` and added in that of ``x``.
    With a network ``y = relu(x W1 + b1) W2 + b2`` instead.
    """

    def __init__(self, operator: Operator, like: torch.Tensor) -> None:
        super().__init__()
        factors = operator.factors or (None, None)
        self.delta = _parameter(operator.delta, like)
        self.factor_u = _parameter(factors[0], like)
        self.factor_v = _parameter(factors[1], like)
        self.diagonal = _parameter(operator.diagonal, like)
        self.bias = _parameter(operator.bias, like)
        self.network = None
        if operator.network is not None:
            self.network = nn.ParameterList(_parameter(array, like) for array in operator.network)

    def change(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ M (+ b)``, what the operator adds to ``x``."""
        change: torch.Tensor | None = None
        z = x.to(next(self.parameters()).dtype)
        if self.delta is not None:
            change = z @ self.delta
        elif self.factor_u is not None and self.factor_v is not None:
            change = (z @ self.factor_u) @ self.factor_v
        elif self.diagonal is not None:
            change = z * self.diagonal
        if self.bias is not None:
            change = self.bias.expand_as(z) if change is None else change + self.bias
        return torch.zeros_like(x) if change is None else change.to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.network is not None:
            W1, b1, W2, b2 = self.network
            y: torch.Tensor = torch.relu(x.to(W1.dtype) @ W1 + b1) @ W2 + b2
            return y.to(x.dtype)
        return x + self.change(x)

    # Hooks are bound methods: copying a model copies them with this module, where a closure would keep the old one.

    def before(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        x = self(hidden_states(args, kwargs))
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

    def after(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _replaced(output, self(output_states(output)))

    def read_mid(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._mid_change = self.change(args[0])

    def add_mid(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _replaced(output, output_states(output) + self._mid_change)


def insert_operators(model: Any, operators: OperatorSet) -> Any:
    """A pruned model with its operators; the given one is not changed and shares its weights.

    Each operator becomes the submodule ``ghost`` of the block it stands before (of the last block, acting on its
    output, when the cut is at the end), so its weights are ordinary parameters of the model. Folds replace the weights
    of the linear layers they name, and a scale those of all later blocks.

    Args:
        model: the model after :func:`drop_blocks` with ``operators.plan``.
        operators: one operator per boundary.

    Raises:
        ModelLayoutError: the model has not the plan's number of kept blocks.
        RecoveryError: an operator's width is not the model's, or it already has one at that place.
    """
    require_blocks(model, len(operators.plan.kept))
    patched = share_weights(model)
    blocks = find_blocks(patched)
    width = int(patched.config.get_text_config().hidden_size)
    like = next(patched.parameters())
    own, _ = operators.dtype_in(str(like.dtype).removeprefix("torch."))
    like = torch.empty(0, dtype=getattr(torch, own), device=like.device)
    for operator in operators.operators:
        if operator.hidden_size not in (None, width):
            raise RecoveryError(
                f"The {operator.kind} operator of boundary {operator.boundary.index} is for hidden size "
                f"{operator.hidden_size}, the model's is {width}.",
                "Recover operators for this model.",
            )
        for fold in operator.folds:
            _fold(patched, operators.plan.new_index(fold.block), fold)
        if operator.adds_nodes:
            _install(patched, blocks, operator, like)
    scale_blocks(patched, _factors(operators, len(blocks)))
    return patched


def _factors(operators: OperatorSet, count: int) -> dict[int, float]:
    """By position of a kept block, what scales before it make of its results; none where that is 1."""
    found = {}
    for position in range(count):
        before = [o.scale for o in operators.operators if o.boundary.position <= position]
        found[position] = math.prod(1 / scale for scale in before if scale is not None)
    return {position: factor for position, factor in found.items() if factor != 1}


def _install(model: Any, blocks: nn.ModuleList, operator: Operator, like: torch.Tensor) -> None:
    position = operator.boundary.position
    module = BoundaryModule(operator, like)
    if operator.site == "mid":
        if position == 0:
            raise RecoveryError("A mid operator needs a kept block before its cut.", "Use a boundary operator.")
        mid = find_mid(model, position - 1)
        _attach(blocks[position - 1], "ghost_mid", module)
        mid.register_forward_pre_hook(module.read_mid)
        blocks[position - 1].register_forward_hook(module.add_mid)
    elif position < len(blocks):
        _attach(blocks[position], "ghost", module)
        blocks[position].register_forward_pre_hook(module.before, with_kwargs=True)
    else:
        _attach(blocks[-1], "ghost_after", module)
        blocks[-1].register_forward_hook(module.after)


def _attach(block: nn.Module, name: str, module: BoundaryModule) -> None:
    if hasattr(block, name):
        raise RecoveryError("The model already has an operator at this boundary.", "Start from the pruned model.")
    block.add_module(name, module)


def _replaced(output: Any, x: torch.Tensor) -> Any:
    return x if isinstance(output, torch.Tensor) else (x, *output[1:])


def _fold(model: Any, block: int | None, fold: WeightFold) -> None:
    if block is None:
        raise RecoveryError(f"A weight is folded into block {fold.block}, which the plan removes.")
    projections = find_projections(model, block)
    projection = projections.attention_output if fold.role == "attention_output" else projections.mlp_output
    weight = torch.as_tensor(np.ascontiguousarray(fold.weight)).to(projection.weight)
    transposed = isinstance(projection, nn.Linear)  # nn.Linear holds [out, in], GPT-2's Conv1D [in, out]
    weight = weight.T.contiguous() if transposed else weight
    if weight.shape != projection.weight.shape:
        raise RecoveryError(
            f"The folded {fold.role} of block {fold.block} has shape {tuple(weight.shape)}, the layer's is "
            f"{tuple(projection.weight.shape)}.",
            "Recover operators for this model.",
        )
    projection.weight = nn.Parameter(weight, requires_grad=False)
    if fold.bias is not None:
        projection.bias = nn.Parameter(torch.as_tensor(fold.bias).to(weight), requires_grad=False)


def _parameter(array: Any, like: torch.Tensor) -> nn.Parameter | None:
    if array is None:
        return None
    return nn.Parameter(torch.as_tensor(np.ascontiguousarray(array)).to(like), requires_grad=False)
