"""What a deployed folder must answer: prompts, some reference logits and greedy tokens, of the verified graph.

A wrong permutation of a weight, a dropped operator or exchanged keys and values run without an error: only the answers
tell.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ghostexport.deploy.bundle import Bundle, damage
from ghostexport.errors import ParityError, RunFolderError
from ghostexport.files import write_json
from ghostexport.float32_twin import for_cpu
from ghostexport.runtimes.ort.onnxruntime import open_graph
from ghostexport.tolerances import TOLERANCES

FILE = "selftest.json"
SCHEMA = "ghostexport.selftest/1"
GREEDY = 64
#: Logits kept of each prompt's last position, spread over the vocabulary.
KEPT = 512
#: A prompt beyond a sliding window of up to so many tokens is among the five.
LONGEST = 1024
#: Between two tokens whose logits are nearer than this part of their deviation, rounding decides: either is right.
TIE = 1e-3
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a small village by the sea,",
    "Water boils at",
)

#: From prompts ``[T]`` and a count to, of each, the last position's logits ``[V]`` (None where the runtime has none to
#: give) and the greedy tokens.
Answer = tuple["NDArray[Any] | None", "list[int]"]
Runner = Callable[[Path, Sequence["list[int]"], int], "list[Answer]"]


@dataclass(frozen=True)
class Outcome:
    """How a runtime answered.

    Attributes:
        logits: largest error over the references' deviation; None where it gives no logits.
        tokens: greedy tokens that are the reference's, up to the first that is not, of ``total``.
        passed: both within what is allowed.
    """

    logits: float | None
    tokens: int
    total: int
    passed: bool

    def __str__(self) -> str:
        errors = "no logits to compare" if self.logits is None else f"logits differ by {self.logits:.1e}"
        return f"{'passed' if self.passed else 'FAILED'}: {errors}, {self.tokens} of {self.total} greedy tokens equal"


def prompts_of(bundle: Bundle, context: int | None = None) -> list[list[int]]:
    """Five prompts: texts, one of them through the chat template, one longer than a sliding window.

    Each leaves room for its answer among the model's positions, or in a runtime's narrower ``context``.
    """
    codec = bundle.codec
    texts = [codec.encode(text) for text in TEXTS]
    if codec.template is not None:
        texts[-1] = codec.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    pool = [token for ids in texts[:3] for token in ids[1:]] or [3]  # no end token: some runtimes take it for padding
    room = (context or codec.positions or LONGEST) - GREEDY
    length = max(1, min((bundle.window or 32) + 8, LONGEST, room))
    return [*[ids[:room] for ids in texts], (pool * (length // len(pool) + 1))[:length]]


def write_selftest(bundle: Bundle, output: Path, target: str, context: int | None = None) -> None:
    """Writes :data:`FILE`: what the graph, or the twin that verification runs for it, answers on the CPU."""
    with tempfile.TemporaryDirectory(dir=output) as folder:
        session = open_graph(for_cpu(bundle.graph, bundle.interface.dtype, Path(folder))[0])
        entries = [_entry(session, ids) for ids in prompts_of(bundle, context)]
        session.close()
    about = {"schema": SCHEMA, "target": target, "variant": bundle.variant, "dtype": bundle.interface.dtype}
    write_json(output / FILE, about | {"ends": sorted(bundle.codec.ends), "prompts": entries})


def _entry(session: Any, ids: list[int]) -> dict[str, Any]:
    prompt = np.array([ids], np.int64)
    logits = session.forward(prompt, session.new_cache(1))[0][0, -1].copy()  # the next call takes the memory
    kept = np.unique(np.linspace(0, len(logits) - 1, min(KEPT, len(logits))).astype(int))
    greedy, margins = [], []
    for token, row in _steps(session, prompt):
        greedy.append(token)
        best, second = np.sort(row)[-2:][::-1]
        margins.append(float((best - second) / row.std()))
    return {
        "ids": ids,
        "logit_ids": kept.tolist(),
        "logits": [round(float(x), 6) for x in logits[kept]],
        "deviation": float(logits.std()),
        "greedy": greedy,
        "margins": [round(m, 6) for m in margins],
    }


def _steps(session: Any, prompt: NDArray[np.int64]) -> Any:
    cache, step = session.new_cache(1), prompt
    for _ in range(GREEDY):
        logits, cache = session.forward(step, cache)
        token = int(logits[0, -1].argmax())
        yield token, logits[0, -1].copy()
        step = np.array([[token]], np.int64)


def read_selftest(folder: Path) -> dict[str, Any]:
    """The self-test of a deployed folder whose files are whole.

    Raises:
        RunFolderError: it is no deployed folder, or a file is missing or was changed.
    """
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        fault = damage(folder)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{folder} is no deployed folder: {error}", "Make one: ghostexport deploy") from error
    if fault is not None or found.get("schema") != SCHEMA:
        raise RunFolderError(f"{folder}: {fault or 'its self-test is of another schema'}.", "Deploy or copy it again.")
    return dict(found)


def check(folder: Path, runner: Runner, dtype: str | None = None) -> Outcome:
    """Runs a deployed folder's self-test.

    Args:
        folder: the deployed folder.
        runner: of the runtime.
        dtype: in which the runtime computes, where that is not the graph's.

    Raises:
        RunFolderError: a file is missing or was changed.
        ParityError: the answers are others than the verified graph's.
    """
    test = read_selftest(folder)
    prompts = test["prompts"]
    answers = runner(folder, [entry["ids"] for entry in prompts], GREEDY)
    allowed = TOLERANCES["float32" if (dtype or test["dtype"]) == "float32" else "float16"].relative
    errors, right, total = [], 0, 0
    for entry, (logits, tokens) in zip(prompts, answers, strict=True):
        if logits is not None:
            difference = np.abs(np.asarray(logits, np.float64)[entry["logit_ids"]] - entry["logits"])
            errors.append(float(difference.max()) / entry["deviation"])
        equal = _agreeing(entry, tokens, max(TIE, allowed), test["ends"])
        right, total = right + equal, total + len(entry["greedy"])
    worst = None if not errors else float(np.max(errors))  # the built-in max would lose a NaN
    outcome = Outcome(worst, right, total, right == total and (worst is None or worst <= allowed))
    if not outcome.passed:
        raise ParityError(f"{folder}: {outcome}.", "The runtime does not compute this model: do not use the folder.")
    return outcome


def _agreeing(entry: dict[str, Any], tokens: Sequence[int], tie: float, ends: Sequence[int]) -> int:
    """Greedy tokens that are the reference's; all from a tie on, where either is right, or an end."""
    for position, (own, reference, margin) in enumerate(zip(tokens, entry["greedy"], entry["margins"], strict=False)):
        if own != reference:
            return len(entry["greedy"]) if margin < tie else position
    left = entry["greedy"][max(len(tokens) - 1, 0) : len(tokens) + 1]
    ended = len(tokens) < len(entry["greedy"]) and any(token in ends for token in left)
    return len(entry["greedy"]) if ended else min(len(tokens), len(entry["greedy"]))
