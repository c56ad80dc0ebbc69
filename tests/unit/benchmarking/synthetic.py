"""A session of known cost on a clock of its own: what the benchmark must find is known before it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ghostexport.benchmarking import Ceilings, VariantFacts
from ghostexport.runtimes.base import EngineFile

VOCABULARY = 32
CEILINGS = Ceilings(1e9, 1e9, "float32", "assumed")


class FakeClock:
    """Nanoseconds that pass only when a session works."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@dataclass
class Cache:
    length: int
    batch: int

    @property
    def nbytes(self) -> int:
        return 10 * self.batch * self.length


class SyntheticSession:
    """Costs ``seconds(tokens, past)`` per forward, times ``1 + noise * N(0, 1)``, times ``drift(clock)``."""

    clock = "perf_counter_ns"

    def __init__(
        self,
        clock: FakeClock,
        seconds: Callable[[int, int], float],
        noise: float = 0.0,
        seed: int = 0,
        drift: Callable[[int], float] = lambda call: 1.0,
    ) -> None:
        self._clock, self._seconds, self._noise, self._drift = clock, seconds, noise, drift
        self._generator = np.random.default_rng(seed)
        self._calls = 0

    def new_cache(self, batch: int, length: int = 0) -> Cache:
        return Cache(length, batch)

    def forward(self, input_ids, cache):
        _, longer = self.timed_forward(input_ids, cache)
        return np.zeros((*input_ids.shape, VOCABULARY), np.float32), longer

    def timed_forward(self, input_ids, cache):
        assert input_ids.dtype == np.int64 and input_ids.shape[0] == cache.batch
        assert input_ids.min() >= 0 and input_ids.max() < VOCABULARY
        seconds = self._seconds(input_ids.shape[1], cache.length) * (
            1 + self._noise * self._generator.standard_normal()
        )
        seconds *= self._drift(self._calls)
        self._calls += 1
        self._clock.now += round(seconds * 1e9)
        return seconds, Cache(cache.length + input_ids.shape[1], cache.batch)

    def close(self) -> None:
        pass


def engine(variant: str, **overrides) -> EngineFile:
    fields = {
        "path": Path(f"{variant}.onnx"),
        "runtime": "onnxruntime",
        "version": "1.0",
        "variant": variant,
        "device": {"name": "cpu"},
        "profiles": {},
        "flags": {"threads": 2},
        "build_seconds": 1.0,
        "plan_bytes": 1000,
        "weight_bytes": 900,
        "graph_sha256": "0" * 64,
        "plan_sha256": "1" * 64,
    }
    return EngineFile(**(fields | overrides))


def facts(blocks: int = 10) -> VariantFacts:
    return VariantFacts(
        blocks=blocks,
        parameters=100 * blocks,
        weight_bytes=400 * blocks,
        kv_bytes_per_token=2 * blocks,
        flops_per_token=200 * blocks,
        attention_flops=4 * blocks,
    )


def write_run(folder: Path, removed: int = 7, seed: int = 0) -> Path:
    """A run folder of a 30-block model, measured with synthetic sessions that cost about what SmolLM2 costs."""
    from ghostexport.benchmarking import bench
    from ghostexport.execution import Execution
    from ghostexport.files import write_bytes, write_json
    from ghostexport.operators import Operator, OperatorSet
    from ghostexport.plan import PrunePlan
    from ghostexport.recipe import parse_recipe
    from ghostexport.runfolder import RunFolder

    run, generator = RunFolder(folder), np.random.default_rng(seed)
    recipe = parse_recipe({"model": {"source": "smollm2"}, "select": {"prune": removed}})
    write_bytes(run.recipe_path, recipe.to_yaml().encode())
    scores = (
        0.98 - 0.5 * np.exp(-np.arange(31 - removed) / 3) + 0.01 * generator.standard_normal(31 - removed)
    ).tolist()
    windows = [[start, start + removed, score] for start, score in enumerate(scores)]
    plan = PrunePlan.from_spans(30, [(19 - removed, 19)], "streamline", {"windows": windows})
    write_json(run.plan_path, plan.to_json())
    C = 96
    random = generator.standard_normal((C, C))
    ghost = 0.1 * random @ np.diag(np.exp(-np.arange(C) / 20)) @ generator.standard_normal((C, C)) / 8
    for name, delta in (("ghost", ghost), ("linearpatch-rotate", (ghost + ghost.T) / 2)):
        fit = {"nmse_train": 0.21, "nmse_held_out": 0.24, "condition": 3.1e7, "antisymmetric_share": 0.4}
        operator = Operator(plan.boundaries[0], name, delta=delta.astype(np.float32), fit=fit)
        write_bytes(run.operators_path(name), OperatorSet(name, (operator,), plan).to_bytes())
    kept = 30 - removed
    costs = {"dense": 30.0, "pruned": kept, "ghost": kept + 0.1, "linearpatch-rotate": kept + 0.1}
    clock = FakeClock()
    loaders = {
        v: lambda v=v, number=number: SyntheticSession(
            clock, lambda t, past: costs[v] * (1.4e-3 + 1e-6 * past + 1.0e-4 * (t - 1)), 0.02, number
        )
        for number, v in enumerate(costs)
    }
    known = {
        v: VariantFacts(
            round(c), round(c * 3.54e6 + 28.3e6), round(c * 14.2e6 + 113e6), round(c) * 1536, round(c * 7.1e6)
        )
        for v, c in costs.items()
    }
    engines = {
        v: engine(v, plan_bytes=known[v].weight_bytes + 900_000, weight_bytes=known[v].weight_bytes) for v in costs
    }
    ceilings = Ceilings(11e9, 1.3e11, "float32", "assumed")
    report = bench(loaders, engines, known, recipe.bench, Execution(), parity=dict.fromkeys(costs, True),
                   ceilings=ceilings, clock=clock, recipe_sha256=recipe.sha256)  # fmt: skip
    write_json(folder / "bench" / "onnxruntime.json", report.to_json())
    for v in costs:
        sidecar = {"weight_bytes": engines[v].weight_bytes, "plan_bytes": engines[v].plan_bytes}
        write_json(folder / "engines" / "onnxruntime" / f"{v}.json", sidecar)
    boundary = {"boundary": 0, "stream_in": "add_1469", "stream_out": "add_2149", "nodes_added": ["ghost.0.add"]}
    surgery = {"blocks_before": 30, "blocks_after": kept, "nodes_before": 2294, "boundaries": [boundary]}
    for v in ("ghost", "linearpatch-rotate"):
        write_json(folder / "onnx" / f"{v}.surgery.json", surgery)
    quality = {"dense": (17.2, 0.0, 1.0), "pruned": (96.0, 1.9, 0.41), "ghost": (31.5, 0.62, 0.63)}
    quality["linearpatch-rotate"] = (52.0, 1.2, 0.52)
    figures = {v: {"perplexity": p * (1 + 0.1 * (removed - 7)), "kl": k, "top1": t} for v, (p, k, t) in quality.items()}
    write_json(folder / "engine_quality.json", {"runtime": "onnxruntime", "tokens": 4096, "variants": figures})
    return folder


def write_evaluation(folder: Path) -> dict:
    """What eval writes of the run of :func:`write_run`: text, two tasks, a ladder and a sample."""
    from itertools import combinations

    from ghostexport.files import write_json

    losses = {"dense": 2.845, "pruned": 4.564, "ghost": 3.45, "linearpatch-rotate": 3.951}
    right = {"dense": 0.61, "pruned": 0.37, "ghost": 0.52, "linearpatch-rotate": 0.45}
    sample = "the river ran to the sea, and the stones of the garden lay where the old man had put them, one by one"

    def task(value):
        return {
            m: {"value": value - 0.02 * i, "stderr": 0.049, "items": 100} for i, m in enumerate(("acc", "acc_norm"))
        }

    def change(value, width):
        return {"difference": value, "interval": [value - width, value + width], "claimed": abs(value) > width}

    variants = {
        v: {
            "perplexity": float(np.exp(loss)), "kl": loss - 2.845, "top1": right[v], "tokens": 4080, "losses": [loss],
            "onnx": {"perplexity": float(np.exp(loss)), "kl": loss - 2.845, "top1": right[v], "tokens": 4080},
            "samples": [{"prompt": "Once upon a time", "text": sample}],
            "writing": {"distinct_1": 0.75, "distinct_2": 0.875, "repeated": 0.0625},
            "retained": {m: (right[v] + a) / (right["dense"] + a) for m, a in (("acc", 0.05), ("acc_norm", 0.03))},
            "tasks": {"demo:arc_easy": task(right[v]), "demo:piqa": task(right[v] + 0.1),
                      "average": {"acc": right[v] + 0.05, "acc_norm": right[v] + 0.03}},
        }
        for v, loss in losses.items()
    }  # fmt: skip
    differences = [
        {
            "variant": one, "minus": other, "loss": change(losses[one] - losses[other], 0.05),
            "kl": change(losses[one] - losses[other], 0.04), "top1": change(right[one] - right[other], 0.01),
            "tasks": {"average": {m: change(right[one] - right[other], 0.03) for m in ("acc", "acc_norm")}},
        }
        for other, one in combinations(losses, 2)
    ]  # fmt: skip

    def errors(nmse):
        return {"nmse": nmse, "relative_error": nmse**0.5, "sink_relative_error": nmse / 100}

    rungs = {"scalar": 0.61, "diagonal": 0.55, "symmetric": 0.31, "procrustes": 0.4, "full": 0.24}
    cut = {"span": [12, 19], "ladder": {k: errors(v) for k, v in rungs.items()}}
    cut["operators"] = {"ghost": errors(0.24), "linearpatch-rotate": errors(0.43)}
    evaluation = {"text": {"windows": 16, "length": 256, "spec": {"bos": 1}}, "variants": variants,
                  "differences": differences, "boundaries": [cut]}  # fmt: skip
    write_json(folder / "model_quality.json", evaluation)
    return evaluation
