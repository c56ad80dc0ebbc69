"""Greedy and sampled generation on any :class:`Session`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ghostexport.runtimes.base import Session

TokenIds = NDArray[np.int64]


def generate(
    session: Session,
    input_ids: TokenIds,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    eos_token_id: int | None = None,
    attention_mask: TokenIds | None = None,
) -> TokenIds:
    """New tokens ``[B, n]``, n <= ``max_new_tokens``, after the prompt ``input_ids`` ``[B, T]``.

    Args:
        session: a loaded engine.
        input_ids: prompts, padded on the left to one length.
        max_new_tokens: most tokens to generate.
        temperature: 0 takes the most likely token; otherwise samples from ``softmax(logits / temperature)``.
        seed: of the sampling.
        attention_mask: ``[B, T]``, 0 at padding; None when nothing is padded.
        eos_token_id: a sequence that produced it is continued with it; generation ends when all have.
    """
    rng = np.random.default_rng(seed)
    cache = session.new_cache(len(input_ids))
    step, mask = np.ascontiguousarray(input_ids, np.int64), attention_mask
    tokens: list[TokenIds] = []
    ended = np.zeros(len(input_ids), bool)
    while len(tokens) < max_new_tokens and not ended.all():
        logits, cache = session.forward(step, cache, mask)
        step = _choose(logits[:, -1], temperature, rng)[:, None]
        if eos_token_id is not None:
            step[ended] = eos_token_id
            ended |= step[:, 0] == eos_token_id
        tokens.append(step)
        mask = None if mask is None else np.concatenate([mask, np.ones_like(step)], axis=1)
    return np.concatenate([step[:, :0], *tokens], axis=1)


def _choose(logits: NDArray[np.float32], temperature: float, rng: np.random.Generator) -> TokenIds:
    if temperature <= 0:
        return np.asarray(logits.argmax(-1), np.int64)
    # argmax of logits plus Gumbel noise samples from the softmax
    return np.asarray((logits / temperature + rng.gumbel(size=logits.shape)).argmax(-1), np.int64)
