"""The next-token loss of a model on a calibration set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ghostexport.calibration import Batch, CalibrationSet

#: Rows of logits in float32 at once: 1024 x 150k x 4 B = 600 MB at the largest vocabularies.
ROWS = 1024


def mean_loss(model: Any, calibration: CalibrationSet, device: torch.device) -> float:
    """Mean negative log-likelihood, in nats, of every real token that follows a real token. One forward pass."""
    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch in calibration.batches(device):
            for rows, wanted in predictions(model, batch):
                total += float(torch.nn.functional.cross_entropy(rows.float(), wanted, reduction="sum"))
                tokens += len(wanted)
    return total / tokens


def predictions(model: Any, batch: Batch) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits ``[n, V]`` and the tokens ``[n]`` that they should predict, at most :data:`ROWS` at a time."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    counted = batch.mask[:, :-1] & batch.mask[:, 1:]
    targets = batch.input_ids[:, 1:][counted]
    yield from zip(logits[:, :-1][counted].split(ROWS), targets.split(ROWS), strict=True)
