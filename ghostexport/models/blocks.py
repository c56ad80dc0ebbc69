"""Finding a model's decoder blocks without knowing its architecture, and checking that they are residual and causal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ghostexport.errors import CalibrationError, ModelLayoutError

#: Earlier positions may differ by rounding when a later token changes (batched kernels), but not by more.
CAUSAL_TOLERANCE = 1e-3

_REMEDY = "Use a decoder-only causal LM with one residual stream."


def find_blocks(model: Any) -> nn.ModuleList:
    """The list of decoder blocks, in depth order.

    It is the one ``nn.ModuleList`` of ``num_hidden_layers`` modules in the model's decoder (the language tower of a
    vision-language model); where several have that length, the one whose members the model itself declares
    unsplittable (``_no_split_modules``).

    Raises:
        ModelLayoutError: none, or more than one.
    """
    config = model.config.get_text_config()
    count = getattr(config, "num_hidden_layers", None)
    tower = model.get_decoder() if getattr(model.config, "vision_config", None) is not None else model
    lists = {
        name: module
        for name, module in tower.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    declared = set(getattr(model, "_no_split_modules", None) or ())
    marked = {name: m for name, m in lists.items() if all(type(block).__name__ in declared for block in m)}
    found = marked or lists
    if len(found) != 1:
        shown = ", ".join(found) or "none"
        raise ModelLayoutError(
            f"The decoder blocks of {type(model).__name__} are not one list of {count} modules; candidates: {shown}.",
            _REMEDY,
        )
    return next(iter(found.values()))


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The residual stream among a block's inputs, positional or keyword."""
    value = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(value, torch.Tensor):
        raise ModelLayoutError("A decoder block is not called with its hidden states first.", _REMEDY)
    return value


def output_states(output: Any) -> torch.Tensor:
    """The residual stream among a block's outputs: the tensor itself or the first of a tuple."""
    value = output if isinstance(output, torch.Tensor) else output[0]
    if not isinstance(value, torch.Tensor):
        raise ModelLayoutError("A decoder block does not return its hidden states first.", _REMEDY)
    return value


def check_layout(model: Any) -> None:
    """One forward pass over two rows of four tokens that differ only in the last one.

    Raises:
        ModelLayoutError: the blocks do not run once each in order, do not hand one ``(B, T, C)`` stream on unchanged,
            or let a later token influence earlier ones (an encoder).
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelLayoutError(f"{type(model).__name__} is an encoder-decoder model.", _REMEDY)
    blocks = find_blocks(model)
    config = model.config.get_text_config()
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.append((hidden_states(args, kwargs), output_states(output)))

    handles = [block.register_forward_hook(keep, with_kwargs=True) for block in blocks]
    run_probe(model, handles)
    _require_residual(model, seen, len(blocks), int(config.hidden_size))


class StopForwardError(Exception):
    """Raised in a hook to leave a forward pass; never seen outside the function that does it."""


def run_probe(model: Any, handles: Iterable[Any] = (), last: int | None = None) -> None:
    """One short pass of the model, behind block ``last`` at its end, under hooks that are removed afterwards."""

    def stop(block: nn.Module, args: Any) -> None:
        raise StopForwardError

    handles, blocks = [*handles], find_blocks(model)
    if last is not None and last + 1 < len(blocks):
        handles.append(blocks[last + 1].register_forward_pre_hook(stop))
    try:
        with torch.no_grad(), contextlib.suppress(StopForwardError):
            model(input_ids=probe_tokens(model), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


def probe_tokens(model: Any) -> torch.Tensor:
    """Token ids ``(2, 4)``; the rows differ in the last token only."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    rows = torch.arange(1, 5).repeat(2, 1) % vocabulary
    rows[1, -1] = 0
    return rows.to(input_device(model))


def input_device(model: Any) -> torch.device:
    """Where token ids go; of a model split over devices, memory and disk, the device of its first part."""
    for place in getattr(model, "hf_device_map", {}).values():
        return torch.device("cpu" if place in ("cpu", "disk") else place)
    device: torch.device = next(model.parameters()).device
    return device


def _require_residual(model: Any, seen: list[tuple[torch.Tensor, torch.Tensor]], count: int, width: int) -> None:
    name = type(model).__name__
    if len(seen) != count:
        raise ModelLayoutError(f"{count} decoder blocks of {name} made {len(seen)} calls in one forward pass.", _REMEDY)
    for index, (entered, left) in enumerate(seen):
        if entered.shape != (2, 4, width) or left.shape != entered.shape:
            raise ModelLayoutError(
                f"Block {index} of {name} maps {tuple(entered.shape)} to {tuple(left.shape)}; a residual block maps "
                f"(B, T, {width}) to itself.",
                _REMEDY,
            )
        if not bool(torch.isfinite(left).all()):
            raise CalibrationError(
                f"Block {index} of {name} makes NaN or infinity in {left.dtype}: its output is not finite.",
                "Use --dtype bfloat16 or float32, and check the model's weights.",
            )
        if index and not torch.equal(seen[index - 1][1], entered):
            raise ModelLayoutError(f"Block {index} of {name} does not read the output of block {index - 1}.", _REMEDY)
        past = left[:, :-1].float()
        if (past[0] - past[1]).abs().max() > CAUSAL_TOLERANCE * past.abs().max():
            raise ModelLayoutError(
                f"{name} is not causal: block {index} lets later tokens reach earlier ones.", _REMEDY
            )
