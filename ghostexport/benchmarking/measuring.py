"""The measuring loop: all variants in one process, visited in random order, round after round; and layer times."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ghostexport.benchmarking.energy import EnergyMeter
from ghostexport.benchmarking.machine import (
    MachineWatch,
    device_bytes,
    peak_bytes,
    process_bytes,
    release_free_memory,
    reset_peak,
)
from ghostexport.benchmarking.workloads import METRICS, Clock, TokenIds, Workload, visit
from ghostexport.errors import ParityError
from ghostexport.execution import Execution, Progress
from ghostexport.files import write_json
from ghostexport.runtimes.base import KVCache, Session

Loaders = Mapping[str, Callable[[], Session]]
Order = Sequence[tuple[str, Workload]]


@dataclass
class Cell:
    """Everything measured of one variant on one workload.

    Attributes:
        rounds: metric -> one tuple of raw samples (seconds) per round.
        enqueue: host seconds of every timed forward pass; empty where the session does not tell.
        joules: energy of all measured visits; None without a meter.
        tokens: tokens processed in all measured visits.
        cache_bytes: KV cache at the end of a visit.
    """

    variant: str
    workload: Workload
    rounds: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)
    enqueue: list[float] = field(default_factory=list)
    joules: float | None = None
    tokens: int = 0
    cache_bytes: int = 0


@dataclass
class Footprint:
    """What a variant costs before it is timed. None = cannot be read here.

    Attributes:
        load_seconds: from engine file to session.
        loaded_bytes: growth of the process (device memory on a GPU) by loading.
        peak_bytes: workload -> peak growth over the empty process while it ran.
        vocabulary: size of the logits.
        clock: what the session measures with.
        profile: its layers and their times.
    """

    load_seconds: float
    loaded_bytes: int | None
    peak_bytes: dict[str, int | None]
    vocabulary: int
    clock: str
    profile: LayerProfile | None = None


class SessionPool:
    """Hands out loaded sessions; keeps all of them, or only the last one where memory does not hold all."""

    def __init__(self, loaders: Loaders, keep_all: bool) -> None:
        self.loaders, self.keep_all = loaders, keep_all
        self._open: dict[str, Session] = {}

    def __getitem__(self, variant: str) -> Session:
        if variant not in self._open:
            if not self.keep_all:
                self.close()
            self._open[variant] = self.loaders[variant]()
        return self._open[variant]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


def footprint(
    variant: str, load: Callable[[], Session], workloads: Sequence[Workload], seed: int, clock: Clock
) -> Footprint:
    """Loads one variant alone in the process and runs every workload once, watching memory.

    Raises:
        ParityError: the logits are not finite; timing such an engine would be meaningless.
    """
    release_free_memory()
    floor = _memory_now()
    start = time.perf_counter_ns()
    session = load()
    load_seconds = (time.perf_counter_ns() - start) * 1e-9
    try:
        loaded = _memory_now()
        logits, _ = session.forward(np.zeros((1, 2), np.int64), session.new_cache(1))  # (1, 2, V)
        if not np.isfinite(logits).all():
            raise ParityError(
                f"The engine of {variant} computes logits that are not finite; it is not timed.",
                "If ghostexport verify RUN passes, the engine is at fault: build it again, or in another dtype.",
            )
        vocabulary = int(logits.shape[-1])
        peaks: dict[str, int | None] = {}
        for workload in workloads:
            fresh = reset_peak()
            visit(session, workload, workload.token_ids(vocabulary, seed), clock)
            on_device = device_bytes()
            peak = on_device if on_device is not None else peak_bytes() if fresh else None
            peaks[workload.name] = None if peak is None or floor is None else peak - floor
        growth = None if loaded is None or floor is None else loaded - floor
        profile = profile_layers(session, workloads)
        return Footprint(load_seconds, growth, peaks, vocabulary, session.clock, profile)
    finally:
        session.close()
        del session
        release_free_memory()


def _memory_now() -> int | None:
    on_device = device_bytes()
    return process_bytes() if on_device is None else on_device


def measure(
    pool: SessionPool,
    workloads: Sequence[Workload],
    token_ids: Mapping[str, TokenIds],
    *,
    rounds: int,
    warmup: int,
    seed: int,
    clock: Clock,
    watch: MachineWatch,
    meter: EnergyMeter | None = None,
    progress: Progress = Execution.progress,
    observe: Callable[[Sequence[Cell]], None] = lambda cells: None,
) -> list[Cell]:
    """Visits every (variant, workload) once per round, in an order drawn anew for every round.

    Args:
        token_ids: workload name -> ``(batch, tokens)``, the same for all variants.
        rounds, warmup: rounds kept; rounds run first and thrown away.
        seed: of the orders.
        clock: host clock in ns for requests.
        watch: takes a snapshot before every kept round.
        meter: energy is read around every visit.
        observe: called after every kept round with the cells so far.

    Returns:
        One cell per (variant, workload), in the order of the loaders and workloads.
    """
    cells = {(v, w.name): Cell(v, w, {m: [] for m in METRICS[w.kind]}) for v in pool.loaders for w in workloads}
    generator = np.random.default_rng(seed)
    with meter or contextlib.nullcontext(), _no_collection():
        for number in range(-warmup, rounds):
            if number >= 0:
                watch.snapshot()
            for variant, workload in _order(tuple(pool.loaders), workloads, pool.keep_all, generator):
                session, ids = pool[variant], token_ids[workload.name]
                if not pool.keep_all:
                    visit(session, workload, ids, clock)  # this session is new: its first visit is a warm-up
                before = meter.joules() if meter else None
                result = visit(session, workload, ids, clock)
                if number >= 0:
                    used = meter.joules() - before if meter and before is not None else None
                    _keep(cells[variant, workload.name], result.samples, result.enqueue, used, result.cache_bytes)
            progress("bench", number + warmup + 1, rounds + warmup)
            if number >= 0:
                observe(tuple(cells.values()))
    return list(cells.values())


def _order(
    variants: Sequence[str], workloads: Sequence[Workload], mixed: bool, generator: np.random.Generator
) -> Order:
    """A random order; variants stay together where each must be loaded anew."""
    if mixed:
        pairs = [(v, w) for v in variants for w in workloads]
        return [pairs[i] for i in generator.permutation(len(pairs))]
    order = [variants[i] for i in generator.permutation(len(variants))]
    return [(v, workloads[i]) for v in order for i in generator.permutation(len(workloads))]


def _keep(
    cell: Cell,
    samples: Mapping[str, tuple[float, ...]],
    enqueue: tuple[float, ...],
    joules: float | None,
    cache_bytes: int,
) -> None:
    for metric, values in samples.items():
        cell.rounds[metric].append(values)
    cell.enqueue += enqueue
    cell.tokens += cell.workload.tokens_per_visit
    cell.cache_bytes = cache_bytes
    if joules is not None:
        cell.joules = (cell.joules or 0.0) + joules


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection inside a timing."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


#: Executions that are timed layer by layer.
EXECUTIONS = 10

LayerTimes = Mapping[str, float]


@runtime_checkable
class Profiled(Protocol):
    """A session whose library times layers: TensorRT's."""

    def profile(
        self, input_ids: NDArray[np.int64], cache: KVCache, repeats: int
    ) -> tuple[Mapping[str, Any], Sequence[LayerTimes]]:
        """The engine's layers, and per execution layer name -> milliseconds."""
        ...


@dataclass(frozen=True)
class LayerProfile:
    """The layers of one engine.

    Attributes:
        workload: name of the workload they were timed on.
        layers: what the library's inspector says, ``{"Layers": [...]}``.
        runs: per execution layer name -> milliseconds, all with the same layers.
    """

    workload: str
    layers: Mapping[str, Any]
    runs: Sequence[LayerTimes]


def profile_layers(session: Session, workloads: Sequence[Workload]) -> LayerProfile | None:
    """Times the layers of a decode step after the longest past, at the smallest batch (without one, of the first
    workload). None where the library has no profiler, or reports nothing.

    The session is slower afterwards: close it.
    """
    if not isinstance(session, Profiled):
        return None
    decodes = [w for w in workloads if w.kind == "decode"] or workloads[:1]
    chosen = min(decodes, key=lambda w: (w.batch, -w.past))
    token_ids = np.zeros((chosen.batch, chosen.tokens), np.int64)
    layers, runs = session.profile(token_ids, session.new_cache(chosen.batch, chosen.past), EXECUTIONS)
    return LayerProfile(chosen.name, layers, runs) if runs[0] else None


def trtexec_profile(runs: Sequence[LayerTimes]) -> list[dict[str, Any]]:
    """The list that ``trtexec --exportProfile`` writes.

    Args:
        runs: one mapping layer name -> milliseconds per execution, all with the same layers.

    Returns:
        ``{"count"}``, then per layer name, timeMs (sum), averageMs, medianMs, percentage (of the sum over layers).
    """
    names = list(runs[0])
    sums = {name: sum(run[name] for run in runs) for name in names}
    total = sum(sums.values())
    entries: list[dict[str, Any]] = [{"count": len(runs)}]
    for name in names:
        times = [run[name] for run in runs]
        share = 100 * sums[name] / total if total else 0.0
        entries.append(
            {
                "name": name,
                "timeMs": sums[name],
                "averageMs": sums[name] / len(runs),
                "medianMs": float(np.median(times)),
                "percentage": share,
            }
        )
    return entries


def write_layers(layers: Path, times: Path, profile: LayerProfile) -> None:
    """Writes what ``trtexec`` writes with ``--exportLayerInfo`` and with ``--exportProfile``."""
    write_json(layers, dict(profile.layers))
    write_json(times, trtexec_profile(profile.runs))
