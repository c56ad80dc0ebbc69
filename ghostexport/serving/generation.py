"""Greedy and sampled generation on any :class:`Session`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ghostexport.errors import RecipeError
from ghostexport.runtimes.base import Session

TokenIds = NDArray[np.int64]

#: Tokens of one call while a prompt is read: bounds the logits, which every call returns for all of its tokens.
CHUNK = 512


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: filters in the order of transformers, then a draw from what is left.

    Attributes:
        temperature: 0 takes the most likely token; otherwise the draw is from ``softmax(logits / temperature)``.
        top_k: only the k most likely tokens; 0 for all.
        top_p: only the most likely tokens that together reach this probability; 1 for all.
        repetition_penalty: logits of tokens seen before (prompt included) are divided by it where positive, else
            multiplied; 1 for none.
        seed: of the draws.

    Raises:
        RecipeError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, range_ in (
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("seed", self.seed >= 0, "0 or more"),
        ):
            if not good:
                raise RecipeError(f"{name} = {getattr(self, name)} is out of range.", f"It must be {range_}.")


def generate(
    session: Session,
    input_ids: TokenIds,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    eos_token_id: int | None = None,
    attention_mask: TokenIds | None = None,
) -> TokenIds:
    """New tokens ``[B, n]``, n <= ``max_new_tokens``, after the prompts ``input_ids`` ``[B, T]``.

    Args:
        session: a loaded engine.
        input_ids: prompts, padded on the left to one length.
        max_new_tokens: most tokens to generate.
        sampling: how tokens are chosen.
        eos_token_id: a sequence that produced it is continued with it; generation ends when all have.
        attention_mask: ``[B, T]``, 0 at padding; None when nothing is padded.
    """
    tokens: list[TokenIds] = []
    ended = np.zeros(len(input_ids), bool)
    for step in steps(session, input_ids, max_new_tokens, sampling, attention_mask=attention_mask):
        if eos_token_id is not None:
            step[ended] = eos_token_id  # in place: what follows sees it
            ended |= step == eos_token_id
        tokens.append(step[:, None])
        if ended.all():
            break
    return np.concatenate([input_ids[:, :0], *tokens], axis=1)


def steps(
    session: Session,
    input_ids: TokenIds,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    *,
    attention_mask: TokenIds | None = None,
    chunk: int = CHUNK,
) -> Iterator[TokenIds]:
    """Yields the next token of every sequence, ``[B]``, up to ``max_new_tokens`` times, as each is computed.

    Keys and values go from one call's outputs to the next one's inputs, where the runtime holds them. A token that
    the caller changes in place is continued as changed.

    Args:
        chunk: most tokens of one call, which an engine's profile may limit; longer prompts are read in several.
    """
    rng = np.random.default_rng(sampling.seed)
    cache = session.new_cache(len(input_ids))
    step, mask = np.ascontiguousarray(input_ids, np.int64), attention_mask
    seen: NDArray[np.bool_] | None = None
    for _ in range(max_new_tokens):
        for start in range(0, step.shape[1], chunk):
            part = step[:, start : start + chunk]
            given = None if mask is None else mask[:, : mask.shape[1] - step.shape[1] + start + part.shape[1]]
            logits, cache = session.forward(part, cache, given)
        last = logits[:, -1]
        if sampling.repetition_penalty != 1:
            seen = np.zeros(last.shape, bool) if seen is None else seen
            np.put_along_axis(seen, step, True, axis=1)
        chosen = choose(last, sampling, rng, seen)
        yield chosen
        step = chosen[:, None]
        mask = None if mask is None else np.concatenate([mask, np.ones_like(step)], axis=1)


def choose(
    logits: NDArray[np.float32],
    sampling: Sampling,
    rng: np.random.Generator,
    seen: NDArray[np.bool_] | None = None,
) -> TokenIds:
    """One token ``[B]`` of logits ``[B, V]``; ``seen`` ``[B, V]`` says where the repetition penalty applies."""
    filtered = filter_logits(logits, sampling, seen)
    if sampling.temperature == 0:
        return np.asarray(filtered.argmax(-1), np.int64)
    # argmax of logits plus Gumbel noise samples from the softmax
    return np.asarray((filtered + rng.gumbel(size=logits.shape)).argmax(-1), np.int64)


def filter_logits(
    logits: NDArray[np.float32], sampling: Sampling, seen: NDArray[np.bool_] | None = None
) -> NDArray[np.float32]:
    """Logits ``[B, V]`` after the penalty, the temperature, top-k and top-p; -inf where no token is drawn."""
    if seen is not None:
        penalty = np.float32(sampling.repetition_penalty)
        logits = np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.temperature == 0:
        return logits
    logits = logits / np.float32(sampling.temperature)
    if 0 < sampling.top_k < logits.shape[-1]:
        least = np.partition(logits, -sampling.top_k, axis=-1)[:, -sampling.top_k, None]
        logits = np.where(logits < least, -np.inf, logits)
    if sampling.top_p < 1:
        order = np.argsort(-logits, axis=-1, kind="stable")
        ranked = np.take_along_axis(logits, order, axis=-1)
        likely = np.exp(ranked - ranked[:, :1])
        before = np.cumsum(likely, axis=-1) - likely  # of the more likely ones
        kept = np.zeros(logits.shape, bool)
        np.put_along_axis(kept, order, before < sampling.top_p * likely.sum(-1, keepdims=True), axis=-1)
        logits = np.where(kept, logits, -np.inf)
    return logits
