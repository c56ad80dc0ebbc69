"""Scores of the blocks' weights, lowest removed (Mag+ and Taylor+ in Shortened LLaMA, 2402.02834).

::

    magnitude(block) = sum over weights W of  sum_ij |W_ij|
    taylor(block)    = sum over weights W of  sum_ij |W_ij dL/dW_ij|       L: mean next-token loss, calibration set

Weights are the parameters named "weight" of the block, norms included. The first four and the last two blocks are
protected by default (the paper's "+"); ``--protect-first 0 --protect-last 0`` is the plain criterion.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ghostexport.calibration import CalibrationSet
from ghostexport.errors import CalibrationError
from ghostexport.evaluation.quality_meter import predicting
from ghostexport.evaluation.text import losses
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel, find_projections


def magnitude(
    loaded: LoadedModel, calibration: CalibrationSet, execution: Execution, writes: float = 1.0
) -> list[float]:
    """Of every block, without calibration; ``writes`` multiplies the weights whose results are added to the stream."""
    scores = []
    for index, block in enumerate(loaded.blocks):
        scores.append(sum(_size(p) for name, p in block.named_parameters() if "weight" in name))
        if writes != 1.0:
            projections = find_projections(loaded.model, index)
            written = (projections.attention_output, projections.mlp_output)
            scores[-1] += (writes - 1) * sum(_size(module.weight) for module in written)
    return scores


def _size(weight: torch.Tensor) -> float:
    return float(weight.abs().sum(dtype=torch.float64))


def taylor(loaded: LoadedModel, calibration: CalibrationSet, execution: Execution) -> list[float]:
    """Of every block: one forward and backward pass, with the gradients of all blocks in float32.

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
    tokens = int(predicting(torch.from_numpy(calibration.attention_mask != 0)).sum())
    sums = {key: torch.zeros_like(parameter, dtype=torch.float32) for key, parameter in weights.items()}
    for parameter in weights.values():
        parameter.requires_grad_(True)
    try:
        for batch in calibration.batches(loaded.device):
            ids, mask = batch.input_ids, batch.attention_mask
            logits = loaded.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            loss = torch.zeros((), device=loaded.device)
            for part, _ in losses(logits, batch):
                loss = loss + part
            for key, gradient in zip(weights, torch.autograd.grad(loss / tokens, list(weights.values())), strict=True):
                sums[key] += gradient.float()
            execution.progress("select", batch.sequences.stop, len(calibration))
    finally:
        for parameter in weights.values():
            parameter.requires_grad_(False)
    return sums
