"""``ghost-distilled``, ``linearpatch-distilled``: the map trained on the dense model's predictions (2505.24680).

::

    p = softmax of the dense model's K largest logits         stored once per token: fp16, with int32 indices
    M = argmin  mean_t KL(p_t || softmax of the repaired model's logits at the same K tokens)

Everything but the maps at the cuts is frozen; they start from the closed form (``ghost``, ``linearpatch-rotate``) and
leave its family. AdamW, learning rate 1e-4 falling to a twentieth on a cosine, weight decay 1e-4 (of M: towards no
operator; the published code decays W towards zero), one sequence a step. The state with the least held-out loss is
kept, the start included, so training never makes it worse there. The predictions take ``6 K + 4`` bytes of disk per
token.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.errors import RecoveryError
from ghostexport.execution import Execution
from ghostexport.models import BoundaryModule, LoadedModel, patch
from ghostexport.operators import Operator, OperatorSet
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.held_out import measure
from ghostexport.recovery.trained import on_cosine
from ghostexport.recovery.trained.teacher import Teacher

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 1e-4
LAST_RATE = 1 / 20

#: Logits kept per token (the paper; its code keeps 50).
TOP = 100

#: The held-out loss is looked at this many times per epoch.
CHECKS = 4


def distil(
    loaded: LoadedModel,
    start: OperatorSet,
    calibration: CalibrationSet,
    held_out: CalibrationSet,
    section: RecoverSection,
    execution: Execution,
) -> OperatorSet:
    """Trains the dense ``delta`` of every operator together; ``fit`` holds held-out losses and the best step.

    Raises:
        RecoveryError: the maps have a rank.
    """
    if section.rank is not None:
        raise RecoveryError("Distilled operators are full matrices.", "Leave --rank out.")
    student = patch(loaded, start.plan, start).model
    deltas = [module.delta for module in student.modules() if isinstance(module, BoundaryModule)]
    with tempfile.TemporaryDirectory(prefix="ghostexport-") as scratch:
        teacher = Teacher(loaded, calibration, Path(scratch), "calibration", TOP)
        judge = Teacher(loaded, held_out, Path(scratch), "held-out", TOP)
        best, figures = _train(student, deltas, teacher, judge, calibration, held_out, section.epochs or 1, execution)
    operators = [
        replace(operator, kind=f"{_family(operator)}-distilled", delta=M.cpu().numpy(), fit=figures)
        for operator, M in zip(start.operators, best, strict=True)
    ]
    errors = measure(loaded, start.plan, held_out, {"distilled": operators}, execution)["distilled"]
    return replace(start, operators=tuple(operators)).with_fit(errors)


def _train(
    student: Any,
    deltas: Sequence[Any],
    teacher: Teacher,
    judge: Teacher,
    calibration: CalibrationSet,
    held_out: CalibrationSet,
    epochs: int,
    execution: Execution,
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The best float32 maps, and what was seen. Weights of 16-bit models are stepped in float32 copies."""
    masters = [delta.detach().float().clone() for delta in deltas]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    steps, every = epochs * len(calibration), max(1, len(calibration) // CHECKS)
    first = least = _judged(student, judge, held_out)
    best, best_step, step = [m.clone() for m in masters], 0, 0
    for _ in range(epochs):
        for batch in calibration.batches(deltas[0].device, tokens=1):
            _set(optimizer, step / steps)
            _step(student, deltas, masters, teacher.loss, batch, optimizer)
            step += 1
            execution.progress("recover: distil", step, steps)
            if step % every == 0 or step == steps:
                loss = _judged(student, judge, held_out)
                if loss < least:
                    least, best, best_step = loss, [m.clone() for m in masters], step
    figures = {"loss_before": first, "loss_held_out": least, "best_step": best_step, "steps": steps}
    return best, figures


def _step(
    student: Any, deltas: Sequence[Any], masters: Sequence[torch.Tensor], loss: Any, batch: Batch, optimizer: Any
) -> None:
    for delta in deltas:
        delta.requires_grad_(True)
    gradients = torch.autograd.grad(loss(student, batch), list(deltas))
    for delta, master, gradient in zip(deltas, masters, gradients, strict=True):
        delta.requires_grad_(False)
        master.grad = gradient.float()
    optimizer.step()
    for delta, master in zip(deltas, masters, strict=True):
        delta.copy_(master)


def _set(optimizer: Any, progress: float) -> None:
    """Learning rate: half a cosine from the whole to a twentieth."""
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * on_cosine(1, LAST_RATE, progress)


def _judged(student: Any, judge: Teacher, held_out: CalibrationSet) -> float:
    with torch.no_grad():
        device = next(student.parameters()).device
        losses = [float(judge.loss(student, batch)) for batch in held_out.batches(device, tokens=1)]
    return float(np.mean(losses))


def _family(operator: Operator) -> str:
    return operator.kind.split("-")[0]
