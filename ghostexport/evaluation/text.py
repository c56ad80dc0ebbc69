"""Quality of a language model on text: its loss, its distance to the dense model, and what it writes.

Logits are arrays from anywhere (PyTorch, ONNX Runtime, an engine); nothing of vocabulary size is kept between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.evaluation.quality_meter import Quality, QualityMeter, predicting
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel
from ghostexport.models.calls import finish
from ghostexport.models.walking import walk_to_the_end

#: Rows of logits in a loss at once, float32: 1024 x 150k x 4 B = 600 MB at the largest vocabularies.
LOSS_ROWS = 1024

#: ``(B, T)`` int64 token ids and mask to ``(B, T, V)`` logits, as a NumPy array or tensor.
Forward = Callable[[torch.Tensor, torch.Tensor | None], Any]


def predictions(logits: Any, tokens: torch.Tensor, mask: torch.Tensor, rows: int) -> Iterator[tuple[Any, Any]]:
    """Of the positions that count, logits ``[n, V]`` and the tokens ``[n]`` they should predict, ``n <= rows``.

    Args:
        logits: ``(B, T, V)``; position t predicts token t + 1, the last position predicts nothing.
        tokens, mask: ``(B, T)`` int64 and bool.
    """
    counted = predicting(mask)
    values = torch.as_tensor(logits)
    here = values[:, :-1][counted.to(values.device)].split(rows)
    yield from zip(here, tokens[:, 1:][counted].to(values.device).split(rows), strict=True)


def losses(logits: torch.Tensor, batch: Batch) -> Iterator[tuple[torch.Tensor, int]]:
    """Sums of the next-token loss, float32 nats, and how many tokens are in each; differentiable."""
    for rows, wanted in predictions(logits, batch.input_ids, batch.mask, LOSS_ROWS):
        yield torch.nn.functional.cross_entropy(rows.float(), wanted, reduction="sum"), len(wanted)


def evaluate(
    models: Mapping[str, Forward],
    windows: CalibrationSet,
    reference: str | None = None,
    execution: Execution | None = None,
) -> dict[str, Quality]:
    """Measures several models on the same windows: the results of :func:`measure`."""
    return {name: meter.result() for name, meter in measure(models, windows, reference, execution).items()}


def measure(
    models: Mapping[str, Forward],
    windows: CalibrationSet,
    reference: str | None = None,
    execution: Execution | None = None,
    also: Mapping[str, str] | None = None,
) -> dict[str, QualityMeter]:
    """Measures several models on the same windows, one window at a time.

    Args:
        models: name to forward function (:func:`forward_of`, or one around a runtime's session).
        windows: held-out text.
        reference: name of the model that the others are compared with; it is compared with itself too (KL 0).
        execution: receives progress.
        also: name of a model -> another that it is compared with as well; the result is under ``"name, other"``.
    """
    execution = execution or Execution()
    pairs = [(name, name, reference) for name in models]
    pairs += [(f"{name}, {other}", name, other) for name, other in (also or {}).items()]
    meters = {key: QualityMeter() for key, _, _ in pairs}
    for batch in windows.batches(tokens=1):
        logits = {name: forward(batch.input_ids, batch.attention_mask) for name, forward in models.items()}
        for key, name, other in pairs:
            meters[key].add(logits[name], batch.input_ids, batch.mask, None if other is None else logits[other])
        execution.progress("evaluate", batch.sequences.stop, len(windows))
    return meters


def forward_of(loaded: LoadedModel, batches: Iterable[Batch], execution: Execution) -> Forward:
    """The forward function of a PyTorch model on some batches, and no other tokens.

    A model that is walked goes through all of them first: its last residual values are kept, which its head reads.
    """
    if not loaded.walked:
        return torch_forward(loaded.model)
    batches = list(batches)
    shelf = walk_to_the_end(loaded, batches, execution, "evaluate")
    numbers = {batch.input_ids.numpy().tobytes(): number for number, batch in enumerate(batches)}

    def forward(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        batch = Batch(range(len(input_ids)), input_ids, mask.bool())
        return finish(loaded, batch, shelf.look(numbers[input_ids.numpy().tobytes()]))

    return forward


def torch_forward(model: Any) -> Forward:
    """The forward function of a PyTorch model: no gradients, no cache."""

    def forward(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        device = next(model.parameters()).device
        mask = None if attention_mask is None else attention_mask.to(device)
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=input_ids.to(device), attention_mask=mask, use_cache=False).logits
        return logits

    return forward


def continuation(model: Any, tokenizer: Any, prompt: torch.Tensor, tokens: int) -> str:
    """The greedy continuation of ``prompt`` ``(1, T)`` int64 by at most ``tokens`` tokens, as text."""
    text: str = tokenizer.decode(greedy(model, tokenizer, prompt, tokens))
    return text


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, prompt: torch.Tensor, tokens: int) -> list[int]:
    """The same as token ids."""
    prompt = prompt.to(next(model.parameters()).device)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=padding,
    )
    found: list[int] = ids[0, prompt.shape[1] :].tolist()
    return found
