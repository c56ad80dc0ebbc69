"""Scaling the residual stream by scaling weights: no operator runs.

With ``alpha`` at a cut the stream should go on as ``alpha x + f_1 + f_2 + ...`` with the results ``f`` of the blocks
behind it. Every block, and the head, reads the stream through a norm that ignores its magnitude; so the stream may as
well go on as ``x + f_1 / alpha + f_2 / alpha + ...``. Embeddings are not touched, and tied heads stay tied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ghostexport.errors import ModelLayoutError
from ghostexport.models.anatomy import agree, find_all_projections, probe_calls
from ghostexport.models.blocks import find_blocks


def scale_blocks(model: Any, factors: Mapping[int, float]) -> None:
    """Multiplies what each block adds to the stream by its factor, in new parameters; the model is changed.

    The output projections (weights and biases) are scaled; in post-norm blocks (Gemma 2 and 3, OLMo 2), the gains of
    the norms that follow them.

    Raises:
        ModelLayoutError: a block has neither, such as a mixture of experts.
    """
    for index, projections in find_all_projections(model, factors).items():
        if projections.additive:
            for module in {projections.attention_output, projections.mlp_output}:
                module.weight = _scaled(module.weight, factors[index])
                if module.bias is not None:
                    module.bias = _scaled(module.bias, factors[index])
        else:
            for norm in _post_norms(model, index):
                _scale_gain(norm, factors[index])


def _scaled(parameter: torch.Tensor, factor: float) -> nn.Parameter:
    return nn.Parameter((parameter.float() * factor).to(parameter.dtype), requires_grad=False)


def _post_norms(model: Any, index: int) -> tuple[nn.Module, nn.Module]:
    """The two modules with a gain ``[C]`` whose results are added to the stream."""
    block = find_blocks(model)[index]
    gains = {m for m in block.children() if [p.ndim for p in m.parameters()] == [1]}
    *calls, (_, entered, left) = probe_calls(model, {*gains, block})  # the block itself ends last
    wanted = (left - entered).float()
    for first in range(len(calls)):
        for second in range(first + 1, len(calls)):
            if agree((calls[first][2] + calls[second][2]).float(), wanted, left.dtype):
                return calls[first][0], calls[second][0]
    raise ModelLayoutError(
        f"Block {index} of {type(model).__name__} adds something else than two projections or norms to its stream.",
        "Use an operator that acts at the boundary, such as ghost.",
    )


def _scale_gain(norm: nn.Module, factor: float) -> None:
    """Scales a norm's result: its gain is ``w``, or ``1 + w`` (Gemma); a zero gain tells which."""
    name, gain = next(iter(norm.named_parameters()))
    x = torch.linspace(-1, 1, len(gain), device=gain.device, dtype=gain.dtype)[None]
    setattr(norm, name, nn.Parameter(torch.zeros_like(gain), requires_grad=False))
    with torch.no_grad():
        shift = float(bool(norm(x).any()))
    changed = ((gain.float() + shift) * factor - shift).to(gain.dtype)
    setattr(norm, name, nn.Parameter(changed, requires_grad=False))
