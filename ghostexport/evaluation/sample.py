"""What a model writes: the figure that says most to a reader and least to a statistician."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def continuation(model: Any, tokenizer: Any, prompt: torch.Tensor, tokens: int) -> str:
    """The greedy continuation of ``prompt`` ``(1, T)`` int64 by at most ``tokens`` tokens, as text."""
    prompt = prompt.to(next(model.parameters()).device)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ids = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=padding,
    )
    text: str = tokenizer.decode(ids[0, prompt.shape[1] :])
    return text
