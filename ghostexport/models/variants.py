"""Variants of a model in memory: decoder blocks dropped, operators inserted (the twin of the graph's cut and splice).

A variant shares the weights it does not change, runs, generates with a KV cache and can be saved.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ghostexport.errors import ModelLayoutError, RecoveryError
from ghostexport.models.anatomy import find_anatomies, find_mid, right_multiply, scale_gain, set_right_multiply
from ghostexport.models.blocks import find_blocks, hidden_states, output_states
from ghostexport.models.reweighting import set_weights
from ghostexport.operators import Operator, OperatorSet, WeightFold, linear, network
from ghostexport.plan import PrunePlan

#: Attributes of a block's modules that hold the block's own index (the KV cache is addressed by it).
_OWN_INDEX = ("layer_idx", "layer_id", "layer_index")

#: Configuration fields that list block indices.
_INDEX_LISTS = ("mlp_only_layers", "moe_layers", "full_attn_idxs", "cross_attention_layers", "global_attn_layers")

#: Configuration fields that count blocks from the start: blocks below the number are of one kind, the rest of another.
_THRESHOLDS = ("first_k_dense_replace", "max_window_layers", "num_dense_layers", "moe_layer_start_index")

#: Other names of ``num_hidden_layers`` that a configuration has beside it (xLSTM).
_COUNTS = ("num_blocks",)


def needed_blocks(model: Any) -> dict[int, str]:
    """Blocks that cannot be removed, and why: others read their keys and values, or no configuration lacks them."""
    config = model.config.get_text_config()
    found = dict.fromkeys(_donors(config), "later blocks read its keys and values")
    last = int(config.num_hidden_layers) - 1
    own = getattr(config, "layer_types", None)
    types: list[str] = own or getattr(config, "layers_block_type", None) or []
    attending = [block for block, kind in enumerate(types) if "attention" in kind and "linear" not in kind]
    if len(attending) == 1 < len(types):
        found.setdefault(attending[0], "transformers counts the tokens that a cache holds in the only attention")
    if own and last > 0:  # Gemma 4 makes the last block one of full attention whatever the configuration says
        cut = copy.deepcopy(config)
        _cut_config(cut, PrunePlan.from_blocks(last + 1, [last]))
        if list(type(cut).from_dict(cut.to_dict()).layer_types) != list(types[:last]):
            found.setdefault(last, f"a {type(config).__name__} ends with a block of {types[last]}")
    return found


def _donors(config: Any) -> list[int]:
    """Blocks whose keys and values the last ``num_kv_shared_layers`` blocks take: the last own ones of each type."""
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    own, taken = config.layer_types[:-shared] if shared else [], config.layer_types[-shared:] if shared else []
    return [max(block for block, kind in enumerate(own) if kind == wanted) for wanted in sorted(set(taken))]


def share_weights(model: Any) -> Any:
    """A copy of the model whose parameters and buffers are the same tensors; modules and configuration are new."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def drop_blocks(model: Any, plan: PrunePlan) -> Any:
    """A model without the plan's blocks; the given one is not changed and shares its weights.

    Requires: ``plan.num_blocks`` equals the model's. Ensures: blocks are renumbered wherever they know their index,
    every per-block configuration list is cut to the kept blocks, ``num_hidden_layers`` counts them.

    Raises:
        ModelLayoutError: the plan is about another number of blocks, or removes keys and values that others read.
    """
    require_blocks(model, plan.num_blocks)
    if lost := [block for block in _donors(model.config.get_text_config()) if plan.new_index(block) is None]:
        raise ModelLayoutError(
            f"Later blocks of this {type(model).__name__} read the keys and values of blocks {lost}.",
            "Remove others (--protect-first, --protect-last, --remove).",
        )
    pruned = share_weights(model)
    blocks = find_blocks(pruned)
    config = pruned.config.get_text_config()
    for index in reversed(range(plan.num_blocks)):
        if plan.new_index(index) is None:
            del blocks[index]
    for new, old in enumerate(plan.kept):
        _renumber(blocks[new], old, new)
    _cut_inputs(pruned, config, plan)
    _cut_config(config, plan)
    for module in pruned.modules():  # Gemma 4: where blocks begin that take keys and values of others
        if "first_kv_shared_layer_idx" in vars(module):
            module.first_kv_shared_layer_idx = len(plan.kept) - config.num_kv_shared_layers
    return pruned


def require_blocks(model: Any, count: int) -> None:
    """Raises ModelLayoutError unless the model has ``count`` decoder blocks."""
    found = len(find_blocks(model))
    if found != count:
        raise ModelLayoutError(
            f"The plan is for {count} decoder blocks and this {type(model).__name__} has {found}.",
            "Use the plan of this model.",
        )


def _renumber(block: nn.Module, old: int, new: int) -> None:
    for module in block.modules():
        for name in _OWN_INDEX:
            if vars(module).get(name) == old:
                setattr(module, name, new)


def _cut_inputs(model: Any, config: Any, plan: PrunePlan) -> None:
    """Keeps the kept blocks' rows of the tables that hold one input per block, side by side (Gemma 3n and 4)."""
    size = getattr(config, "hidden_size_per_layer_input", None) or 0
    for name, module in model.named_modules() if size else ():
        if name.endswith(("embed_tokens_per_layer", "per_layer_model_projection")):
            axis = 1 if isinstance(module, nn.Embedding) else 0
            own = torch.cat([torch.arange(block * size, (block + 1) * size) for block in plan.kept])
            weight = module.weight.index_select(axis, own.to(module.weight.device))
            module.weight = nn.Parameter(weight, requires_grad=False)


def _cut_config(config: Any, plan: PrunePlan) -> None:
    own = config.to_dict().get("per_layer_config") or {}  # block -> what differs from the rest of the configuration
    if own:
        config.per_layer_config = None
    step = getattr(config, "decoder_sparse_step", 1)
    if step > 1:  # every step-th block is sparse: only an explicit list survives a cut
        dense = {block for block in range(plan.num_blocks) if (block + 1) % step}
        config.mlp_only_layers = sorted(dense | set(config.mlp_only_layers or ()))
        config.decoder_sparse_step = 1
    if getattr(config, "scale_depth", None):  # MiniCPM scales additions by scale_depth / sqrt(blocks)
        config.scale_depth *= math.sqrt(len(plan.kept) / plan.num_blocks)
    for name, value in list(vars(config).items()):
        if name in _INDEX_LISTS and isinstance(value, list):
            setattr(config, name, [plan.new_index(block) for block in value if block in plan.kept])
        elif name in _THRESHOLDS and isinstance(value, int):
            setattr(config, name, sum(block < value for block in plan.kept))
        elif isinstance(value, list | tuple) and len(value) == plan.num_blocks and "token_id" not in name:
            setattr(config, name, type(value)(value[block] for block in plan.kept))
    if shared := getattr(config, "num_kv_shared_layers", None):
        config.num_kv_shared_layers = sum(block >= plan.num_blocks - shared for block in plan.kept)
    for name in ("num_hidden_layers", *(name for name in _COUNTS if vars(config).get(name) == plan.num_blocks)):
        setattr(config, name, len(plan.kept))
    if own:
        config.per_layer_config = {plan.new_index(int(b)): o for b, o in own.items() if int(b) in plan.kept}


class BoundaryModule(nn.Module):
    """``y = x + x @ M (+ b)`` for ``x`` ``(B, T, C)``; M dense, as factors or as a diagonal.

    ``x @ M (+ b)`` is computed in the dtype of ``like`` and added in that of ``x``.
    With a network ``y = relu(x W1 + b1) W2 + b2`` instead.
    """

    def __init__(self, operator: Operator, like: torch.Tensor) -> None:
        super().__init__()
        for key, array in operator.arrays.items():
            values = torch.as_tensor(np.ascontiguousarray(array)).to(like)
            self.register_parameter(key, nn.Parameter(values, requires_grad=False))

    def change(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ M (+ b)``, what the operator adds to ``x``."""
        own = dict(self.named_parameters())
        z = x.to(next(iter(own.values())).dtype)
        change: torch.Tensor | None = linear(z, own)
        if "bias" in own:
            change = own["bias"].expand_as(z) if change is None else change + own["bias"]
        return torch.zeros_like(x) if change is None else change.to(x.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = dict(self.named_parameters())
        if "network_w1" in own:
            y: torch.Tensor = network(x.to(own["network_w1"].dtype), own)
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
    of the linear layers they name, a scale those of all later blocks, and new weights any parameters.

    Args:
        model: the model after :func:`drop_blocks` with ``operators.plan``.
        operators: one operator per boundary.

    Raises:
        ModelLayoutError: the model has not the plan's number of kept blocks.
        RecoveryError: an operator's width is not the model's, or it already has one at that place.
    """
    require_blocks(model, len(operators.plan.kept))
    patched = share_weights(model)
    set_weights(patched, operators.plan, operators.weights)
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


def around_operator(blocks: nn.ModuleList, position: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual values ``(B, T, C)`` before and behind the operator at a position, if any.

    ``x`` is what is read there (:func:`ghostexport.models.read_residuals`) just now: inside a block, the operator
    knows only the values of its last run.
    """
    if position and (mid := getattr(blocks[position - 1], "ghost_mid", None)) is not None:
        last = position == len(blocks)  # is read before its change is added, others behind it
        return (x, x + mid._mid_change) if last else (x - mid._mid_change, x)
    here, name = (blocks[-1], "ghost_after") if position == len(blocks) else (blocks[position], "ghost")
    return x, (getattr(here, name)(x) if hasattr(here, name) else x)


def _attach(block: nn.Module, name: str, module: BoundaryModule) -> None:
    if hasattr(block, name):
        raise RecoveryError("The model already has an operator at this boundary.", "Start from the pruned model.")
    block.add_module(name, module)


def _replaced(output: Any, x: torch.Tensor) -> Any:
    return x if isinstance(output, torch.Tensor) else (x, *output[1:])


def _fold(model: Any, block: int | None, fold: WeightFold) -> None:
    if block is None:
        raise RecoveryError(f"A weight is folded into block {fold.block}, which the plan removes.")
    anatomy = find_anatomies(model, [block])[block]
    addition = anatomy.mixer if fold.role.startswith("attention") else anatomy.mlp
    part = None if addition is None else addition.norm if fold.role.endswith("gain") else addition.projection
    if part is None:
        raise RecoveryError(
            f"Block {fold.block} of {type(model).__name__} has no {fold.role}.", "Recover operators for this model."
        )
    if fold.role.endswith("gain"):
        scale_gain(part, torch.as_tensor(fold.weight).to(next(part.parameters()).device))
        return
    projection: Any = part
    shape = right_multiply(projection).shape
    if fold.weight.shape != shape:
        raise RecoveryError(
            f"The folded {fold.role} of block {fold.block} has shape {fold.weight.shape}, the layer's is "
            f"{tuple(shape)}.",
            "Recover operators for this model.",
        )
    weight = torch.as_tensor(np.ascontiguousarray(fold.weight)).to(projection.weight)
    bias = None if fold.bias is None else torch.as_tensor(fold.bias).to(weight)
    set_right_multiply(projection, weight, bias)


def scale_blocks(model: Any, factors: Mapping[int, float]) -> None:
    """Multiplies what each block adds to the stream by its factor, in new parameters; the model is changed.

    With ``alpha`` at a cut the stream should go on as ``alpha x + f_1 + f_2 + ...`` with the results ``f`` of the
    blocks behind it. Every block, and the head, reads the stream through a norm that ignores its magnitude; so the
    stream may as well go on as ``x + f_1 / alpha + f_2 / alpha + ...``. Embeddings are not touched.

    Where a norm stands behind a projection (Gemma 2 and 3, OLMo 2), its gain is scaled; else the projection is.

    Raises:
        ModelLayoutError: a block adds something that has neither, such as a mixture of experts.
    """
    for index, anatomy in find_anatomies(model, factors).items():
        for addition in (anatomy.mixer, anatomy.mlp) if anatomy.mlp else (anatomy.mixer,):
            if not anatomy.complete or (addition.norm is None and addition.projection is None):
                raise ModelLayoutError(
                    f"Block {index} of {type(model).__name__} adds something else than the results of projections or "
                    "norms to its stream.",
                    "Use an operator that acts at the boundary, such as ghost.",
                )
            if addition.norm is not None:
                scale_gain(addition.norm, factors[index])
                continue
            projection = addition.projection
            projection.weight = _scaled(projection.weight, factors[index])
            if projection.bias is not None:
                projection.bias = _scaled(projection.bias, factors[index])


def _scaled(parameter: torch.Tensor, factor: float) -> nn.Parameter:
    return nn.Parameter((parameter.float() * factor).to(parameter.dtype), requires_grad=False)
