"""Several runs side by side: two devices, two versions; or a sweep over depths as one curve of quality and speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ghostexport.benchmarking.result import verdict
from ghostexport.benchmarking.statistics import Interval, unpaired_ratio
from ghostexport.errors import RunFolderError
from ghostexport.report import plots
from ghostexport.report.table import headline
from ghostexport.runfiles import RunFiles
from ghostexport.runfolder import RunFolder

COMPARISON_SCHEMA = "ghostexport.compare/1"


@dataclass(frozen=True)
class Line:
    """One figure of both runs. ``a`` and ``b`` are medians in seconds; ``speedup`` is A's time over B's."""

    workload: str
    metric: str
    variant: str
    a: float
    b: float
    speedup: Interval
    verdict: str

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"speedup": self.speedup.to_json()}


@dataclass(frozen=True)
class RunComparison:
    """The comparison of two runs.

    Attributes:
        a, b: names of the runs.
        differs: what is not the same: the subject of the comparison.
        withheld: differences that forbid a verdict; empty when there is one.
        lines: speed, where both measured the same workload and variant.
        only_in_one: ``workload variant`` measured in one run only.
        quality: variant -> (A's figures, B's figures).
    """

    a: str
    b: str
    differs: tuple[str, ...]
    withheld: tuple[str, ...]
    lines: tuple[Line, ...]
    only_in_one: tuple[str, ...]
    quality: Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": COMPARISON_SCHEMA,
            "a": self.a,
            "b": self.b,
            "differs": list(self.differs),
            "withheld": list(self.withheld),
            "lines": [line.to_json() for line in self.lines],
            "only_in_one": list(self.only_in_one),
            "quality": {v: list(pair) for v, pair in self.quality.items()},
        }

    def rows(self) -> list[tuple[str, list[str]]]:
        """For a table with the columns A, B, A / B, verdict."""
        result = []
        for line in self.lines:
            s = line.speedup
            ratio = f"{s.value:.3f} [{s.low:.3f}, {s.high:.3f}]"
            label = f"{line.variant}, {line.workload} {line.metric}, ms"
            result.append((label, [f"{line.a * 1e3:.2f}", f"{line.b * 1e3:.2f}", ratio, line.verdict]))
        for variant, (one, two) in self.quality.items():
            shared = [key for key in one if key in two]
            result += [(f"{variant}, {key}", [f"{one[key]:.4g}", f"{two[key]:.4g}", "", ""]) for key in shared]
        return result


def compare(a: Path, b: Path, runtime: str | None = None) -> RunComparison:
    """Puts two run folders side by side.

    Args:
        a, b: run folders with a finished bench stage.
        runtime: whose figures; None takes the first that both have.

    Raises:
        RunFolderError: the runs have no runtime in common.
    """
    one, two = RunFolder(a).read(), RunFolder(b).read()
    common = [r for r in one.benches if r in two.benches and runtime in (None, r)]
    if not common:
        raise RunFolderError(
            f"{a} and {b} have no figures of {runtime or 'a common runtime'}.",
            f"Measure both with the same runtime: ghostexport bench {a}",
        )
    x, y = one.benches[common[0]], two.benches[common[0]]
    withheld = _forbidding(x, y)
    left, right = _by_key(x), _by_key(y)
    lines = tuple(_line(key, left[key], right[key], "none" if withheld else "") for key in left if key in right)
    alone = tuple(dict.fromkeys(f"{w} {v}" for w, _, v in sorted(left.keys() ^ right.keys())))
    p, q = one.engine_quality.get("variants", {}), two.engine_quality.get("variants", {})
    return RunComparison(
        a=str(a),
        b=str(b),
        differs=_subject(one, two, x, y),
        withheld=withheld,
        lines=lines,
        only_in_one=alone,
        quality={v: (p[v], q[v]) for v in p if v in q},
    )


def _by_key(bench: Mapping[str, Any]) -> dict[tuple[str, str, str], Mapping[str, Any]]:
    return {(m["workload"], m["metric"], m["variant"]): m for m in bench["measurements"]}


def _line(key: tuple[str, str, str], a: Mapping[str, Any], b: Mapping[str, Any], given: str) -> Line:
    speedup = unpaired_ratio(a["rounds"], b["rounds"])
    return Line(*key, a["summary"]["median"], b["summary"]["median"], speedup, given or verdict(speedup))


def _forbidding(x: Mapping[str, Any], y: Mapping[str, Any]) -> tuple[str, ...]:
    """Differences after which the times of two runs must not be judged against each other."""
    reasons = []
    if x["workloads"] != y["workloads"]:
        reasons.append("workloads differ")
    if x["clock"] != y["clock"]:
        reasons.append(f"clocks differ: {x['clock']}, {y['clock']}")
    for variant in x["variants"].keys() & y["variants"].keys():
        p, q = x["variants"][variant], y["variants"][variant]
        if p["facts"]["dtype"] != q["facts"]["dtype"]:
            reasons.append(f"dtype of {variant} differs: {p['facts']['dtype']}, {q['facts']['dtype']}")
        flags = (p["engine"]["flags"], q["engine"]["flags"])
        changed = sorted(k for k in flags[0].keys() | flags[1].keys() if flags[0].get(k) != flags[1].get(k))
        reasons += [f"runtime settings of {variant} differ: {key}" for key in changed]
        if not (p["parity"] and q["parity"]):
            reasons.append(f"parity of {variant} failed or was not checked")
    return tuple(sorted(reasons))


def _subject(one: RunFiles, two: RunFiles, x: Mapping[str, Any], y: Mapping[str, Any]) -> tuple[str, ...]:
    named = (
        ("model", one.model, two.model),
        ("cut", one.cut, two.cut),
        ("device", _device(x), _device(y)),
        ("versions", x["card"]["versions"], y["card"]["versions"]),
    )
    return tuple(f"{what}: {p} | {q}" for what, p, q in named if p != q)


def _device(bench: Mapping[str, Any]) -> str:
    card = bench["card"]
    return f"{card.get('gpu', {}).get('name') or card['cpu']}, {card['threads']} CPU threads"


SWEEP_SCHEMA = "ghostexport.sweep/1"


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
            "schema": SWEEP_SCHEMA,
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
    runs = sorted((RunFolder(folder).read() for folder in folders), key=lambda r: r.num_removed)
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
    bench, quality = run.benches[runtime], run.engine_quality.get("variants", {})
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
