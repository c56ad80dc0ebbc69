"""Runs a decoder graph in ONNX Runtime and the model in PyTorch on the same feeds: prefill, then decode with past.

Shared by the surgery tests. Feeds are built from the graph's own inputs, so every producer's names are understood.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ghostexport.kv_names import pair_kv

_NUMPY = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def session(path: Path, fused: bool = True) -> onnxruntime.InferenceSession:
    """``fused=False``: the operators as they stand in the graph."""
    options = onnxruntime.SessionOptions()
    if not fused:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def onnx_logits(
    path: Path, chunks: Sequence[NDArray[np.int64]], fused: bool = True, embedding: Path | None = None
) -> list[NDArray[np.float32]]:
    """Logits of each chunk of tokens ``(B, T)``, fed one after the other through the KV cache.

    A graph without a cache gets all tokens so far each time. Where a graph leaves head count and head size open, they
    are those of the fixtures (2 and 16). ``embedding`` makes the vectors of a graph that takes no ids.
    """
    embed = None if embedding is None else session(embedding, fused)
    run = session(path, fused)
    inputs = {i.name: i for i in run.get_inputs()}
    outputs = [o.name for o in run.get_outputs()]
    pairs = pair_kv(list(inputs), outputs)
    logits_name = "logits" if "logits" in outputs else outputs[0]
    cache: dict[str, NDArray[Any]] = {}
    result, past = [], 0
    for step, ids in enumerate(chunks):
        batch, tokens = ids.shape
        if not pairs:
            together = np.concatenate(list(chunks[: step + 1]), axis=1)
            result.append(np.asarray(run.run([logits_name], {"input_ids": together})[0])[:, -tokens:])
            continue
        for name, _ in pairs:
            if name not in cache:
                heads, dim = (
                    d if isinstance(d, int) else w for d, w in zip(inputs[name].shape[1::2], (2, 16), strict=True)
                )
                cache[name] = np.zeros((batch, heads, 0, dim), _NUMPY[inputs[name].type])
        feeds: dict[str, NDArray[Any]] = {"input_ids": ids, **cache}
        if embed is not None:
            feeds["inputs_embeds"] = np.asarray(embed.run(None, {"input_ids": ids})[0])
        feeds["attention_mask"] = np.ones((batch, past + tokens), np.int64)
        feeds["position_ids"] = np.broadcast_to(np.arange(past, past + tokens), (batch, tokens))
        feeds["use_cache_branch"] = np.array([past > 0])
        values = dict(zip(outputs, run.run(None, {k: v for k, v in feeds.items() if k in inputs}), strict=True))
        cache = {name: values[present] for name, present in pairs}
        result.append(np.asarray(values[logits_name], np.float32))
        past += tokens
    return result


def torch_logits(model: Any, chunks: Sequence[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
    """The same with the PyTorch model and its dynamic cache."""
    import torch

    cache, past, result = None, 0, []
    with torch.no_grad():
        for ids in chunks:
            batch, tokens = ids.shape
            output = model(
                input_ids=torch.from_numpy(ids),
                attention_mask=torch.ones(batch, past + tokens, dtype=torch.long),
                position_ids=torch.arange(past, past + tokens)[None].expand(batch, -1),
                past_key_values=cache,
                use_cache=True,
            )
            cache, past = output.past_key_values, past + tokens
            result.append(output.logits.float().numpy())
    return result


def chunks(vocabulary: int, lengths: Sequence[int], batch: int = 2, seed: int = 0) -> list[NDArray[np.int64]]:
    """Random tokens: the first chunk is a prefill, the others decode with past > 0."""
    generator = np.random.default_rng(seed)
    return [generator.integers(3, vocabulary, (batch, length), dtype=np.int64) for length in lengths]


def assert_same(candidate: Sequence[NDArray[Any]], reference: Sequence[NDArray[Any]], tolerance: float) -> None:
    """Every chunk agrees within ``tolerance`` times the largest reference logit."""
    for step, (a, b) in enumerate(zip(candidate, reference, strict=True)):
        assert a.shape == b.shape, step
        error = float(np.abs(a - b).max() / np.abs(b).max())
        assert error < tolerance, f"step {step}: relative error {error:.2e}"
