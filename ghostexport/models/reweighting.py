"""New values for any parameters of a cut model, by their names in the dense one: read off a model, and put into one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ghostexport.errors import ModelLayoutError, RecoveryError
from ghostexport.models.blocks import find_blocks, run_probe
from ghostexport.new_weights import NewWeight, places
from ghostexport.plan import PrunePlan


def changed_weights(dense: Any, plan: PrunePlan, cut: Any) -> dict[str, NewWeight]:
    """What of a cut model is not the dense model's any more, by the name in the dense model.

    Args:
        dense: the dense model.
        plan: blocks that the cut model lacks.
        cut: the same without them, with any values; what it has beside (operators at the cuts) is left out.

    Returns:
        Values in the dense model's dtype, bfloat16 as float32; in the order in which they run.

    Raises:
        ModelLayoutError: a parameter of the dense model's kept blocks is missing or has another shape.
    """
    names, new = dense_names(dense, plan), dict(cut.named_parameters())
    own, order = dict(dense.named_parameters()), _running_order(dense)
    twins, found = _twins(dense, order), {}
    for name in order:
        here, block = names[name]
        if here is None:
            continue
        before, after = own[name].detach(), new.get(here)
        if after is None or after.shape != before.shape:
            has = "lacks it" if after is None else f"has {list(after.shape)}"
            raise ModelLayoutError(
                f"{name} is {list(before.shape)} in the dense model; the cut model {has}.",
                "Use a checkpoint that was made by removing blocks of this model.",
            )
        value = after.detach().to(before.device, before.dtype)
        if not torch.equal(value, before):
            at = torch.as_tensor(places(before.shape), device=before.device)
            known = before.reshape(-1)[at].float().cpu().numpy()
            found[name] = NewWeight(_numbers(value), known, block, *twins[name])
    return found


def all_weights(model: Any, plan: PrunePlan | None = None) -> dict[str, NewWeight]:
    """Every parameter of a model, recognised by its own numbers, in the order in which they run.

    Args:
        plan: the model is cut by it: names and blocks become those of the dense model.
    """
    names, prefix = _cut_names(model, plan or PrunePlan(len(find_blocks(model)), ())), _prefix(model)
    found = {}
    for name in _running_order(model):
        if _inside(name, prefix)[1].startswith("ghost"):
            continue  # an operator at a cut
        value = _numbers(model.get_parameter(name))
        known = value.reshape(-1)[places(value.shape)].astype("float32")
        dense, block = names[name]
        found[dense] = NewWeight(value, known, block, near=True)
    return found


def set_weights(cut: Any, plan: PrunePlan, weights: Mapping[str, NewWeight]) -> None:
    """Gives a cut model new parameters, also where it ties them; those it shared with another model stay as they are.

    Raises:
        RecoveryError: it has no such parameter, or one of another shape.
    """
    if not weights:
        return
    names = {dense: here for here, (dense, _) in _cut_names(cut, plan).items()}
    slots: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in cut.modules():
        for key, parameter in module.named_parameters(recurse=False):
            slots.setdefault(id(parameter), []).append((module, key))
    known = dict(cut.named_parameters(remove_duplicate=False))
    for name, weight in weights.items():
        old = known.get(names.get(name, ""))
        if old is None or tuple(old.shape) != weight.value.shape:
            raise RecoveryError(
                f"The new weight {name} {weight.value.shape} is no parameter of this {type(cut).__name__}, or has "
                "another shape.",
                "Recover operators for this model.",
            )
        new = nn.Parameter(torch.as_tensor(weight.value).to(old), requires_grad=False)
        for module, key in slots[id(old)]:
            setattr(module, key, new)


def dense_names(dense: Any, plan: PrunePlan) -> dict[str, tuple[str | None, int | None]]:
    """Of every parameter of a dense model its name in the cut one (None: removed), and its block (None: outside)."""
    prefix = _prefix(dense)
    found: dict[str, tuple[str | None, int | None]] = {}
    for name, _ in dense.named_parameters():
        block, rest = _inside(name, prefix)
        position = None if block is None else plan.new_index(block)
        here = name if block is None else None if position is None else f"{prefix}{position}.{rest}"
        found[name] = here, block
    return found


def _cut_names(cut: Any, plan: PrunePlan) -> dict[str, tuple[str, int | None]]:
    prefix = _prefix(cut)
    found: dict[str, tuple[str, int | None]] = {}
    for name, _ in cut.named_parameters(remove_duplicate=False):
        position, rest = _inside(name, prefix)
        block = None if position is None else plan.kept[position]
        found[name] = (name if block is None else f"{prefix}{block}.{rest}"), block
    return found


def _prefix(model: Any) -> str:
    blocks = find_blocks(model)
    return next(f"{name}." for name, module in model.named_modules() if module is blocks)


def _inside(name: str, prefix: str) -> tuple[int | None, str]:
    if not name.startswith(prefix):
        return None, name
    index, _, rest = name.removeprefix(prefix).partition(".")
    return int(index), rest


def _running_order(model: Any) -> list[str]:
    """Names of the parameters, by when the module that holds them first runs; those that never run last."""
    order: list[nn.Module] = []
    handles = [
        module.register_forward_pre_hook(lambda m, args: order.append(m) if m not in order else None)
        for module in model.modules()
        if next(module.named_parameters(recurse=False), None) is not None
    ]
    run_probe(model, handles)
    when = {id(p): i for i, module in reversed(list(enumerate(order))) for p in module.parameters(recurse=False)}
    names = [name for name, _ in model.named_parameters()]
    return sorted(names, key=lambda name: when.get(id(model.get_parameter(name)), len(order)))


def _twins(model: Any, order: list[str]) -> dict[str, tuple[int, int]]:
    """Of every parameter: the how manieth it is of those of its block with the same content, and how many there are."""
    prefix = _prefix(model)
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name in order:
        parameter = model.get_parameter(name).detach()
        content = hashlib.sha256(_numbers(parameter).tobytes()).hexdigest()
        alike.setdefault((_inside(name, prefix)[0], parameter.numel(), content), []).append(name)
    return {name: (i, len(group)) for group in alike.values() for i, name in enumerate(group)}


def _numbers(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
