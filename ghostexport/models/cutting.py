"""Removing decoder blocks from a model in memory, so that it runs, generates with a KV cache and can be saved."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from ghostexport.errors import ModelLayoutError
from ghostexport.models.blocks import find_blocks
from ghostexport.plan import PrunePlan

#: Attributes of a block's modules that hold the block's own index (the KV cache is addressed by it).
_OWN_INDEX = ("layer_idx", "layer_id", "layer_index")

#: Configuration fields that list block indices.
_INDEX_LISTS = ("mlp_only_layers", "moe_layers", "full_attn_idxs", "cross_attention_layers", "global_attn_layers")

#: Configuration fields that count blocks from the start: blocks below the number are of one kind, the rest of another.
_THRESHOLDS = ("first_k_dense_replace", "max_window_layers", "num_dense_layers", "moe_layer_start_index")


def share_weights(model: Any) -> Any:
    """A copy of the model whose parameters and buffers are the same tensors; modules and configuration are new."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def drop_blocks(model: Any, plan: PrunePlan) -> Any:
    """A model without the plan's blocks; the given one is not changed and shares its weights.

    Requires: ``plan.num_blocks`` equals the model's. Ensures: blocks are renumbered wherever they know their index,
    every per-block configuration list is cut to the kept blocks, ``num_hidden_layers`` counts them.

    Raises:
        ModelLayoutError: the plan is about another number of blocks.
    """
    require_blocks(model, plan.num_blocks)
    pruned = share_weights(model)
    blocks = find_blocks(pruned)
    config = pruned.config.get_text_config()
    for index in reversed(range(plan.num_blocks)):
        if plan.new_index(index) is None:
            del blocks[index]
    for new, old in enumerate(plan.kept):
        _renumber(blocks[new], old, new)
    _cut_config(config, plan)
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


def _cut_config(config: Any, plan: PrunePlan) -> None:
    step = getattr(config, "decoder_sparse_step", 1)
    if step > 1:  # every step-th block is sparse: only an explicit list survives a cut
        dense = {block for block in range(plan.num_blocks) if (block + 1) % step}
        config.mlp_only_layers = sorted(dense | set(config.mlp_only_layers or ()))
        config.decoder_sparse_step = 1
    for name, value in list(vars(config).items()):
        if name in _INDEX_LISTS and isinstance(value, list):
            setattr(config, name, [plan.new_index(block) for block in value if block in plan.kept])
        elif name in _THRESHOLDS and isinstance(value, int):
            setattr(config, name, sum(block < value for block in plan.kept))
        elif isinstance(value, list | tuple) and len(value) == plan.num_blocks and "token_id" not in name:
            setattr(config, name, type(value)(value[block] for block in plan.kept))
    config.num_hidden_layers = len(plan.kept)
