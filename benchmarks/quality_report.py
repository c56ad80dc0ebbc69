"""JSON, tables and figures of the measured cells of ``quality.py``."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from quality_figures import draw_criteria, draw_depths

from ghostexport.benchmarking.statistics import paired_average
from ghostexport.evaluation.tasks import compare, summarise
from ghostexport.files import write_bytes, write_json
from ghostexport.recovery.registry import OPERATORS as KINDS

#: Geometric means: over the demo texts, and over prose alone (code and presidential messages are never calibrated on).
AVERAGED = ("wiki", "c4", "code")
PROSE = ("wiki", "c4", "speeches")
COMPARED = ("wiki", "code")  # of the comparison of criteria
#: Trained, not solved: each is fitted by itself and keeps the state that is best on calibration windows of its own,
#: on which its errors are measured too; those of the others are measured on held-out text.
TRAINED = tuple(name for name, kind in KINDS.items() if kind.train is not None)
PREDICTED = 511  # tokens of a window
RESAMPLES = 4000

Cell = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """What is measured: how its results are called, its name and its decoder blocks."""

    name: str
    title: str
    blocks: int


def cell_name(plan: Mapping[str, Any], size: int, repair: str) -> str:
    spans = "+".join(f"{start}-{stop}" for start, stop in plan["removed"])
    return f"{spans}-{size}-{repair}"


def render(work: Path, results: Path, subject: Subject, size: int, operators: Sequence[str]) -> None:
    """Writes ``NAME.json``, ``NAME.md``, ``NAME.png`` and ``NAME_criteria.png`` of the subject."""
    cells = [read(path) for path in sorted(work.glob("text-*.json"))]
    dense = next(cell for cell in cells if cell["repair"] == "dense")
    cells = [cell for cell in cells if "size" in cell]
    plans = [read(path) for path in sorted(work.glob("plan-*.json"))]
    answers = {path.stem.removeprefix("tasks"): read(path) for path in sorted(work.glob("tasks*.json"))}
    recipe = {
        "source": f"{subject.title} (de-quantised)",
        "windows": len(dense["losses"]["wiki"]),
        "window_tokens": PREDICTED + 1,
        "calibration_sequences": size,
        "averaged": AVERAGED,
        "plans": sorted({(plan["criterion"], *map(tuple, plan["removed"])) for plan in plans}),
        "cells": sorted(cell_name(cell, cell["size"], cell["repair"]) for cell in cells),
    }
    result = {name: dense[name] for name in ("device", "torch", "transformers")} | {
        "recipe": recipe,
        "recipe_sha256": hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest(),
        "dense": {d: perplexity(v) for d, v in dense["losses"].items()} | {"geometric_mean": geometric_mean(dense)},
        "rows": rows(cells, plans),
        "criteria": criteria_rows([read(path) for path in sorted(work.glob("criteria-*.json"))], plans),
        "tasks": task_rows(answers, plans, size),
        "samples": dict(sorted((name.partition("-")[2], cell["sample"]) for name, cell in answers.items())),
    }
    results.mkdir(parents=True, exist_ok=True)
    write_json(results / f"{subject.name}.json", result)
    write_bytes(results / f"{subject.name}.md", markdown(result, size, operators).encode())
    draw_depths(result, size, subject.blocks, results / f"{subject.name}.png")
    draw_criteria(result["criteria"], operators, subject.blocks, results / f"{subject.name}_criteria.png")


def read(path: Path) -> Cell:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def perplexity(losses: Sequence[float]) -> float:
    return round(math.exp(sum(losses) / (PREDICTED * len(losses))), 2)


def geometric_mean(cell: Cell, domains: Sequence[str] = AVERAGED) -> float:
    return round(math.exp(mean_log(cell, domains)), 2)


def mean_log(cell: Cell, domains: Sequence[str]) -> float:
    """Mean over domains of the log perplexity."""
    return float(np.mean([np.mean(cell["losses"][domain]) / PREDICTED for domain in domains]))


def rows(cells: Sequence[Cell], plans: Sequence[Cell]) -> list[Cell]:
    """One row per cell: perplexities, and paired ratios to ghost on the same plan and to the same without a refit."""
    by_name = {cell_name(cell, cell["size"], cell["repair"]): cell for cell in cells}
    found = []
    for cell in cells:
        row = described(cell, plans)
        row |= {domain: perplexity(losses) for domain, losses in cell["losses"].items()}
        row["geometric_mean"], row["geometric_mean_prose"] = geometric_mean(cell), geometric_mean(cell, PROSE)
        for figure in ("relative_error_held_out", "nmse_held_out"):
            row[figure] = [None if cell["repair"] in TRAINED else fit.get(figure) for fit in cell["fit"]]
        same = by_name.get(cell_name(cell, cell["size"], "ghost"))
        if same is not None:
            row["ratio_to_ghost"], row["ratio_to_ghost_prose"] = ratio(cell, same, AVERAGED), ratio(cell, same, PROSE)
            row["ratio_by_domain"] = {domain: ratio(cell, same, (domain,)) for domain in cell["losses"]}
        unrefitted = by_name.get(cell_name(cell, cell["size"], cell["repair"].partition("+")[0]))
        if "+" in cell["repair"] and unrefitted is not None:
            row["ratio_to_unrefitted"] = {d: ratio(cell, unrefitted, (d,)) for d in cell["losses"]}
        found.append(row)
    return sorted(found, key=lambda row: (row["prune"], row["removed"], row["size"], -row["geometric_mean"]))


def criteria_rows(cells: Sequence[Cell], plans: Sequence[Cell]) -> list[Cell]:
    """One row per plan and operator: geometric mean of COMPARED, and its paired ratio to ghost on streamline's plan."""
    published = {
        cell["prune"]: cell
        for cell in cells
        if cell["repair"] == "ghost" and "streamline" in described(cell, plans)["criteria"]
    }
    found = []
    for cell in cells:
        row = described(cell, plans) | {"geometric_mean": geometric_mean(cell, COMPARED)}
        row |= {domain: perplexity(losses) for domain, losses in cell["losses"].items()}
        if cell["prune"] in published:
            row["ratio_to_published"] = ratio(cell, published[cell["prune"]], COMPARED)
        found.append(row)
    return sorted(found, key=lambda row: (row["prune"], row["removed"], -row["geometric_mean"]))


def described(cell: Cell, plans: Sequence[Cell]) -> Cell:
    row = {name: cell[name] for name in ("prune", "removed", "size", "repair", "seconds", "shared_with")}
    return row | {"criteria": [plan["criterion"] for plan in plans if plan["removed"] == cell["removed"]]}


def ratio(cell: Cell, other: Cell, domains: Sequence[str]) -> dict[str, float]:
    """Ratio of geometric means with its 95 % interval: windows are drawn again, the same ones for both models."""
    found = paired_average([(cell["losses"][d], other["losses"][d]) for d in domains], RESAMPLES, 0)
    logs = {"value": found["difference"], "low": found["interval"][0], "high": found["interval"][1]}
    return {name: float(f"{math.exp(log / PREDICTED):.8g}") for name, log in logs.items()}


def task_rows(answers: Mapping[str, Cell], plans: Sequence[Cell], size: int) -> list[Cell]:
    """Accuracy of every variant, and paired differences of every refit and operator to ghost on the same plan.

    ``answers`` by ``ITEMS-CELL``.
    """
    given = {name: cell["answers"] for name, cell in answers.items()}
    means = summarise(given) if given else {}
    counts = sorted({cell["items"] for cell in answers.values()})
    dense = [(count, f"{count}-dense") for count in counts if f"{count}-dense" in means]
    found = [{"plan": None, "repair": "dense", "items": count, "tasks": means[name]} for count, name in dense]
    removed = {cell_name(plan, size, ""): plan["removed"] for plan in sorted(plans, key=number_removed)}
    for plan, count in itertools.product(removed, counts):
        prefix = f"{count}-{plan}"
        reference = given.get(prefix + "ghost")
        for name in (n for n in given if n.startswith(prefix) and reference is not None):
            row = {"plan": removed[plan], "repair": name.removeprefix(prefix), "items": count, "tasks": means[name]}
            row["minus_ghost"] = compare(given[name], reference, RESAMPLES, 0)
            found.append(row)
    return found


def number_removed(plan: Cell) -> int:
    return sum(stop - start for start, stop in plan["removed"])


def markdown(result: Cell, size: int, operators: Sequence[str]) -> str:
    recipe = result["recipe"]
    lines = [
        f"# Quality of the repairs, {recipe['source']}",
        "",
        f"Perplexity on {recipe['windows']} held-out windows of {PREDICTED + 1} tokens per domain; geo = geometric "
        f"mean of {', '.join(AVERAGED)}, prose = of {', '.join(PROSE)}; calibration on wiki and C4 only. "
        "Ratios have 95 % intervals (bootstrap over windows, the same ones for both models). NMSE and mean relative "
        "error per token: of the stream behind every cut, held out. s = seconds of the recovery on a shared machine. "
        f"{result['device']}, torch {result['torch']}, recipe {result['recipe_sha256'][:12]}.",
        "",
        "dense: " + ", ".join(f"{d} {p:.1f}" for d, p in result["dense"].items()),
    ]
    lines += repair_tables(result["rows"], size) + refit_table(result["rows"])
    lines += criteria_table(result["criteria"], operators)
    lines += size_tables(result["rows"]) + task_table(result["tasks"]) + samples(result)
    return "\n".join(lines) + "\n"


def repair_tables(rows: Sequence[Cell], size: int) -> list[str]:
    """One table per plan that has refits."""
    lines = ["", "## Repairs of the same cut"]
    for group in grouped(rows, size):
        if not any("+refit" in row["repair"] for row in group):
            continue
        lines += [
            "",
            f"### n = {group[0]['prune']}: {spans(group[0])} ({', '.join(group[0]['criteria'])}), {size} sequences",
            "",
            "| repair | wiki | c4 | code | speeches | geo | / ghost | prose | / ghost | NMSE | relative error | s |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        lines += [repair_row(row) for row in group]
    return lines


def repair_row(row: Cell) -> str:
    texts = " | ".join(f"{row[d]:.1f}" for d in ("wiki", "c4", "code", "speeches"))
    means = [f"**{row[f'geometric_mean{k}']:.1f}** | {interval(row.get(f'ratio_to_ghost{k}'))}" for k in ("", "_prose")]
    figures = (row["nmse_held_out"], row["relative_error_held_out"])
    errors = " | ".join(", ".join(f"{e:.3f}" for e in figure if e is not None) for figure in figures)
    return f"| {row['repair']} | {texts} | {' | '.join(means)} | {errors} | {row['seconds']:.0f} |"


def refit_table(rows: Sequence[Cell]) -> list[str]:
    """Every refit against the same operator without it, whatever the plan and the number of sequences."""
    domains = ("wiki", "c4", "code", "speeches")
    lines = ["", "## Refit against no refit", "", "Ratio of perplexities, same operator, plan and sequences.", ""]
    lines += [f"| n | plan | sequences | refit | {' | '.join(domains)} |", "|---|---|---|---|" + "---|" * len(domains)]
    for row in (r for r in rows if "ratio_to_unrefitted" in r):
        shown = " | ".join(interval(row["ratio_to_unrefitted"][d]) for d in domains)
        lines.append(f"| {row['prune']} | {spans(row)} | {row['size']} | {row['repair']} | {shown} |")
    return lines


def criteria_table(rows: Sequence[Cell], operators: Sequence[str]) -> list[str]:
    lines = ["", "## Criteria x operators", ""]
    size = rows[0]["size"] if rows else 0
    lines += [
        f"Geometric mean perplexity of {' and '.join(COMPARED)}, {size} calibration sequences, best plan of each depth "
        "first; in brackets the ratio to `ghost` on streamline's plan of the same depth, with its interval.",
        "",
        "| n | plan | criteria | " + " | ".join(operators) + " |",
        "|---|---|---|" + "---|" * len(operators),
    ]
    groups = grouped(rows, size)
    for group in sorted(groups, key=lambda g: (g[0]["prune"], min(row["geometric_mean"] for row in g))):
        cells = {row["repair"]: row for row in group}
        shown = [criteria_cell(cells.get(name)) for name in operators]
        first = group[0]
        lines.append(f"| {first['prune']} | {spans(first)} | {', '.join(first['criteria'])} | {' | '.join(shown)} |")
    return lines


def criteria_cell(row: Cell | None) -> str:
    if row is None:
        return "-"
    return f"{row['geometric_mean']:.1f} [{interval(row.get('ratio_to_published'))}]"


def size_tables(rows: Sequence[Cell]) -> list[str]:
    plans = {json.dumps(row["removed"]): row for row in rows}
    lines = ["", "## Calibration size", "", "Geometric mean (ratio to `ghost` of the same size)."]
    for removed, first in plans.items():
        own = [row for row in rows if json.dumps(row["removed"]) == removed]
        counts = sorted({row["size"] for row in own})
        if len(counts) < 2:
            continue
        repairs = [r for r in ("ghost", "ghost-weighted", "ghost-split", "ghost-split+refit") if any_row(own, r)]
        lines += ["", f"### n = {first['prune']}, {spans(first)}", "", "| sequences | " + " | ".join(repairs) + " |"]
        lines += ["|---|" + "---|" * len(repairs)]
        for count in counts:
            cells = {row["repair"]: row for row in own if row["size"] == count}
            shown = [
                f"{cells[r]['geometric_mean']:.1f} ({interval(cells[r].get('ratio_to_ghost'))})" if r in cells else "-"
                for r in repairs
            ]
            lines.append(f"| {count} | {' | '.join(shown)} |")
    return lines


def task_table(rows: Sequence[Cell]) -> list[str]:
    if not rows:
        return []
    names = [name for name in rows[0]["tasks"] if name != "average"]
    lines = ["", "## Zero-shot accuracy", ""]
    lines += [
        "`acc` in percent on the first items of every task, the same for all, models in bfloat16; difference of the "
        "average to `ghost` with its 95 % interval, and the tasks where a difference is claimed."
    ]
    lines += ["", "| plan | repair | items | " + " | ".join(names) + " | average | minus ghost | claimed |"]
    lines += ["|---|---|---|" + "---|" * (len(names) + 3)]
    for row in rows:
        shown = [f"{100 * row['tasks'][name]['acc']['value']:.0f}" for name in names]
        shown.append(f"**{100 * row['tasks']['average']['acc']:.1f}**")
        against = row.get("minus_ghost")
        if against is None:
            shown += ["", ""]
        else:
            average = against["average"]["acc"]
            low, high = (100 * v for v in average["interval"])
            claimed = [
                f"{n} {100 * against[n]['acc']['difference']:+.0f}" for n in names if against[n]["acc"]["claimed"]
            ]
            shown += [f"{100 * average['difference']:+.1f} ({low:+.1f} to {high:+.1f})", ", ".join(claimed)]
        plan = "" if row["plan"] is None else spans({"removed": row["plan"]})
        lines.append(f"| {plan} | {row['repair']} | {row['items']} | {' | '.join(shown)} |")
    return lines


def samples(result: Cell) -> list[str]:
    if not result["samples"]:
        return []
    lines = ["", "## What they write", "", "Greedy continuation of *The history of the Roman Empire begins with*.", ""]
    for name, text in result["samples"].items():
        lines.append(f"* `{name}`: {' '.join(text.split())}")
    return lines


def grouped(rows: Iterable[Cell], size: int) -> list[list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for row in rows:
        if row["size"] == size:
            found.setdefault(json.dumps(row["removed"]), []).append(row)
    return list(found.values())


def any_row(rows: Sequence[Cell], repair: str) -> bool:
    return any(row["repair"] == repair for row in rows)


def spans(row: Mapping[str, Any]) -> str:
    return ", ".join(f"[{a}, {b})" if b - a > 1 else f"{a}" for a, b in row["removed"])


def interval(found: Mapping[str, float] | None) -> str:
    if not found:
        return ""
    value, low, high = (f"{found[k]:.3f}" if found[k] > 0.0005 else "< 0.001" for k in ("value", "low", "high"))
    return f"{value}, {low} - {high}"
