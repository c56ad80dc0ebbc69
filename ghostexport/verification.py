"""Parity: the same tokens through a PyTorch model and an ONNX graph, every output compared.

Four feeds, batch 2: a short and a long prefill (past 0), and one decode step after each, on each side's own cache. The
short prefill has a padded row. A model with a sliding window (or attention chunks) that these do not leave gets two
more: the end of a prefill that is longer than it, fed in parts, and a decode step there. So does a model with states,
whose long prefill is fed at once: it must reach over the chunks in which its mixers compute. Sequences are random ids
from a fixed seed unless given.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ghostexport.errors import ParityError
from ghostexport.float32_twin import for_cpu
from ghostexport.kv_names import pair_kv, parse_kv_name
from ghostexport.models.running import MANY, cache_tensors, step
from ghostexport.models.widening import widened
from ghostexport.quantization.reader import rounded_inputs
from ghostexport.runtimes.interface import read_interface
from ghostexport.runtimes.ort.onnxruntime import open_graph
from ghostexport.runtimes.ort.ort_session import OrtSession
from ghostexport.tolerances import ROUNDED, ROUNDED_SCALARS, TOLERANCES, Tolerance

SHORT, LONG = 7, 24
PART = 64  # tokens of a prefill at once: logits of a whole window can be gigabytes
FARTHEST = 1024  # windows up to here are left: 4,096 tokens through a 7B model on a CPU take longer than its export
PADDING = 2  # tokens of left padding in row 1 of the short prefill


_ROUNDED_NOTE = "Inputs of products are rounded: a last bit may be rounded at other places, so the tolerance is wider."

#: Prefix of the folders that hold twins of a graph while it is compared.
_SCRATCH = ".parity."


@dataclass(frozen=True)
class OutputParity:
    """One output of one feed.

    Attributes:
        feed: ``prefill 7``, ``decode 7+1``, ...
        output: name in the graph.
        max_abs: largest absolute error.
        relative: ``max_abs`` over the standard deviation of the reference output.
        kl, top1: of the next-token distributions: mean KL in nats, share of equal first choices; None but for logits.
        passed: within tolerance.
    """

    feed: str
    output: str
    max_abs: float
    relative: float
    kl: float | None
    top1: float | None
    passed: bool


@dataclass(frozen=True)
class ParityReport:
    """Outcome of a comparison.

    Attributes:
        reference, candidate: what was compared.
        dtype: of the graph.
        computed_in: dtype both sides computed in; ``float32`` for a bfloat16 graph, see ``note``.
        tolerance: applied to every output.
        outputs: per feed: keys and values in block order, then logits.
        first_divergence: the first failing output in depth order, or None. Keys and values of block ``k`` are the
            first to see a wrong residual stream entering block ``k``.
        note: what was not compared, and why; empty when everything was.
    """

    reference: str
    candidate: str
    dtype: str
    computed_in: str
    tolerance: Tolerance
    outputs: tuple[OutputParity, ...]
    first_divergence: OutputParity | None
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.first_divergence is None

    @property
    def worst_relative(self) -> float:
        return max(output.relative for output in self.outputs)

    @property
    def worst_kl(self) -> float:
        return max(output.kl for output in self.outputs if output.kl is not None)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON-ready data; ``outputs`` as rows."""
        return {"passed": self.passed, "worst_relative": self.worst_relative, "worst_kl": self.worst_kl} | asdict(self)


def remove_leftovers(folder: Path) -> None:
    """Removes what a killed comparison left beside the graphs, weights as large as theirs; none may be running."""
    for scratch in folder.glob(f"{_SCRATCH}*"):
        shutil.rmtree(scratch, ignore_errors=True)


@dataclass(frozen=True)
class _Step:
    """One call of a feed: token ids ``(2, T)``, mask ``(2, past + T)``, whether it begins with an empty cache, and the
    feed's name where its outputs are compared."""

    ids: NDArray[np.int64]
    mask: NDArray[np.int64]
    begins: bool
    feed: str


@dataclass(frozen=True)
class Reference:
    """What a PyTorch model makes of the feeds. It is complete before a graph is opened: both need never be in memory.

    Attributes:
        model: the name of its class.
        dtype: of its weights; ``computed_in``: of its outputs.
        window: tokens that its local attention reaches back.
        steps: the calls of all feeds.
        outputs: by feed, keys, values and logits by their names in the graph.
    """

    model: str
    dtype: str
    computed_in: str
    window: int
    steps: tuple[_Step, ...]
    outputs: Mapping[str, Mapping[str, NDArray[Any]]]

    def compare(self, graph: Path, variant: str = "dense") -> ParityReport:
        """Runs ``graph``, that of the same change, on ONNX Runtime's CPU provider; a difference is in the report."""
        rounds = bool(rounded_inputs(graph))
        exact = ROUNDED_SCALARS if self.dtype == "bfloat16" else TOLERANCES[self.computed_in]
        tolerance = ROUNDED if rounds else exact
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=graph.parent) as folder:
            runnable, note = for_cpu(graph, self.dtype, Path(folder))
            outputs = tuple(self._measured(open_graph(runnable, lean=True), tolerance))
        note = f"{note} {_ROUNDED_NOTE}".strip() if rounds else note
        if self.window > FARTHEST:
            note = f"{note} The window of {self.window} tokens was not left.".strip()
        first = next((output for output in outputs if not output.passed), None)
        names = (f"PyTorch {self.model}, {self.dtype}", f"{variant} ({graph.name}) on ONNX Runtime, CPU")
        return ParityReport(*names, self.dtype, self.computed_in, tolerance, outputs, first, note)

    def verify(self, graph: Path, variant: str = "dense") -> ParityReport:
        """As :meth:`compare`; raises as :func:`verify`."""
        report = self.compare(graph, variant)
        bad = report.first_divergence
        if bad is not None:
            kv = parse_kv_name(bad.output, output=True)
            where = f"the residual stream that enters block {kv.block}" if kv else "the blocks' end or the head"
            metric = f"max error / std = {bad.relative:.3g} (tolerance {report.tolerance.relative:g})"
            if bad.kl is not None:
                metric += f", KL = {bad.kl:.3g} nats (tolerance {report.tolerance.kl:g})"
            raise ParityError(
                f"{report.candidate} differs from {report.reference}: output {bad.output} at {bad.feed}: {metric}.",
                f"The first difference is in {where}. Export and surgery must be run again, or this is a bug.",
            )
        return report

    def _measured(self, candidate: OrtSession, tolerance: Tolerance) -> Iterator[OutputParity]:
        cache: Any = None
        for call in self.steps:
            cache = candidate.new_cache(2) if call.begins else cache
            outputs, cache = candidate.outputs(call.ids, cache, call.mask)
            if call.feed:
                expected, actual = _without_padding(self.outputs[call.feed], outputs, call.mask)
                for name in sorted(expected, key=_depth):
                    yield _measure(call.feed, name, expected[name], actual[name], tolerance)


def verify(model: Any, graph: Path, variant: str = "dense", tokens: NDArray[np.int64] | None = None) -> ParityReport:
    """Compares ``graph`` on ONNX Runtime's CPU provider with ``model``.

    Args:
        model: the Hugging Face model that was changed as the graph was.
        graph: ONNX decoder.
        variant: name for the report.
        tokens: ``(2, >= 25)`` token ids to use instead of random ones; repeated where a feed is longer.

    Raises:
        ParityError: an output differs by more than the tolerance; names output, metric and tolerance.
        RuntimeUnavailableError: onnxruntime is missing, or cannot run the graph.
    """
    return refer(model, graph, tokens).verify(graph, variant)


def compare(model: Any, graph: Path, variant: str = "dense", tokens: NDArray[np.int64] | None = None) -> ParityReport:
    """As :func:`verify`, but a difference is a value in the report, not an exception."""
    return refer(model, graph, tokens).compare(graph, variant)


def refer(model: Any, graph: Path, tokens: NDArray[np.int64] | None = None) -> Reference:
    """Runs the PyTorch model over the feeds; ``graph`` says what its outputs are called there."""
    interface, window = read_interface(graph), _window(model)
    pairs = pair_kv([t.name for t in interface.inputs], [t.name for t in interface.outputs])
    by_block = sorted((present for _, present in pairs), key=_depth)
    states = any((kv := parse_kv_name(past)) and kv.is_state for past, _ in pairs)
    if tokens is None:
        vocab_size = int(model.config.get_text_config().vocab_size)
        tokens = np.random.default_rng(0).integers(0, vocab_size, (2, LONG + 1), dtype=np.int64)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    steps, outputs, cache = tuple(_steps(tokens, window, states)), {}, None
    half = dtype == "bfloat16"
    with widened(model) if half else contextlib.nullcontext():
        for call in steps:
            logits, cache = _torch_step(model, call.ids, None if call.begins else cache, call.mask)
            if call.feed:
                outputs[call.feed] = dict(zip(by_block, _flat(cache), strict=True)) | {"logits": logits}
    return Reference(type(model).__name__, dtype, "float32" if half else dtype, window, steps, outputs)


def _steps(tokens: NDArray[np.int64], window: int, states: bool) -> Iterator[_Step]:
    lengths = [(SHORT, PADDING), (LONG, 0)]
    if LONG <= window <= FARTHEST or states:
        lengths.append((max(window, MANY) + LONG if states else window + LONG, 0))
    for length, padding in lengths:
        part = length if states else PART
        mask = np.ones((2, length + 1), np.int64)
        mask[1, :padding] = 0
        sequences = np.tile(tokens, -(-(length + 1) // tokens.shape[1]))
        parts = [(start, min(start + part, length), "") for start in range(0, length, part)]
        parts[-1] = (*parts[-1][:2], f"prefill {length}")
        for start, stop, feed in (*parts, (length, length + 1, f"decode {length}+1")):
            yield _Step(sequences[:, start:stop], mask[:, :stop], start == 0, feed)


def _window(model: Any) -> int:
    """Tokens that the model's local attention reaches back; 0 when every block sees everything."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    if kinds <= {"full_attention"}:
        return 0
    return int(getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None) or 0)


def _torch_step(model: Any, ids: NDArray[np.int64], cache: Any, mask: NDArray[np.int64]) -> tuple[NDArray[Any], Any]:
    device = next(model.parameters()).device
    inputs, attended = (torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in (ids, mask))
    logits, cache = step(model, inputs, cache, attended)
    return logits.float().cpu().numpy(), cache


def _flat(cache: Any) -> list[NDArray[Any]]:
    kept = [own[name] for own in cache_tensors(cache) for name in sorted(own)]
    return [np.array(tensor.float().cpu()) for tensor in kept]


def _without_padding(
    expected: Mapping[str, NDArray[Any]], actual: Mapping[str, NDArray[Any]], mask: NDArray[np.int64]
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Both sides as ``(attended tokens, features)``; a sliding-window cache keeps only its last tokens, so do both."""
    left, right = {}, {}
    for name, array in expected.items():
        other = np.asarray(actual[name], np.float32)
        if (kv := parse_kv_name(name, output=True)) and kv.is_state:
            left[name], right[name] = array.reshape(len(array), -1), other.reshape(len(other), -1)
            continue
        if array.ndim == 4:  # [B, heads, length, head_dim] -> [B, length, heads, head_dim]
            array, other = array.swapaxes(1, 2), other.swapaxes(1, 2)
        kept = mask[:, -array.shape[1] :].astype(bool)
        left[name] = array[kept].reshape(kept.sum(), -1)
        right[name] = other[:, -array.shape[1] :][kept].reshape(kept.sum(), -1)
    return left, right


def _measure(feed: str, name: str, expected: NDArray[Any], actual: NDArray[Any], tolerance: Tolerance) -> OutputParity:
    with np.errstate(invalid="ignore"):
        error = float(np.abs(expected.astype(np.float64) - actual).max())
    relative = error / max(float(expected.std(dtype=np.float64)), 1e-12)
    kl = top1 = None
    passed = relative <= tolerance.relative  # False for NaN as well
    if name == "logits":
        log_p, log_q = _log_softmax(expected), _log_softmax(actual)
        kl = float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean())
        top1 = float((expected.argmax(-1) == actual.argmax(-1)).mean())
        passed = passed and kl <= tolerance.kl
    if not passed and not math.isfinite(relative):
        raise ParityError(f"Output {name} at {feed} is not finite.", "Use a wider dtype: float32 or bfloat16.")
    return OutputParity(feed, name, error, relative, kl, top1, passed)


def _log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def _depth(name: str) -> tuple[int, str]:
    kv = parse_kv_name(name, output=True)
    return (kv.block, name) if kv else (1 << 30, name)
