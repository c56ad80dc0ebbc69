"""The result of a benchmark and its JSON, schema ``ghostexport.bench/1``.

Top level of ``bench/<runtime>.json`` (all times in seconds, all sizes in bytes; what is unknown is null or left out):

==================  ==================================================================================================
schema              ``ghostexport.bench/1``; the number grows when a reader of the old one would misread
runtime, clock      runtime's name; ``perf_counter_ns`` or ``cuda-events``
created             UTC, ISO 8601
card                device, CPU, memory, OS, versions, power mode (``benchmarking.machine``)
settings            the recipe's bench section; ``recipe_sha256`` of the whole recipe
ceilings            bytes_per_second, flops_per_second, dtype, method; null when not measured
workloads           name, kind, batch, tokens, past, steps
skipped             workload name -> reason
variants            name -> facts, engine (sidecar figures), load_seconds, loaded_bytes, peak_bytes per workload,
                    parity, profiled (workload of ``<runtime>/profile_<variant>.json`` and ``layers_``, or null)
measurements        per workload x variant x metric: raw ``rounds`` (a list of samples per round), ``summary``
                    (n, min, max, mean, median, p90, p95, p99, cv), tokens_per_second, mbu | mfu, enqueue_median,
                    joules_per_token, cache_bytes, flags
comparisons         per workload x metric x pair: speedup and difference_seconds as value/low/high (95 %), ideal,
                    of_ideal, verdict, withheld
energy_source       where joules come from; null when nothing here can be read
conditions          other_load, one snapshot of the machine per round
flags               sentences about the whole run
==================  ==================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from ghostexport.benchmarking.ideal import Ceilings, VariantFacts, ideal_speedup, utilisation
from ghostexport.benchmarking.measuring import Cell, Footprint
from ghostexport.benchmarking.statistics import (
    CV_LIMIT,
    ENQUEUE_LIMIT,
    Interval,
    paired_difference,
    paired_ratio,
    slowdown,
    summarize,
)
from ghostexport.benchmarking.workloads import Workload
from ghostexport.recipe import is_repaired
from ghostexport.runfolder import BENCH_SCHEMA
from ghostexport.runtimes.base import EngineFile


@dataclass(frozen=True)
class Comparison:
    """One variant against another on one metric of one workload.

    Attributes:
        speedup: time of ``against`` over time of ``variant``, paired by round.
        difference: time of ``variant`` minus time of ``against`` in seconds; against ``pruned`` it is the marginal
            cost of the operator.
        ideal: speed-up that bytes or FLOPs allow; None where it is not defined.
        verdict: ``faster``, ``slower``, ``same`` (the interval contains 1) or ``none``.
        withheld: why there is no verdict; empty when there is one.
    """

    workload: str
    metric: str
    variant: str
    against: str
    speedup: Interval
    difference: Interval
    ideal: float | None
    verdict: str
    withheld: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "metric": self.metric,
            "variant": self.variant,
            "against": self.against,
            "speedup": self.speedup.to_json(),
            "difference_seconds": self.difference.to_json(),
            "ideal": self.ideal,
            "of_ideal": None if self.ideal is None else self.speedup.value / self.ideal,
            "verdict": self.verdict,
            "withheld": list(self.withheld),
        }


def pairs(variants: Sequence[str]) -> Iterator[tuple[str, str]]:
    """``(variant, against)``: all against dense, repaired ones against pruned, these and ``dense.int4`` pairwise."""
    others = [v for v in variants if v not in ("dense", "pruned")]
    yield from ((v, "dense") for v in variants if v != "dense" and "dense" in variants)
    yield from ((v, "pruned") for v in others if is_repaired(v) and "pruned" in variants)
    yield from ((b, a) for a, b in combinations(others, 2))


def why_incomparable(
    a: str,
    b: str,
    engines: Mapping[str, EngineFile],
    facts: Mapping[str, VariantFacts],
    parity: Mapping[str, bool],
) -> tuple[str, ...]:
    """Reasons why two variants must not be judged against each other; empty when they may be.

    Args:
        parity: variant -> whether it agreed with PyTorch; a variant that is missing was not checked.
    """
    one, two = engines[a], engines[b]
    reasons = [
        f"{what} differs: {x} ({a}), {y} ({b})"
        for what, x, y in (
            ("dtype", facts[a].dtype, facts[b].dtype),
            ("runtime", f"{one.runtime} {one.version}", f"{two.runtime} {two.version}"),
            ("device", dict(one.device), dict(two.device)),
        )
        if x != y
    ]
    changed = sorted(k for k in one.flags.keys() | two.flags.keys() if one.flags.get(k) != two.flags.get(k))
    reasons += [f"runtime settings differ: {key}" for key in changed]
    reasons += [f"parity of {v} {'failed' if v in parity else 'was not checked'}" for v in (a, b) if not parity.get(v)]
    return tuple(reasons)


def compare_cells(
    cells: Sequence[Cell],
    engines: Mapping[str, EngineFile],
    facts: Mapping[str, VariantFacts],
    parity: Mapping[str, bool],
    ceilings: Ceilings | None,
    seed: int,
) -> list[Comparison]:
    """All comparisons of a run, workload by workload."""
    table = {(c.variant, c.workload.name): c for c in cells}
    workloads = {c.workload.name: c.workload for c in cells}
    variants = list(dict.fromkeys(c.variant for c in cells))
    result = []
    for name, workload in workloads.items():
        for variant, against in pairs(variants):
            withheld = why_incomparable(variant, against, engines, facts, parity)
            for metric, rounds in table[variant, name].rounds.items():
                base = table[against, name].rounds[metric]
                speedup = paired_ratio(base, rounds, seed)
                ideal = ideal_speedup(workload, metric, facts[variant], facts[against], ceilings)
                result.append(
                    Comparison(
                        name,
                        metric,
                        variant,
                        against,
                        speedup,
                        paired_difference(rounds, base, seed),
                        ideal,
                        "none" if withheld else verdict(speedup),
                        withheld,
                    )
                )
    return result


def verdict(speedup: Interval) -> str:
    """``same`` when the interval contains 1, else the direction."""
    if 1.0 in speedup:
        return "same"
    return "faster" if speedup.value > 1 else "slower"


@dataclass(frozen=True)
class BenchReport:
    """Everything one benchmark measured; :meth:`to_json` is the file's content."""

    runtime: str
    clock: str
    created: str
    card: Mapping[str, Any]
    settings: Mapping[str, Any]
    workloads: tuple[Workload, ...]
    skipped: Mapping[str, str]
    facts: Mapping[str, VariantFacts]
    engines: Mapping[str, EngineFile]
    footprints: Mapping[str, Footprint]
    parity: Mapping[str, bool]
    ceilings: Ceilings | None
    cells: Sequence[Cell]
    comparisons: Sequence[Comparison]
    conditions: Mapping[str, Any]
    flags: tuple[str, ...]
    energy_source: str | None = None
    recipe_sha256: str | None = None
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": BENCH_SCHEMA,
            "runtime": self.runtime,
            "clock": self.clock,
            "created": self.created,
            "card": dict(self.card),
            "settings": dict(self.settings),
            "recipe_sha256": self.recipe_sha256,
            "ceilings": self.ceilings.to_json() if self.ceilings else None,
            "workloads": [w.to_json() for w in self.workloads],
            "skipped": dict(self.skipped),
            "variants": {name: self._variant(name) for name in self.facts},
            "measurements": [m for cell in self.cells for m in self._measurements(cell)],
            "comparisons": [c.to_json() for c in self.comparisons],
            "energy_source": self.energy_source,
            "conditions": dict(self.conditions),
            "flags": list(self.flags),
            **self.extra,
        }

    def _variant(self, name: str) -> dict[str, Any]:
        engine, foot = self.engines[name], self.footprints[name]
        return {
            "facts": self.facts[name].to_json(),
            "engine": {
                "path": engine.path.name,
                "version": engine.version,
                "device": dict(engine.device),
                "flags": dict(engine.flags),
                "build_seconds": engine.build_seconds,
                "build_peak_bytes": engine.extra.get("build_peak_bytes"),
                "plan_bytes": engine.plan_bytes,
                "weight_bytes": engine.weight_bytes,
                "graph_sha256": engine.graph_sha256,
                "plan_sha256": engine.plan_sha256,
            },
            "load_seconds": foot.load_seconds,
            "loaded_bytes": foot.loaded_bytes,
            "peak_bytes": dict(foot.peak_bytes),
            "parity": self.parity.get(name),
            "profiled": foot.profile.workload if foot.profile else None,
        }

    def _measurements(self, cell: Cell) -> list[dict[str, Any]]:
        workload, result = cell.workload, []
        for metric, rounds in cell.rounds.items():
            samples = [s for samples in rounds for s in samples]
            summary = summarize(samples)
            entry: dict[str, Any] = {
                "workload": workload.name,
                "variant": cell.variant,
                "metric": metric,
                "rounds": [[round(s, 9) for s in samples] for samples in rounds],
                "summary": summary,
                "tokens_per_second": tokens_per_second(workload, metric, summary["median"]),
                **utilisation(workload, summary["median"], self.facts[cell.variant], self.ceilings),
                "cache_bytes": cell.cache_bytes,
                "flags": measurement_flags(cell, metric, summary, self.seed),
            }
            if cell.enqueue:
                entry["enqueue_median"] = float(np.median(cell.enqueue))
            if cell.joules is not None:
                entry["joules_per_token"] = cell.joules / cell.tokens
            result.append(entry)
        return result


def tokens_per_second(workload: Workload, metric: str, median: float) -> float | None:
    """Prefill: prompt tokens per second. Decode: batch / step. Request: output tokens / request latency."""
    if workload.kind == "request":
        return workload.batch * workload.steps / median if metric == "latency" else None
    return workload.batch * workload.tokens / median


def measurement_flags(cell: Cell, metric: str, summary: Mapping[str, float], seed: int = 0) -> list[str]:
    """trtexec's warnings, and a session that slowed down."""
    found = []
    if summary["cv"] > CV_LIMIT:
        found.append(f"unsteady: coefficient of variation {summary['cv']:.1%} > {CV_LIMIT:.1%}")
    if cell.enqueue and metric == "seconds":
        share = float(np.median(cell.enqueue)) / summary["median"]
        if share > ENQUEUE_LIMIT:
            found.append(f"host-bound: enqueue takes {share:.0%} of the GPU time (limit {ENQUEUE_LIMIT:.0%})")
    excess = slowdown(cell.rounds[metric], seed)
    if excess is not None:
        found.append(f"slowed down: second half of the rounds {excess:.0%} slower than the first")
    return found
