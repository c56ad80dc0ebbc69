"""Why no graph can carry a model from step to step: found in a few short steps, before anything is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ghostexport.models.blocks import find_blocks, input_device, probe_tokens, run_probe
from ghostexport.models.running import MANY, STATES, holds_tensors, keeps_states, step, whole_cache

#: Products, the work of every mixer: their number may not depend on the number of tokens. Views are left out, since
#: layouts decide about them.
_COUNTED = {"aten.mm", "aten.bmm", "aten.addmm", "aten.mul", "aten.convolution", "aten.exp"}

#: Operations whose result has as many elements as the data say.
_DATA_DEPENDENT = {"aten.nonzero", "aten.nonzero_numpy"}

#: Standard deviation of the difference of two orders of computation over that of the logits.
CONTINUED = {torch.float32: 1e-4, torch.float16: 0.1}


def export_fault(model: Any) -> str | None:
    """Why a graph cannot carry the model; None where it can. Runs a few short steps of the model as it is.

    A graph holds one sequence of operations, the same whatever the tokens, carries what each block keeps, and can be
    cut where a single value, the stream, goes from block to block.
    """
    if shared := getattr(model.config.get_text_config(), "num_kv_shared_layers", None):
        return f"the last {shared} blocks of {type(model).__name__} read keys and values of others, across any cut"
    return cache_fault(model) or _second_value_fault(model) or _routing_fault(model)


def _second_value_fault(model: Any) -> str | None:
    """A block that reads more than the stream: what another block made, or what was made of the tokens before."""
    blocks = find_blocks(model)
    handed: dict[int, torch.Tensor] = {}
    found: list[torch.Tensor] = []

    def enters(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args[1:], *(value for name, value in kwargs.items() if name != "hidden_states")]
        tensors = [value for value in given if isinstance(value, torch.Tensor) and len(value) == 2]
        found.extend(value for value in tensors if id(value) in handed or not torch.equal(value[0], value[1]))

    def leaves(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, tuple):  # the values are kept: an id says nothing of one that is gone
            handed.update({id(value): value for value in output[1:] if isinstance(value, torch.Tensor)})

    hooks = [block.register_forward_pre_hook(enters, with_kwargs=True) for block in blocks]
    hooks += [block.register_forward_hook(leaves) for block in blocks]
    run_probe(model, hooks)  # two rows of tokens that differ
    if not found:
        return None
    name, shape = type(model).__name__, list(found[0].shape)
    return f"blocks of {name} read a second value, {shape}, beside the stream: no single value separates them"


def _routing_fault(model: Any) -> str | None:
    """Experts in a Python loop over those that were hit: a graph would hold the loop of the sample tokens."""
    if getattr(model, "_can_set_experts_implementation", bool)():
        return None  # chosen for the export
    with _Count(_DATA_DEPENDENT) as seen:
        run_probe(model)
    return f"{type(model).__name__} loops over the experts that its tokens hit: a graph cannot" if seen.count else None


def splits_by_data(model: Any) -> bool:
    """Whether tokens are split among experts by sizes that the tokens give: TensorRT has no such operation."""

    class Reading(TorchFunctionMode):
        found = False

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.found |= func is torch.Tensor.tolist and not args[0].is_floating_point()
            return func(*args, **(kwargs or {}))

    with Reading() as seen:
        run_probe(model)
    return bool(seen.found)


def cache_fault(model: Any) -> str | None:
    """Why the model's cache cannot be carried by a graph; None where it can. Runs a few short steps.

    A graph takes any number of tokens after any cache. So a model that keeps states must continue as if it had read
    everything at once, and its blocks must compute any number of tokens with the same operations.
    """
    name, blocks = type(model).__name__, find_blocks(model)
    try:
        cache = step(model, probe_tokens(model))[1]
        caches = cache.layers
    except (AttributeError, KeyError, TypeError):
        return f"{name} keeps no keys and values per block in a cache of transformers"
    for index, layer in enumerate(caches):
        kept = {key for key, value in vars(layer).items() if holds_tensors(value) and not key.startswith("_")}
        if strange := kept - {"keys", "values", *STATES}:
            return f"block {index} of {name} keeps {', '.join(sorted(strange))}, which no graph here carries"
        if not kept:
            return f"block {index} of {name} keeps nothing that a graph can carry ({type(layer).__name__})"
    if len(caches) != len(blocks):
        return f"{len(blocks)} blocks of {name} keep {len(caches)} caches"
    try:
        states = keeps_states(cache)
    except TypeError as error:
        return f"{name}: {error}"
    return _continuation_fault(model) if states else None


def _continuation_fault(model: Any) -> str | None:
    name, device = type(model).__name__, input_device(model)
    ids = torch.arange(2 * MANY, device=device).view(2, -1) % int(model.get_input_embeddings().weight.shape[0])
    mask = torch.ones_like(ids)
    few, tolerance = 3, CONTINUED.get(next(model.parameters()).dtype, CONTINUED[torch.float16])
    whole = step(model, ids[:, : 2 * few], None, mask[:, : 2 * few])[0][:, few:].double()
    for read, what in ((few, "several tokens at once"), (1, "a token by itself")):
        _, cache = step(model, ids[:, :few], whole_cache(model), mask[:, :few])
        rest = []
        try:
            for stop in range(few + read, 2 * few + 1, read):
                logits, cache = step(model, ids[:, stop - read : stop], cache, mask[:, :stop])
                rest.append(logits.double())
        except RuntimeError as error:
            return f"{name} cannot read {what} after its states: {str(error).splitlines()[0]}"
        if not float((whole - torch.cat(rest, 1)).std()) <= tolerance * float(whole.std()):
            return f"{name} reads {what} after its states otherwise than as part of the whole text"
    if _operations(model, ids[:1, : 2 * few]) != _operations(model, ids[:1]):
        return f"{name} loops over tokens outside its operations: a graph would hold the loop of one length"
    return None


def _operations(model: Any, ids: torch.Tensor) -> int:
    """Tensor operations of one step."""
    with _Count(_COUNTED) as seen:
        step(model, ids)
    return int(seen.count)


class _Count(TorchDispatchMode):
    """Counts operations of some names."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names, self.count = names, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func.overloadpacket) in self.names
        return func(*args, **(kwargs or {}))
