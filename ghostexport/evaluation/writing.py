"""What models write: greedy continuations of the same prompts, and how much of it is said again.

::

    distinct-n = different n-grams / n-grams, over all continuations of a model        Li et al., 1510.03055
    repeated   = mean over continuations of 1 - different 4-grams / 4-grams            seq-rep-4, 1908.04319

N-grams are of tokens, so the figures mean the same in every language.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ghostexport.calibration import CalibrationSet
from ghostexport.evaluation.text import greedy
from ghostexport.execution import Execution

#: Tokens of held-out text that a sample continues.
PROMPT = 24

#: Length of the n-grams that count as repeated.
REPEATED = 4


def write(
    models: Mapping[str, Any], tokenizer: Any, windows: CalibrationSet, tokens: int, execution: Execution
) -> dict[str, dict[str, Any]]:
    """Of every model ``samples`` (``prompt`` and ``text`` of every window) and ``writing`` (:func:`variety`)."""
    count = min(PROMPT, windows.tokens.shape[1] // 2)
    prompts = torch.from_numpy(windows.tokens[:, :count])
    found = {}
    for done, (name, model) in enumerate(models.items()):
        execution.progress("evaluate: continuations", done, len(models))
        written = [greedy(model, tokenizer, prompt[None], tokens) for prompt in prompts]
        samples = [
            {"prompt": tokenizer.decode(prompt), "text": tokenizer.decode(ids)}
            for prompt, ids in zip(prompts, written, strict=True)
        ]
        found[name] = {"samples": samples, "writing": variety(written)}
    return found


def variety(written: Sequence[Sequence[int]]) -> dict[str, float | None]:
    """``distinct_1``, ``distinct_2`` and ``repeated`` of token ids; None where nothing is long enough."""
    found: dict[str, float | None] = {}
    for n in (1, 2):
        grams = [gram for ids in written for gram in _grams(ids, n)]
        found[f"distinct_{n}"] = len(set(grams)) / len(grams) if grams else None
    long = [grams for ids in written if (grams := _grams(ids, REPEATED))]
    found["repeated"] = sum(1 - len(set(grams)) / len(grams) for grams in long) / len(long) if long else None
    return found


def _grams(ids: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
