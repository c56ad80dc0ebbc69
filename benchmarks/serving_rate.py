"""Tokens per second of ``generate`` as a user asks for it against the bench's decode step, token by token in turns.

    python benchmarks/serving_rate.py RUN [--variant ghost] [--past 256] [--tokens 32] [--rounds 20]

RUN has an ONNX Runtime engine. `generate` chooses, decodes and hands out every token; its cache grows from ``past``.
The bench's step, on the same session, is repeated after a cache of the mean length. Writes
``results/serving_rate.json``: the ratio of the rates with its 95 % interval, the part of a token's time that ONNX
Runtime has (which other load on the machine hardly moves; the rest is what `generate` costs), and that load.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from ghostexport.benchmarking.statistics import paired_ratio, round_medians
from ghostexport.execution import Execution
from ghostexport.files import write_json
from ghostexport.runfolder import RunFolder
from ghostexport.runtimes import load_engine
from ghostexport.runtimes.base import Session
from ghostexport.serving.codec import Codec
from ghostexport.serving.speaker import Request, Speaker, limits_of

RESULTS = Path(__file__).parent / "results"
TEXT = "In the village by the sea there was a lighthouse, and in it lived a keeper who wrote down every ship. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--variant", default="ghost")
    parser.add_argument("--past", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    folder, variant = RunFolder(arguments.run), arguments.variant
    engine, session = load_engine(folder.sidecar_path("onnxruntime", variant), Execution(device="cpu"))
    codec = Codec(folder.model_path)
    speaker = Speaker(variant, "onnxruntime", session, codec, limits_of(engine, codec.positions))
    prompt = (codec.encode(TEXT) * arguments.past)[: arguments.past]
    inside = count_seconds(session)
    rounds = [one_round(speaker, session, prompt, arguments.tokens, inside) for _ in range(arguments.rounds + 1)][1:]
    stepped, generated, parts = map(list, zip(*rounds, strict=True))
    rate = paired_ratio(stepped, generated)  # seconds of a step over seconds of a token: the ratio of rates
    report = {
        "variant": variant,
        "past": arguments.past,
        "tokens": arguments.tokens,
        "generate_over_step": rate.to_json(),
        "part_in_runtime": float(np.median(parts)),
        "step_seconds": round_medians(stepped).round(6).tolist(),
        "generate_seconds_per_token": round_medians(generated).round(6).tolist(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "versions": {"onnxruntime": onnxruntime.__version__, "python": platform.python_version()},
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
    }
    write_json(RESULTS / "serving_rate.json", report)
    print(report["generate_over_step"], report["part_in_runtime"], "load", report["load"])


def count_seconds(session: Any) -> list[float]:
    """Seconds of every later call of ONNX Runtime."""
    own, seconds = session._session, []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(own, name)

        def run_with_iobinding(self, binding: Any) -> None:
            begun = time.perf_counter()
            own.run_with_iobinding(binding)
            seconds.append(time.perf_counter() - begun)

    session._session = Counted()
    return seconds


def one_round(
    speaker: Speaker, session: Session, prompt: list[int], count: int, inside: list[float]
) -> tuple[list[float], list[float], float]:
    """Seconds of bench steps, of tokens between them, and the part of the latter that is the runtime's."""
    token, cache = np.array([prompt[-1:]], np.int64), session.new_cache(1, len(prompt) + count // 2)
    answer = speaker.answer(prompt, Request(count + 1))
    pieces = iter(answer)
    next(pieces)  # with the prompt
    steps, tokens, runtime = [], [], 0.0
    while len(answer.ids) <= count:
        before, calls, begun = len(answer.ids), len(inside), time.perf_counter()
        if next(pieces, None) is None or len(answer.ids) == before:
            break
        elapsed = time.perf_counter() - begun
        tokens.append(elapsed / (len(answer.ids) - before))
        runtime += sum(inside[calls:]) / elapsed
        steps.append(session.timed_forward(token, cache)[0])
    if len(tokens) < count // 2:
        raise SystemExit(f"the answer ended after {len(tokens)} pieces: too few to compare")
    return steps, tokens, runtime / len(tokens)


if __name__ == "__main__":
    main()
