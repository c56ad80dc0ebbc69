"""Everything that needs a GPU in one go: build, run, parity, generation, operator swap, timing; one JSON at the end.

    python tools/gpu_check.py [RUN] [--runtime NAME] [--output gpu_check.json] [--seconds 540]

RUN is a run folder with ``onnx/dense.onnx``, ``onnx/ghost.onnx`` and another operator; without one, a tiny random model
is exported and cut on the spot. Exit code 0: all checks passed, 1: one failed, 2: no runtime can build and run here.
"""

from __future__ import annotations

import argparse
import atexit
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from ghostexport.deploy import engine_folder
from ghostexport.execution import Execution
from ghostexport.files import write_json
from ghostexport.operators import OperatorSet, load_operators
from ghostexport.recipe import BuildSection
from ghostexport.runtimes import RUNTIMES, doctor
from ghostexport.runtimes.gpu import find_gpu
from ghostexport.runtimes.interface import read_interface
from ghostexport.runtimes.ort.onnxruntime import open_graph
from ghostexport.serving.generation import generate

#: Largest logit difference to ONNX Runtime on the CPU, relative to the largest logit: TF32 has 10 mantissa bits.
TOLERANCE = {"float32": 2e-2, "float16": 3e-2, "bfloat16": 1e-1}
REPEATS = 30


class Check:
    """The checks of one runtime; every step is timed and caught, so that one failure does not hide the rest."""

    def __init__(self, name: str, graphs: dict[str, Path], other: OperatorSet, folder: Path, deadline: float) -> None:
        self.runtime, self.graphs, self.other, self.folder = RUNTIMES[name], graphs, other, folder / name
        self.deadline = deadline
        self.steps: list[dict[str, Any]] = []
        self.engines: dict[str, Any] = {}
        refittable = name != "onnxruntime"
        self.settings = BuildSection(max_batch=2, max_tokens=128, max_past=511, refittable=refittable)

    def step(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Runs one step and keeps what it returns or raises."""
        if time.monotonic() > self.deadline:
            self.steps.append({"step": name, "ok": False, "error": "out of time"})
            return
        started = time.monotonic()
        try:
            result: dict[str, Any] = {"ok": True, **work()}
        except Exception as error:
            traceback.print_exc()
            result = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        result = {"step": name, **result, "seconds": round(time.monotonic() - started, 2)}
        print(
            f"{self.runtime.name:12} {name:24} {'ok' if result['ok'] else 'FAILED':6} {result['seconds']} s", flush=True
        )
        self.steps.append(result)

    def run(self) -> list[dict[str, Any]]:
        """All steps in order."""
        for variant in self.graphs:
            self.step(f"build {variant}", lambda variant=variant: self.build(variant))  # type: ignore[misc]
        for variant in self.engines:
            self.step(f"parity {variant}", lambda variant=variant: self.parity(variant, self.engines[variant]))  # type: ignore[misc]
        self.step("swap operator", self.swap)
        if self.runtime.name in engine_folder.MODULES:
            self.step("deployed run.py", self.deployed)
        self.step("timing", self.timing)
        return self.steps

    def build(self, variant: str) -> dict[str, Any]:
        engine = self.runtime.build(
            self.graphs[variant], self.folder / variant, variant, self.settings, Execution(say=print)
        )
        self.engines[variant] = engine
        return {"plan_bytes": engine.plan_bytes, "build_seconds": engine.build_seconds}

    def parity(self, variant: str, engine: Any) -> dict[str, Any]:
        """Prefill, decode with past and ten greedy tokens against ONNX Runtime on the CPU, batch 2."""
        cpu = RUNTIMES["onnxruntime"]
        on_cpu = Execution(device="cpu")
        reference_engine = cpu.build(
            self.graphs[variant], self.folder / "reference" / variant, variant, BuildSection(), on_cpu
        )
        reference, session = cpu.load(reference_engine, on_cpu), self.runtime.load(engine, Execution(say=print))
        ids = np.random.default_rng(0).integers(3, 120, (2, 24))
        worst = 0.0
        caches = [s.new_cache(2) for s in (reference, session)]
        for part in (ids[:, :16], ids[:, 16:23], ids[:, 23:]):
            expected, caches[0] = reference.forward(part, caches[0])
            actual, caches[1] = session.forward(part, caches[1])
            worst = max(worst, float(np.abs(actual - expected).max() / np.abs(expected).max()))
        same = float((generate(session, ids, 10) == generate(reference, ids, 10)).mean())
        session.close()
        dtype = engine.inputs[-1].dtype
        if worst > TOLERANCE[dtype]:
            raise AssertionError(f"relative error {worst:.2e} is above {TOLERANCE[dtype]:.0e}; same tokens {same:.2f}")
        return {"relative_error": worst, "same_tokens": same}

    def swap(self) -> dict[str, Any]:
        """The ghost engine with other operators equals the engine built with them, without a build."""
        started = time.monotonic()
        swapped = self.runtime.swap(self.engines["ghost"], self.other, self.folder / "swapped", Execution(say=print))
        seconds = time.monotonic() - started
        return {"swap_seconds": round(seconds, 3), **self.parity(self.other.name, swapped)}

    def deployed(self) -> dict[str, Any]:
        """The file that deploy puts beside an engine against ONNX Runtime: logits behind a prompt, greedy tokens."""
        graph, engine, folder = self.graphs["ghost"], self.engines["ghost"], self.folder / "deployed"
        folder.mkdir()
        engine_folder.write_engine(engine, read_interface(graph).kv, (), self.settings.max_past + 1, folder)
        prompt = np.random.default_rng(1).integers(3, 120, (1, 150))  # two calls of the prefill profile
        [(logits, tokens)] = engine_folder.run(folder, [prompt[0].tolist()], 32)
        session = open_graph(graph)
        expected = session.forward(prompt, session.new_cache(1))[0][0, -1]
        worst = float(np.abs(logits - expected).max() / np.abs(expected).max())
        if worst > TOLERANCE[engine.inputs[-1].dtype]:
            raise AssertionError(f"relative error {worst:.2e}")
        same = float((np.array(tokens) == generate(session, prompt, 32)[0]).mean())
        return {"relative_error": worst, "same_tokens": same}

    def timing(self) -> dict[str, Any]:
        """Median seconds of prefill (128 tokens) and decode (256 past) of every variant, interleaved."""
        sessions = {variant: self.runtime.load(engine, Execution()) for variant, engine in self.engines.items()}
        samples: dict[str, dict[str, list[float]]] = {v: {"prefill": [], "decode": []} for v in sessions}
        for repeat in range(REPEATS + 3):
            for variant, session in sessions.items():
                prefill, _ = session.timed_forward(np.full((1, 128), 5), session.new_cache(1))
                decode, _ = session.timed_forward(np.full((1, 1), 5), session.new_cache(1, 256))
                if repeat >= 3:  # the first rounds warm up
                    samples[variant]["prefill"].append(prefill)
                    samples[variant]["decode"].append(decode)
        clock = next(iter(sessions.values())).clock
        medians = {v: {kind: statistics.median(x) for kind, x in both.items()} for v, both in samples.items()}
        return {"clock": clock, "median_seconds": medians, "samples": samples}


def graphs_of(run: Path | None) -> tuple[dict[str, Path], OperatorSet]:
    """Variants to check, and operators to swap into the ghost engine."""
    if run is None:
        from tests.exports import make_folder, remove_folder
        from tests.runtime_graphs import dense_graph, operators, variant_graph

        if (exports := make_folder()) is not None:
            atexit.register(remove_folder, exports)
        names = ("pruned", "ghost", "linearpatch-diag")
        return {"dense": dense_graph(), **{n: variant_graph(n) for n in names}}, operators("linearpatch-diag")
    found = [load_operators(path) for path in sorted((run / "operators").glob("*.safetensors"))]
    fits = [o for o in found if o.name != "ghost" and o.adds_nodes and not any(p.folds for p in o.operators)]
    if not fits:
        raise SystemExit(f"{run} has no second operator to swap in: add --operator linearpatch-rotate to its recipe.")
    other = fits[0]
    return {name: run / "onnx" / f"{name}.onnx" for name in ("dense", "pruned", "ghost", other.name)}, other


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--runtime", choices=list(RUNTIMES))
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--seconds", type=float, default=540, help="no step begins later than this")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    rows = doctor()
    for row in rows:
        print(*row, sep=" | ")
    gpu = find_gpu()
    names = [n for n, build, run, *_ in rows if build and run and (n != "onnxruntime" or not isinstance(gpu, str))]
    names = [arguments.runtime] if arguments.runtime else names
    if not names:
        print(f"Nothing to check: {gpu}" if isinstance(gpu, str) else "No runtime can build and run here.")
        return 2
    graphs, other = graphs_of(arguments.run)
    with tempfile.TemporaryDirectory() as folder:
        results = {name: Check(name, graphs, other, Path(folder), deadline).run() for name in names}
    passed = all(step["ok"] for steps in results.values() for step in steps)
    device = gpu if isinstance(gpu, str) else vars(gpu)
    facts = {"passed": passed, "gpu": device, "machine": platform.platform(), "python": platform.python_version()}
    write_json(arguments.output, facts | {"doctor": rows, "results": results})
    print("passed" if passed else "FAILED", arguments.output)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
