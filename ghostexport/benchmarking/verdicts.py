"""Comparisons of variants, and when no verdict may be given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from ghostexport.benchmarking.ideal import Ceilings, VariantFacts, ideal_speedup
from ghostexport.benchmarking.measuring import Cell
from ghostexport.benchmarking.statistics import Interval, paired_difference, paired_ratio
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
    """``(variant, against)``: everything against dense, operators against pruned, operators against each other."""
    operators = [v for v in variants if v not in ("dense", "pruned")]
    yield from ((v, "dense") for v in variants if v != "dense" and "dense" in variants)
    yield from ((v, "pruned") for v in operators if "pruned" in variants)
    yield from ((b, a) for a, b in combinations(operators, 2))


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
