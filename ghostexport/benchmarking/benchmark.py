"""`bench`: from loadable engines to a :class:`BenchReport`."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from ghostexport.benchmarking.energy import EnergyMeter, find_meter
from ghostexport.benchmarking.ideal import Ceilings, VariantFacts, ideal_speedup, measure_ceilings
from ghostexport.benchmarking.machine import MachineWatch, card, device_memory
from ghostexport.benchmarking.measuring import Cell, Footprint, Loaders, SessionPool, footprint, measure
from ghostexport.benchmarking.result import BenchReport, compare_cells
from ghostexport.benchmarking.workloads import METRICS, Clock, Workload, grid, why_not
from ghostexport.errors import RecipeError
from ghostexport.execution import Execution
from ghostexport.recipe import BenchSection
from ghostexport.runtimes.base import EngineFile

#: Share of the free memory that all sessions together may take; beyond it one at a time is loaded.
MEMORY_SHARE = 0.7
_PACKAGES = (
    "ghostexport",
    "onnxruntime",
    "onnxruntime-gpu",
    "tensorrt",
    "tensorrt-rtx",
    "torch",
    "transformers",
    "numpy",
)


def bench(
    sessions: Loaders,
    engines: Mapping[str, EngineFile],
    facts: Mapping[str, VariantFacts],
    section: BenchSection,
    execution: Execution,
    *,
    parity: Mapping[str, bool] | None = None,
    recipe_sha256: str | None = None,
    ceilings: Ceilings | None = None,
    clock: Clock = time.perf_counter_ns,
    observe: Callable[[Sequence[Cell]], None] = lambda cells: None,
) -> BenchReport:
    """Measures all variants of one runtime, interleaved, in this process.

    Args:
        sessions: variant -> function that loads its engine; ``dense`` first by convention.
        engines: variant -> sidecar.
        facts: variant -> what is known before it runs.
        section: workloads, rounds, seed.
        execution: ``say`` gets the card and the ideal speed-ups before the measurement, ``progress`` the rounds.
        parity: variant -> whether it agreed with PyTorch; without it every verdict is withheld.
        recipe_sha256: for the card.
        ceilings: measured here when None.
        clock: host clock in nanoseconds for requests.
        observe: called after every round with the cells so far, for a live table.

    Raises:
        RecipeError: no workload fits the engines.
        ParityError: an engine's logits are not finite.
    """
    workloads, skipped = _choose(grid(section), engines)
    prints = _footprints(sessions, workloads, section, clock, execution)
    session_clock = next(iter(prints.values())).clock
    device = "cuda" if session_clock == "cuda-events" else "cpu"
    ceilings = ceilings or measure_ceilings(device, next(iter(facts.values())).dtype)
    about = _announced(device, workloads, facts, ceilings, execution)
    watch, meter = MachineWatch(device), find_meter(device)
    cells, kept = _measured(sessions, workloads, prints, section, execution, clock, watch, meter, observe)
    return BenchReport(
        runtime=next(iter(engines.values())).runtime,
        clock=session_clock,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        card=about,
        settings=section.model_dump(mode="json") | {"sessions_kept_loaded": kept},
        workloads=workloads,
        skipped=skipped,
        facts={v: facts[v] for v in sessions},
        engines=engines,
        footprints=prints,
        parity=dict(parity or {}),
        ceilings=ceilings,
        cells=cells,
        comparisons=compare_cells(cells, engines, facts, parity or {}, ceilings, section.seed),
        conditions=watch.summary(),
        flags=tuple(watch.flags()),
        energy_source=meter.source if meter else None,
        recipe_sha256=recipe_sha256,
        seed=section.seed,
    )


def _announced(
    device: str,
    workloads: Sequence[Workload],
    facts: Mapping[str, VariantFacts],
    ceilings: Ceilings | None,
    execution: Execution,
) -> dict[str, Any]:
    """The card, said together with the ideal speed-ups before anything is measured."""
    about = card(device) | {"versions": _versions()}
    for line in (*_card_lines(about, ceilings), *ideal_lines(workloads, facts, ceilings)):
        execution.say(line)
    return about


def _footprints(
    sessions: Loaders, workloads: Sequence[Workload], section: BenchSection, clock: Clock, execution: Execution
) -> dict[str, Footprint]:
    prints = {}
    for number, (variant, load) in enumerate(sessions.items()):
        execution.progress("bench: load", number, len(sessions))
        prints[variant] = footprint(variant, load, workloads, section.seed, clock)
    execution.progress("bench: load", len(sessions), len(sessions))
    return prints


def _measured(
    sessions: Loaders,
    workloads: Sequence[Workload],
    prints: Mapping[str, Footprint],
    section: BenchSection,
    execution: Execution,
    clock: Clock,
    watch: MachineWatch,
    meter: EnergyMeter | None,
    observe: Callable[[Sequence[Cell]], None],
) -> tuple[list[Cell], bool]:
    """All cells, and whether all sessions were kept loaded."""
    needed = sum(p.loaded_bytes or 0 for p in prints.values())
    pool = SessionPool(sessions, keep_all=needed < MEMORY_SHARE * _free_memory())
    vocabulary = min(p.vocabulary for p in prints.values())
    try:
        cells = measure(
            pool,
            workloads,
            {w.name: w.token_ids(vocabulary, section.seed) for w in workloads},
            rounds=section.repeats,
            warmup=section.warmup,
            seed=section.seed,
            clock=clock,
            watch=watch,
            meter=meter,
            progress=execution.progress,
            observe=observe,
        )
    finally:
        pool.close()
    return cells, pool.keep_all


def _choose(
    workloads: Sequence[Workload], engines: Mapping[str, EngineFile]
) -> tuple[tuple[Workload, ...], dict[str, str]]:
    reasons = {w.name: next(filter(None, (why_not(w, e) for e in engines.values())), None) for w in workloads}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    chosen = tuple(w for w in workloads if w.name not in skipped)
    if not chosen:
        raise RecipeError(
            "No workload of the bench section fits the engines: " + "; ".join(skipped.values()) + ".",
            "Choose smaller batches or lengths, or build with larger build.max_batch, max_tokens and max_past.",
        )
    return chosen, skipped


def ideal_lines(
    workloads: Sequence[Workload], facts: Mapping[str, VariantFacts], ceilings: Ceilings | None
) -> list[str]:
    """The ideal speed-ups over dense as lines of text, to be shown before anything is measured."""
    lines = []
    for workload in workloads if "dense" in facts else ():
        for metric in METRICS[workload.kind]:
            ideals = {v: ideal_speedup(workload, metric, f, facts["dense"], ceilings) for v, f in facts.items()}
            shown = ", ".join(f"{v} {x:.3f}" for v, x in ideals.items() if v != "dense" and x is not None)
            if shown:
                lines.append(f"ideal speed-up, {workload.name} {metric}: {shown}")
    return lines


def _card_lines(about: Mapping[str, Any], ceilings: Ceilings | None) -> list[str]:
    device = f"device: {about.get('gpu', {}).get('name') or about['cpu']}, {about['threads']} CPU threads"
    if ceilings is None:
        return [device, "ceilings: not measured (they need PyTorch on this device)"]
    gb, gflops = ceilings.bytes_per_second / 1e9, ceilings.flops_per_second / 1e9
    return [
        device,
        f"ceilings: {gb:.1f} GB/s, {gflops:.0f} GFLOP/s {ceilings.dtype} ({ceilings.method})",
    ]


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _free_memory() -> int:
    found = device_memory()
    return int(psutil.virtual_memory().available) if found is None else found[0]
