"""Whether an engine computes what its graph says: its logits against the graph on ONNX Runtime's CPU provider."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ghostexport.errors import RuntimeUnavailableError
from ghostexport.runtimes.base import Session
from ghostexport.verification import TOLERANCES, GraphRun

PROMPT = 12


def engine_difference(load: Callable[[], Session], graph: Path, seed: int, prompt: int = PROMPT) -> float:
    """Largest error of the engine's logits over the standard deviation of the graph's: one prefill, one decode step.

    NaN or infinite where a logit is.

    Args:
        load: opens the engine.
        graph: the ONNX file it was built from, float32 or float16.
        seed: of the token ids.
        prompt: tokens of the prefill.

    Raises:
        RuntimeUnavailableError: ONNX Runtime cannot run the graph.
    """
    reference = GraphRun(graph)
    session = load()
    try:
        ids = np.random.default_rng(seed).integers(3, 100, (1, prompt + 1))
        cache, past = session.new_cache(1), reference.empty_cache(1)
        errors = []
        for start, stop in ((0, prompt), (prompt, prompt + 1)):
            logits, cache = session.forward(ids[:, start:stop], cache)
            outputs = reference.run(ids[:, start:stop], past, np.ones((1, stop), np.int64))
            past = {name: outputs[present] for name, present in reference.kv}
            expected = outputs["logits"].astype(np.float64)
            errors.append(np.abs(logits[:, -1] - expected[:, -1]).max() / expected.std())
    finally:
        session.close()
    return float(np.max(errors))  # the built-in max would lose a NaN


def engine_agrees(
    load: Callable[[], Session], graph: Path, runtime: str, dtype: str, seed: int, prompt: int = PROMPT
) -> tuple[bool, str]:
    """Whether an engine is within tolerance of its graph, and a sentence about it.

    TensorRT multiplies float32 in TF32, whose mantissa is float16's: there float16's tolerance applies to both.
    """
    if dtype not in TOLERANCES:
        return True, f"not compared: ONNX Runtime has no {dtype} kernels on the CPU"
    tolerance = TOLERANCES[dtype if runtime == "onnxruntime" else "float16"].relative
    try:
        worst = engine_difference(load, graph, seed, prompt)
    except RuntimeUnavailableError as error:
        return True, f"not compared: {error.message}"
    if not np.isfinite(worst):
        return False, "the engine's logits are not finite"
    return (
        worst <= tolerance,
        f"logits differ from the graph's by {worst:.1e} of their deviation (tolerance {tolerance:.0e})",
    )
