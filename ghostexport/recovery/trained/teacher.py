"""What the dense model predicts for every token of a set, once and on disk: its K most probable tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.execution import Execution
from ghostexport.files import require_space
from ghostexport.models import LoadedModel


class Teacher:
    """The dense model's K largest logits of every real token, as probabilities, on disk: ``6 K + 4`` bytes a token.

    Attributes:
        values: ``[n, K]`` float16, the K probabilities normalised to a sum of 1.
        indices: ``[n, K]`` int32, their tokens.
        covered: ``[n]`` float32, what the K probabilities add up to among the whole vocabulary's.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        tokens: CalibrationSet,
        folder: Path,
        name: str,
        top: int,
        execution: Execution | None = None,
    ) -> None:
        """Runs the model, unless ``folder`` holds a finished set of that name."""
        K, n = min(top, loaded.vocab_size), tokens.num_tokens
        done = folder / f"{name}.done"
        mode: Literal["r", "w+"] = "r" if done.exists() else "w+"
        if mode == "w+":
            require_space(folder, (6 * K + 4) * n, "the dense model's predictions")
        self.values = np.memmap(folder / f"{name}.values", np.float16, mode, shape=(n, K))
        self.indices = np.memmap(folder / f"{name}.indices", np.int32, mode, shape=(n, K))
        self.covered = np.memmap(folder / f"{name}.covered", np.float32, mode, shape=(n,))
        self.starts = np.concatenate([[0], tokens.attention_mask.sum(1).cumsum()])
        for batch in tokens.batches(loaded.device, tokens=1) if mode == "w+" else ():
            with torch.no_grad():
                output = logits(loaded.model, batch)
            top_logits, rows = output.topk(K, dim=1), self._rows(batch)
            probabilities = top_logits.values.float().softmax(1)
            self.values[rows] = probabilities.half().cpu().numpy()
            self.indices[rows] = top_logits.indices.int().cpu().numpy()
            covered = (top_logits.values.float().logsumexp(1) - output.float().logsumexp(1)).exp()
            self.covered[rows] = covered.cpu().numpy()
            if execution is not None:
                execution.progress(f"recover: dense model, {name}", batch.sequences.stop, len(tokens))
        done.touch()

    def loss(self, model: Any, batch: Batch) -> torch.Tensor:
        """Mean over the real tokens of one sequence of ``KL(teacher || student)`` on the K tokens."""
        p, chosen, _ = self._at(batch)
        log_q = logits(model, batch).float().gather(1, chosen).log_softmax(1)
        return torch.nn.functional.kl_div(log_q, p, reduction="batchmean")

    def divergence(self, output: torch.Tensor, batch: Batch, floor: float = 1e-6) -> torch.Tensor:
        """Mean over the real tokens of the KL of the whole distributions, all other tokens taken together as one.

        Args:
            output: the student's logits ``[n, V]`` of the real tokens.
            floor: of what is left for the others.
        """
        p, chosen, covered = self._at(batch)
        p = p * covered[:, None]
        log_q = output.float().gather(1, chosen) - output.float().logsumexp(1, keepdim=True)
        p_rest = (1 - covered).clamp_min(floor)
        q_rest = (1 - log_q.exp().sum(1)).clamp_min(floor)
        inside = torch.where(p > 0, p * (p.clamp_min(1e-12).log() - log_q), 0.0).sum(1)
        return (inside + p_rest * (p_rest.log() - q_rest.log())).mean()

    def _at(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, device = self._rows(batch), batch.input_ids.device
        p = torch.from_numpy(self.values[rows].astype(np.float32)).to(device)
        chosen = torch.from_numpy(self.indices[rows].astype(np.int64)).to(device)
        return p, chosen, torch.from_numpy(self.covered[rows].copy()).to(device)

    def _rows(self, batch: Batch) -> slice:
        return slice(int(self.starts[batch.sequences.start]), int(self.starts[batch.sequences.stop]))


def logits(model: Any, batch: Batch) -> torch.Tensor:
    """``[n, V]`` of the real tokens."""
    output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    found: torch.Tensor = output.logits[batch.mask]
    return found
