"""``taylor``: remove the blocks whose weights matter least to the loss, to first order (Shortened LLaMA, 2402.02834).

::

    I(block) = sum over weights W of  sum_ij |W_ij dL/dW_ij|       L: mean next-token loss over the calibration set

Weights are the parameters named "weight" of the block, norms included. One-shot; one forward and backward pass, with
the gradients of all blocks in float32. The first four and the last two blocks are protected by default (the paper's
"+"); ``--protect-first 0 --protect-last 0`` is the plain criterion.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ghostexport.calibration import CalibrationSet
from ghostexport.errors import CalibrationError
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.selection.likelihood import predictions
from ghostexport.selection.ranking import lowest_blocks


def taylor(loaded: LoadedModel, calibration: CalibrationSet, section: SelectSection, execution: Execution) -> PrunePlan:
    """Scores all blocks.

    Raises:
        RecipeError: too few blocks are eligible.
        CalibrationError: a gradient is not finite.
    """
    return lowest_blocks("taylor", taylor_scores(loaded, calibration, execution), section)


def taylor_scores(loaded: LoadedModel, calibration: CalibrationSet, execution: Execution) -> list[float]:
    """``I(block)`` of every block.

    Raises:
        CalibrationError: a gradient is not finite.
    """
    weights = {
        (index, name): parameter
        for index, block in enumerate(loaded.blocks)
        for name, parameter in block.named_parameters()
        if "weight" in name
    }
    gradients = _gradients(loaded, calibration, weights, execution)
    scores = [0.0] * loaded.num_blocks
    for (index, name), parameter in weights.items():
        salience = float((parameter.detach().float() * gradients[index, name]).abs().sum(dtype=torch.float64))
        if not salience < float("inf"):
            raise CalibrationError(
                f"The gradient of {name} in block {index} is not finite.", "Use --dtype bfloat16 or float32."
            )
        scores[index] += salience
    return scores


def _gradients(
    loaded: LoadedModel,
    calibration: CalibrationSet,
    weights: Mapping[tuple[int, str], torch.nn.Parameter],
    execution: Execution,
) -> dict[tuple[int, str], torch.Tensor]:
    """``dL/dW`` float32 of every weight, summed with sign over the batches."""
    tokens = int((calibration.attention_mask[:, :-1] & calibration.attention_mask[:, 1:]).sum())
    sums = {key: torch.zeros_like(parameter, dtype=torch.float32) for key, parameter in weights.items()}
    for parameter in weights.values():
        parameter.requires_grad_(True)
    try:
        for batch in calibration.batches(loaded.device):
            loss = torch.zeros((), device=loaded.device)
            for rows, wanted in predictions(loaded.model, batch):
                loss = loss + torch.nn.functional.cross_entropy(rows.float(), wanted, reduction="sum")
            for key, gradient in zip(weights, torch.autograd.grad(loss / tokens, list(weights.values())), strict=True):
                sums[key] += gradient.float()
            execution.progress("select", batch.sequences.stop, len(calibration))
    finally:
        for parameter in weights.values():
            parameter.requires_grad_(False)
    return sums
