"""The PyTorch twin of a quantised graph: weights hold what their rounded numbers stand for, inputs are rounded."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ghostexport.errors import ParityError
from ghostexport.models.variants import share_weights
from ghostexport.onnxfile import load_graph, values
from ghostexport.quantization import dynamic
from ghostexport.quantization.forms import E4M3_MAX, FORMS
from ghostexport.quantization.reader import RoundedInput, rounded_inputs, rounded_weights
from ghostexport.quantization.targets import DYNAMIC

#: A weight of model and graph that surgery and PyTorch folded an operator into each: rounded in another order.
_SAME = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-2}


def round_weights(model: Any, source: Path, quantized: Path) -> Any:
    """A copy of ``model`` with the weights of ``quantized``; what is not quantised is shared.

    Weights are found by content: a graph's names are its exporter's affair.

    Args:
        model: the float model, cut and repaired as ``source`` is.
        source: the float graph.
        quantized: the graph that was made of it.

    Raises:
        ParityError: a weight of ``source`` is none of the model's.
    """
    twin = share_weights(model)
    stored = load_graph(source).graph.initializers
    inputs = rounded_inputs(quantized)
    for name, rounded in rounded_weights(quantized):
        weight = stored[name].const_value
        assert weight is not None
        found = list(_equal(twin, values(weight).astype(np.float32)))
        if not found:
            raise ParityError(
                f"No weight of the PyTorch model equals {name} of {source.name}.",
                "Export and surgery must be run again, or this is a bug.",
            )
        for module, key, transposed in found:
            parameter = getattr(module, key)
            value = torch.from_numpy(np.ascontiguousarray(rounded.T if transposed else rounded))
            setattr(module, key, nn.Parameter(value.to(parameter), requires_grad=False))
            if name in inputs and not isinstance(module, nn.Embedding):
                module.register_forward_pre_hook(functools.partial(_round_input, inputs[name]))
    return twin


def _round_input(how: RoundedInput, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the nodes do to a module's first argument, which is what it multiplies."""
    x, *others = arguments
    if how.inverse is not None:
        x = x * torch.from_numpy(how.inverse).to(x)
    if how.form in DYNAMIC:
        rounded = dynamic.round_blocks(x.detach().float().cpu().numpy(), FORMS[how.form], how.scale)
        return (torch.from_numpy(rounded).to(x), *others)
    scaled = x.float() / how.scale
    if how.form == "int8":
        q = scaled.round().clamp(-128, 127)
    else:
        q = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    return ((q * how.scale).to(x), *others)


def _equal(model: nn.Module, weight: NDArray[np.float32]) -> Iterator[tuple[nn.Module, str, bool]]:
    """Every place whose parameter is ``weight``: module, name, and whether it lies transposed there."""
    wanted = torch.from_numpy(np.ascontiguousarray(weight))
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.ndim != 2:
                continue
            near = _SAME[parameter.dtype] * float(wanted.abs().max())
            for transposed, candidate in ((False, wanted), (True, wanted.T)):
                if parameter.shape != candidate.shape:
                    continue
                if not (parameter[0].float() - candidate[0]).abs().max() <= near:
                    continue
                if (parameter.float() - candidate).abs().max() <= near:
                    yield module, key, transposed
                    break
