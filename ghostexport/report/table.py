"""The summary of a run as rows of text: the same for the terminal, the report and the comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ghostexport.benchmarking.measuring import Cell

#: A label and one cell per column; without cells it is a heading over the rows below.
Row = tuple[str, list[str]]

#: Shown first of each kind: the longest prefill and the longest past are what users quote.
_METRIC_NAMES = {
    ("prefill", "seconds"): "prefill, ms",
    ("decode", "seconds"): "decode, ms per step",
    ("request", "ttft"): "TTFT, ms",
    ("request", "itl"): "ITL, ms",
    ("request", "latency"): "request latency, ms",
}


def speed_rows(bench: Mapping[str, Any], variants: Sequence[str]) -> list[Row]:
    """Per workload and metric: the medians in ms, and the speed-up over dense with its interval and share of ideal."""
    medians = {(m["workload"], m["metric"], m["variant"]): m for m in bench["measurements"]}
    against = {(c["workload"], c["metric"], c["variant"]): c for c in bench["comparisons"] if c["against"] == "dense"}
    rows: list[Row] = []
    for workload, metric in dict.fromkeys((m["workload"], m["metric"]) for m in bench["measurements"]):
        kind = workload.split("-")[0]
        found = [medians.get((workload, metric, v)) for v in variants]
        rows.append((f"{workload}: {_METRIC_NAMES[kind, metric]}", []))
        rows.append(("median", [f"{m['summary']['median'] * 1e3:.2f}" if m else "" for m in found]))
        rows.append(("speed-up over dense", [_speedup(against.get((workload, metric, v))) for v in variants]))
        if any(against.get((workload, metric, v), {}).get("of_ideal") for v in variants):
            rows.append(("of the ideal", [_of_ideal(against.get((workload, metric, v))) for v in variants]))
    return rows


def size_rows(bench: Mapping[str, Any], variants: Sequence[str]) -> list[Row]:
    """Blocks, parameters, bytes, memory, build and load times."""
    entries = [bench["variants"].get(v) for v in variants]

    def row(label: str, read: Any) -> Row:
        return label, [read(e) if e else "" for e in entries]

    def megabytes(value: float | None) -> str:
        return "" if value is None else f"{value / 1e6:.1f}"

    rows = [
        row("decoder blocks", lambda e: str(e["facts"]["blocks"])),
        row("parameters, M", lambda e: f"{e['facts']['parameters'] / 1e6:.2f}"),
        row("weights, MB", lambda e: megabytes(e["facts"]["weight_bytes"])),
        row("engine, MB", lambda e: megabytes(e["engine"]["plan_bytes"])),
        row("KV cache, kB per token", lambda e: f"{e['facts']['kv_bytes_per_token'] / 1e3:.1f}"),
        row("build, s", lambda e: f"{e['engine']['build_seconds']:.1f}"),
        row("peak build RAM, MB", lambda e: megabytes(e["engine"]["build_peak_bytes"])),
        row("load, s", lambda e: f"{e['load_seconds']:.2f}"),
        row("memory, loaded, MB", lambda e: megabytes(e["loaded_bytes"])),
        row("peak memory, MB", lambda e: megabytes(_peak(e))),
    ]
    return [r for r in rows if any(r[1])]


def quality_rows(quality: Mapping[str, Any], variants: Sequence[str]) -> list[Row]:
    """Perplexity, KL and top-1 agreement of the engines."""
    found = [quality.get("variants", {}).get(v, {}) for v in variants]
    forms = (
        ("perplexity", "perplexity", "{:.2f}"),
        ("kl", "KL to dense, nats", "{:.4f}"),
        ("top1", "top-1 = dense", "{:.1%}"),
    )
    rows = [
        (label, [form.format(f[key]) if f.get(key) is not None else "" for f in found]) for key, label, form in forms
    ]
    return [r for r in rows if any(r[1])]


def live_rows(cells: Sequence[Cell]) -> list[Row]:
    """Medians so far in ms, for the live table while the benchmark runs."""
    variants = list(dict.fromkeys(c.variant for c in cells))
    table = {(c.workload.name, metric, c.variant): rounds for c in cells for metric, rounds in c.rounds.items()}
    rows = []
    for workload, metric in dict.fromkeys((w, m) for w, m, _ in table):
        values = [[s for r in table[workload, metric, v] for s in r] for v in variants]
        label = f"{workload}: {_METRIC_NAMES[workload.split('-')[0], metric]}"
        rows.append((label, [f"{np.median(v) * 1e3:.2f}" if v else "" for v in values]))
    return rows


def summary_cells(bench: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Variant -> column -> text: the few figures that the table of a run shows."""
    top = headline(bench)
    first_prefill = next((w["name"] for w in bench["workloads"] if w["kind"] == "prefill"), None)
    shown = {k: v for k, v in ((top, "decode ms"), ((first_prefill, "seconds"), "prefill ms")) if k}
    cells: dict[str, dict[str, str]] = {v: {} for v in bench["variants"]}
    for m in bench["measurements"]:
        if (column := shown.get((m["workload"], m["metric"]))) is not None:
            cells[m["variant"]][column] = f"{m['summary']['median'] * 1e3:.1f}"
    for c in bench["comparisons"]:
        if (c["workload"], c["metric"]) == top and c["against"] == "dense":
            cells[c["variant"]]["speed-up"] = _speedup(c)
    return cells


def headline(bench: Mapping[str, Any]) -> tuple[str, str] | None:
    """The ``(workload, metric)`` quoted first: decode after the longest past at the smallest batch."""
    decodes = [w for w in bench["workloads"] if w["kind"] == "decode"] or bench["workloads"]
    if not decodes:
        return None
    best = min(decodes, key=lambda w: (w["batch"], -w["past"], -w["tokens"]))
    return best["name"], "latency" if best["kind"] == "request" else "seconds"


def sentences(bench: Mapping[str, Any]) -> list[str]:
    """The results in words: speed-ups, marginal cost of every operator, operators against each other."""
    top = headline(bench)
    said = []
    for c in bench["comparisons"]:
        if (c["workload"], c["metric"]) != top:
            continue
        ratio, delta = c["speedup"], c["difference_seconds"]
        if c["against"] == "dense":
            text = f"{c['variant']} against dense, {c['workload']}: {_interval(ratio)} times as fast"
            if c["ideal"] is not None:
                text += f"; ideal {c['ideal']:.3f}, measured / ideal {c['of_ideal']:.3f}"
        elif c["against"] == "pruned":
            ms = {k: v * 1e3 for k, v in delta.items()}
            text = f"operator {c['variant']} costs {_interval(ms)} ms per step over pruned"
        else:
            text = f"{c['variant']} against {c['against']}: {_interval(ratio)} times as fast"
            text += ", the same within the interval" if c["verdict"] == "same" else ""
        if c["verdict"] == "none":
            text += f" (no verdict: {'; '.join(c['withheld'])})"
        said.append(text + ".")
    return said


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def _speedup(comparison: Mapping[str, Any] | None) -> str:
    if comparison is None:
        return ""
    s = comparison["speedup"]
    half = max(s["high"] - s["value"], s["value"] - s["low"])
    return f"{s['value']:.3f} ±{half:.3f}"


def _of_ideal(comparison: Mapping[str, Any] | None) -> str:
    return f"{comparison['of_ideal']:.1%}" if comparison and comparison["of_ideal"] is not None else ""


def _peak(entry: Mapping[str, Any]) -> float | None:
    known = [p for p in entry["peak_bytes"].values() if p is not None]
    return max(known) if known else None
