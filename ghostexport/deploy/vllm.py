"""What runs the folder of target ``vllm``, which is that of ``transformers``: vLLM itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ghostexport.deploy.selftest import Answer, read_selftest

INSTALL = "pip install vllm==0.32.0"


def run(folder: Path, prompts: Sequence[list[int]], count: int) -> list[Answer]:
    """See :data:`selftest.Runner`: on whatever device vLLM was built for."""
    from vllm import LLM, SamplingParams

    model = LLM(
        model=str(folder),
        trust_remote_code=True,
        dtype=read_selftest(folder)["dtype"],  # by itself it takes 16 bits for float32 weights
        max_model_len=max(map(len, prompts)) + count + 1,
        enforce_eager=True,
        logprobs_mode="raw_logits",
        max_logprobs=-1,
    )
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    how = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    first = model.generate(asked, SamplingParams(**how, max_tokens=1, logprobs=-1), use_tqdm=False)
    whole = model.generate(asked, SamplingParams(**how, max_tokens=count), use_tqdm=False)
    given = (entry.outputs[0].logprobs[0] for entry in first)
    return [(_logits(logits), list(entry.outputs[0].token_ids)) for logits, entry in zip(given, whole, strict=True)]


def _logits(entries: Mapping[int, Any]) -> NDArray[np.float32]:
    found = np.full(max(entries) + 1, np.nan, np.float32)
    for token, entry in entries.items():
        found[token] = entry.logprob
    return found
