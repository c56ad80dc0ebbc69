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
        assert 0 <= input_ids.min() and input_ids.max() < VOCABULARY
        seconds = self._seconds(input_ids.shape[1], cache.length) * (1 + self._noise * self._generator.standard_normal())
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
