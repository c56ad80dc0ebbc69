"""What the engines compute: their logits against the graph's, and their quality, so that a fast broken one shows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ghostexport.benchmarking.measuring import Loaders
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import CalibrationError, RuntimeUnavailableError
from ghostexport.evaluation.quality_meter import QualityMeter
from ghostexport.execution import Execution
from ghostexport.files import require_space
from ghostexport.runtimes.base import EngineFile, Session
from ghostexport.runtimes.ort.onnxruntime import open_graph
from ghostexport.tolerances import TOLERANCES

PROMPT = 12


def engine_difference(
    load: Callable[[], Session], graph: Path, seed: int, prompt: int = PROMPT, exact: bool = True
) -> float:
    """Largest error of the engine's logits over the standard deviation of the graph's: one prefill, one decode step.

    NaN or infinite where a logit is.

    Args:
        load: opens the engine.
        graph: the ONNX file it was built from, float32 or float16.
        seed: of the token ids.
        prompt: tokens of the prefill.
        exact: see :func:`open_graph`; False for ONNX Runtime's engines, whose kernels are the graph's own.

    Raises:
        RuntimeUnavailableError: ONNX Runtime cannot run the graph.
    """
    reference = open_graph(graph, exact)
    session = load()
    try:
        ids = np.random.default_rng(seed).integers(3, 100, (1, prompt + 1))
        cache, past = session.new_cache(1), reference.new_cache(1)
        errors = []
        for start, stop in ((0, prompt), (prompt, prompt + 1)):
            logits, cache = session.forward(ids[:, start:stop], cache)
            wanted, past = reference.forward(ids[:, start:stop], past)
            expected = wanted.astype(np.float64)
            errors.append(np.abs(logits[:, -1] - expected[:, -1]).max() / expected.std())
    finally:
        session.close()
    return float(np.max(errors))  # the built-in max would lose a NaN


def agreements(
    loaders: Loaders, graphs: Mapping[str, Path], engine: EngineFile, dtype: str, seed: int, execution: Execution
) -> dict[str, bool]:
    """Variant -> whether its engine agrees with the graph it was built from; each is said.

    Args:
        loaders: of the engines of one runtime, by variant.
        graphs: by variant.
        engine: one of the engines: its runtime, and the longest prompt that its profiles take.
        dtype: of the graphs.
        seed: of the token ids.
    """
    agreed = {}
    for done, (variant, load) in enumerate(loaders.items()):
        execution.progress("bench: parity", done, len(loaders))
        prompt = min(PROMPT, engine.flags["max_tokens"])
        agreed[variant], sentence = engine_agrees(load, graphs[variant], engine.runtime, dtype, seed, prompt)
        execution.say(f"parity of {variant} on {engine.runtime}: {sentence}")
    execution.progress("bench: parity", len(loaders), len(loaders))
    return agreed


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
        worst = engine_difference(load, graph, seed, prompt, exact=runtime != "onnxruntime")
    except RuntimeUnavailableError as error:
        return True, f"not compared: {error.message}"
    if not np.isfinite(worst):
        return False, "the engine's logits are not finite"
    return (
        worst <= tolerance,
        f"logits differ from the graph's by {worst:.1e} of their deviation (tolerance {tolerance:.0e})",
    )


def windows(held_out: CalibrationSet, tokens: int, longest: int) -> Iterator[NDArray[np.int64]]:
    """Windows ``(T,)`` of at most ``longest`` tokens with ``tokens`` predicted tokens in all; padding is left out."""
    left = tokens
    for ids, mask in zip(held_out.tokens, held_out.attention_mask, strict=True):
        real = ids[mask == 1]
        for first in range(0, len(real) - 1, longest):
            window = real[first : first + min(longest, left + 1)]
            if len(window) < 2:
                continue
            left -= len(window) - 1
            yield window
            if left <= 0:
                return


def engine_quality(
    loaders: Mapping[str, Callable[[], Session]],
    held_out: CalibrationSet,
    tokens: int,
    longest: int,
    execution: Execution,
) -> dict[str, Any]:
    """Runs every engine over the same held-out windows, one engine at a time.

    The dense logits wait in a temporary file, so that two engines are never needed in memory together.

    Args:
        loaders: variant -> function that loads its engine; the first is the reference (``dense``).
        tokens: predicted tokens.
        longest: tokens of a window, each from an empty cache (an engine's profiles limit it).

    Returns:
        ``{"tokens", "window", "variants": {name: {"perplexity", "kl" (nats, to the reference), "top1"}}}``.

    Raises:
        CalibrationError: there is no held-out text.
    """
    chosen = list(windows(held_out, tokens, longest))
    if not chosen:
        raise CalibrationError("The held-out set has no tokens to predict.", "Use longer --length or another source.")
    rows = sum(map(len, chosen))
    figures: dict[str, dict[str, float | None]] = {}
    with tempfile.TemporaryDirectory(prefix="ghostexport-") as folder:
        reference: Any = None
        for number, (variant, load) in enumerate(loaders.items()):
            execution.progress("evaluate", number, len(loaders))
            session, meter, row = load(), QualityMeter(), 0
            for window in chosen:
                logits = session.forward(window[None], session.new_cache(1))[0]  # (1, T, V)
                if reference is None:
                    require_space(Path(folder), rows * logits.shape[2] * 4, "the dense logits")
                    reference = np.memmap(Path(folder) / "dense", np.float32, "w+", shape=(rows, logits.shape[2]))
                part = slice(row, row + len(window))
                if number == 0:
                    reference[part] = logits[0]
                meter.add(logits, window[None], reference=np.asarray(reference[part])[None])
                row += len(window)
            session.close()
            found = meter.result()
            figures[variant] = {
                "perplexity": found.perplexity,
                "kl": found.mean_kl,
                "top1": found.top1_agreement,
            }
        del reference
    execution.progress("evaluate", len(loaders), len(loaders))
    return {"tokens": rows - len(chosen), "window": longest, "variants": figures}
