"""``streamline-ffn``: a feed-forward network trained in place of the removed run (LLM-Streamline, 2403.19135).

::

    y = relu(x_s W1 + b1) W2 + b2        C -> 4C -> C, no residual, no norm        argmin mean_t ||y - x_e||^2

AdamW, learning rate 2e-4 falling to 5e-5 on a cosine, weight decay 1e-3, gradients clipped at norm 5. A trained peer:
8 C^2 parameters beside the C^2 of an operator, and published with a hundred thousand documents, seen once; here it gets
the calibration tokens of everybody else, several times over. All cuts are trained on the dense model's stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ghostexport.calibration import CalibrationSet
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import Boundary
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.gathering import stream_boundaries
from ghostexport.recovery.held_out import measure
from ghostexport.recovery.last_block import LastBlock
from ghostexport.recovery.trained import on_cosine

FIRST_RATE, LAST_RATE = 2e-4, 5e-5
WEIGHT_DECAY = 1e-3
CLIP = 5.0
EPOCHS = 10

#: Width of the hidden layer over that of the stream.
EXPANSION = 4


class _Student:
    """One cut's network, its optimizer and the losses of the last epoch."""

    def __init__(self, boundary: Boundary, channels: int, device: torch.device) -> None:
        hidden = EXPANSION * channels
        generator = torch.Generator().manual_seed(boundary.index)
        self.boundary = boundary
        self.first = _linear(channels, hidden, generator).to(device)
        self.second = _linear(hidden, channels, generator).to(device)
        self.parameters = [*self.first.parameters(), *self.second.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=FIRST_RATE, weight_decay=WEIGHT_DECAY)
        self.losses: list[float] = []

    @torch.enable_grad()
    def step(self, x: torch.Tensor, post: torch.Tensor, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = (self.second(torch.relu(self.first(x))) - post).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self.losses.append(float(loss.detach()))

    def operator(self, fit: dict[str, Any]) -> Operator:
        network = tuple(
            array.detach().cpu().numpy()
            for layer in (self.first, self.second)
            for array in (layer.weight.T.contiguous(), layer.bias)
        )
        return Operator(self.boundary, "streamline-ffn", network=network, fit=fit)  # type: ignore[arg-type]


def train_network(
    loaded: LoadedModel,
    start: OperatorSet,
    calibration: CalibrationSet,
    held_out: CalibrationSet,
    section: RecoverSection,
    execution: Execution,
) -> OperatorSet:
    """Trains every cut's network, one pass of the dense model per epoch; what was put there at first is not used."""
    plan = start.plan
    epochs = section.epochs or EPOCHS
    students = [_Student(b, loaded.hidden_size, loaded.device) for b in plan.boundaries]
    for epoch in range(epochs):
        for student in students:
            student.losses.clear()
        step = _stepper(students, epoch, epochs, len(calibration))
        batches = calibration.batches(loaded.device)
        stream_boundaries(loaded, plan.boundaries, batches, len(calibration), step, execution, f"epoch {epoch + 1}")
    operators = [
        s.operator({"loss": sum(s.losses) / len(s.losses), "epochs": epochs, "tokens": calibration.num_tokens})
        for s in students
    ]
    errors = measure(loaded, plan, held_out, {"ffn": operators}, execution)["ffn"]
    return replace(start, operators=tuple(operators)).with_fit(errors)


def _stepper(students: Sequence[_Student], epoch: int, epochs: int, sequences: int) -> Callable[..., None]:
    def step(
        index: int, seen: range, mask: torch.Tensor, x: torch.Tensor, post: torch.Tensor, last: LastBlock | None
    ) -> None:
        progress = (epoch + seen.start / sequences) / epochs
        students[index].step(x[mask].float(), post[mask].float(), on_cosine(FIRST_RATE, LAST_RATE, progress))

    return step


def _linear(rows: int, columns: int, generator: torch.Generator) -> nn.Linear:
    """PyTorch's own initial weights, from a generator of their own."""
    layer = nn.Linear(rows, columns)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-(rows**-0.5), rows**-0.5, generator=generator)
    return layer
