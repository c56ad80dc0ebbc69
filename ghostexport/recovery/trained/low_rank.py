"""A change of low rank, trained beside a frozen linear layer and merged: ``W' = W + (A B)'`` (LoRA, 2106.09685)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ghostexport.models import right_multiply, set_right_multiply

#: The rate of ``A`` and ``B`` over that of whole weights: as B starts at 0, the product moves with the square.
RATE = 10.0


class LowRank:
    """``y = x W + (x A) B`` with ``A`` ``[in, R]`` random and ``B`` ``[R, out]`` zero at first, both float32."""

    def __init__(self, layer: Any, rank: int, seed: int) -> None:
        inputs, outputs = right_multiply(layer).shape
        generator = torch.Generator().manual_seed(seed)
        A = torch.randn(inputs, rank, generator=generator) / inputs**0.5
        self.layer, device = layer, layer.weight.device
        self.A, self.B = nn.Parameter(A.to(device)), nn.Parameter(torch.zeros(rank, outputs, device=device))
        self.handle = layer.register_forward_hook(self._add)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.A, self.B]

    def merge(self) -> None:
        """Makes the change part of the weight; the layer is an ordinary one again."""
        self.handle.remove()
        weight = right_multiply(self.layer)
        set_right_multiply(self.layer, (weight.float() + (self.A @ self.B).detach()).to(weight.dtype))

    def _add(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output + (args[0] @ self.A) @ self.B
