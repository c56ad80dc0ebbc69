"""``replaceme-cosine``: ReplaceMe's map trained for direction instead of solved for distance (2505.02819).

With ``m`` the MLP output of the last kept block, ``x_s = x_mid + m``::

    T = argmin  1 - mean_t cos(m T, x_e - x_mid)        Adam, lr 1e-4, 1024 tokens a step, 10 epochs, T = I at first
    y = x_mid + m T        folded into the down-projection as in replaceme-lstsq

Several cuts are trained one after the other, each behind the repaired ones, as published. ``m`` and the targets wait in
a temporary file of ``8 N C`` bytes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ghostexport.calibration import CalibrationSet
from ghostexport.execution import Execution
from ghostexport.files import require_space
from ghostexport.models import LoadedModel
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import Boundary
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.fits.down_projection import folded
from ghostexport.recovery.last_block import LastBlock
from ghostexport.recovery.several_cuts import Crossing, fit_sequential

LEARNING_RATE = 1e-4
TOKENS = 1024
EPOCHS = 10


def train_cosine(
    loaded: LoadedModel,
    start: OperatorSet,
    calibration: CalibrationSet,
    held_out: CalibrationSet,
    section: RecoverSection,
    execution: Execution,
) -> OperatorSet:
    """Trains every cut; what was put there at the start is not used. ``fit`` holds the mean cosine before and after.

    Raises:
        RecoveryError: the last kept block is no plain sum of stream, attention and MLP.
    """
    epochs = section.epochs or EPOCHS

    def fit(boundary: Boundary, crossings: Iterator[Crossing]) -> Operator:
        with tempfile.TemporaryDirectory(prefix="ghostexport-") as scratch:
            m, target, last = _collect(crossings, calibration.num_tokens, loaded.hidden_size, Path(scratch))
            T, before, after = _train(m, target, epochs, loaded.device, execution)
        figures = {"cosine_before": before, "cosine_after": after, "epochs": epochs, "tokens": calibration.num_tokens}
        fold = folded(boundary, last.weight, last.bias, T.double().to(last.weight))
        return Operator(boundary, "replaceme-cosine", folds=(fold,), fit=figures)

    operators = fit_sequential(loaded, start.plan, calibration, held_out, fit, True, execution)
    return replace(start, operators=operators)


def _collect(
    crossings: Iterator[Crossing], tokens: int, channels: int, folder: Path
) -> tuple[np.ndarray, np.ndarray, LastBlock]:
    """``m`` and ``x_e - x_mid`` ``[N, C]`` float32 on disk, and the last block (for its weight)."""
    require_space(folder, 8 * tokens * channels, "the activations that replaceme-cosine trains on")
    m, target = (np.memmap(folder / name, np.float32, "w+", shape=(tokens, channels)) for name in ("m", "target"))
    row, known = 0, None
    for batch, x, post, last in crossings:
        assert last is not None
        known, mask = last, batch.mask
        middle = last.mid[mask].float()
        rows = slice(row, row + len(middle))
        m[rows] = (x[mask].float() - middle).cpu().numpy()
        target[rows] = (post[mask].float() - middle).cpu().numpy()
        row = rows.stop
    assert known is not None
    return m, target, known


def _train(
    m: np.ndarray, target: np.ndarray, epochs: int, device: torch.device, execution: Execution
) -> tuple[torch.Tensor, float, float]:
    """``T`` ``[C, C]`` and the mean cosine of the first and of the last epoch's end."""
    T = torch.eye(m.shape[1], device=device, requires_grad=True)
    optimizer = torch.optim.Adam([T], lr=LEARNING_RATE)
    before = _mean_cosine(m, target, T.detach(), device)
    for epoch in range(epochs):
        for x, y in _chunks(m, target, device):
            optimizer.zero_grad()
            (1 - torch.nn.functional.cosine_similarity(x @ T, y, dim=1).mean()).backward()
            optimizer.step()
        execution.progress("recover: replaceme-cosine", epoch + 1, epochs)
    return T.detach(), before, _mean_cosine(m, target, T.detach(), device)


def _chunks(m: np.ndarray, target: np.ndarray, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for first in range(0, len(m), TOKENS):
        part = slice(first, first + TOKENS)
        yield torch.from_numpy(m[part].copy()).to(device), torch.from_numpy(target[part].copy()).to(device)


def _mean_cosine(m: np.ndarray, target: np.ndarray, T: torch.Tensor, device: torch.device) -> float:
    cosines = (torch.nn.functional.cosine_similarity(x @ T, y, dim=1).sum() for x, y in _chunks(m, target, device))
    return float(sum(cosines)) / len(m)
