"""Two runs side by side: two devices, two depths, two versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ghostexport.benchmarking.runfiles import RunFiles, read_run
from ghostexport.benchmarking.statistics import Interval, unpaired_ratio
from ghostexport.benchmarking.verdicts import verdict
from ghostexport.errors import RunFolderError

SCHEMA = "ghostexport.compare/1"


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
            "schema": SCHEMA,
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
    one, two = read_run(a), read_run(b)
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
    p, q = one.quality.get("variants", {}), two.quality.get("variants", {})
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
