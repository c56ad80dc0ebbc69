"""A sweep: several depths of one model, each a run folder of its own, as one curve of depth, quality and speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ghostexport.benchmarking import plots
from ghostexport.benchmarking.runfiles import RunFiles, read_run
from ghostexport.benchmarking.table import headline
from ghostexport.errors import RunFolderError

SCHEMA = "ghostexport.sweep/1"


@dataclass(frozen=True)
class Point:
    """One engine of a sweep. ``perplexity`` is None where the run did not measure quality."""

    removed: int
    variant: str
    perplexity: float | None
    speedup: float
    low: float
    high: float
    weight_bytes: int


@dataclass(frozen=True)
class Sweep:
    """All points of a sweep, shallow cuts first."""

    model: str
    runtime: str
    workload: str
    points: tuple[Point, ...]

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(p.variant for p in self.points))

    def table(self) -> list[tuple[int, list[str]]]:
        """Per depth, one cell per variant: perplexity / speed-up."""
        cells = {(p.removed, p.variant): p for p in self.points}
        return [
            (n, [_cell(cells.get((n, v))) for v in self.variants])
            for n in dict.fromkeys(p.removed for p in self.points)
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "model": self.model,
            "runtime": self.runtime,
            "workload": self.workload,
            "points": [vars(p) for p in self.points],
        }


def collect(folders: Sequence[Path], runtime: str | None = None) -> Sweep:
    """Gathers the runs of a sweep.

    Args:
        folders: run folders that differ in the cut only, each with a finished bench stage.
        runtime: which runtime's figures; None takes the first of the first run.

    Raises:
        RunFolderError: a run has no figures of this runtime, or is of another model or workload.
    """
    runs = sorted((read_run(folder) for folder in folders), key=lambda r: r.num_removed)
    if not runs:
        raise RunFolderError("A sweep needs at least one run folder.", "Give the folders that the depths were run in.")
    runtime = runtime or next(iter(runs[0].benches), "")
    points: list[Point] = []
    workloads: set[str] = set()
    for run in runs:
        if runtime not in run.benches:
            raise RunFolderError(
                f"{run.path} has no figures of {runtime or 'any runtime'}.", f"ghostexport bench {run.path}"
            )
        top = headline(run.benches[runtime])
        workloads |= {top[0]} if top else set()
        points += _points(run, runtime)
    if len({run.model for run in runs}) > 1 or len(workloads) > 1:
        raise RunFolderError(
            f"The runs differ in model or workload: {sorted({r.model for r in runs})}, {sorted(workloads)}.",
            "A sweep changes the cut only.",
        )
    return Sweep(runs[0].model, runtime, next(iter(workloads), ""), tuple(points))


def sweep_plots(sweep: Sweep) -> list[str]:
    """Perplexity over depth, speed-up over depth, and the quality/speed curve of each variant."""
    drawn = [v for v in sweep.variants if v != "dense"]
    of = {v: [p for p in sweep.points if p.variant == v] for v in drawn}
    quality = {v: [(p.removed, p.perplexity) for p in of[v] if p.perplexity is not None] for v in drawn}
    trade = {v: [(p.speedup, p.perplexity) for p in of[v] if p.perplexity is not None] for v in drawn}
    speed = {v: [(float(p.removed), p.speedup) for p in of[v]] for v in drawn}
    label = f"speed-up over dense, {sweep.workload}"
    result = [plots.curves("Speed over depth", "removed blocks", label, speed)]
    if all(quality.values()):
        result.insert(0, plots.curves("Quality over depth", "removed blocks", "held-out perplexity", quality))
        result.append(plots.curves("Quality over speed", label, "held-out perplexity", trade))
    return result


def _points(run: RunFiles, runtime: str) -> list[Point]:
    bench, quality = run.benches[runtime], run.quality.get("variants", {})
    top, result = headline(bench), []
    for c in bench["comparisons"]:
        if c["against"] == "dense" and (c["workload"], c["metric"]) == top:
            s, variant = c["speedup"], c["variant"]
            size = bench["variants"][variant]["facts"]["weight_bytes"]
            perplexity = quality.get(variant, {}).get("perplexity")
            result.append(Point(run.num_removed, variant, perplexity, s["value"], s["low"], s["high"], size))
    return result


def _cell(point: Point | None) -> str:
    if point is None:
        return ""
    quality = "?" if point.perplexity is None else f"{point.perplexity:.2f}"
    return f"{quality} / {point.speedup:.3f}"
