"""The report's section on the cut: what the criterion computed per block, and what came next in its ranking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ghostexport.benchmarking import plots
from ghostexport.benchmarking.runfiles import RunFiles
from ghostexport.benchmarking.sections import Section, number
from ghostexport.benchmarking.table import Row

Points = list[tuple[float, float]]


def selection_section(run: RunFiles) -> Section:
    """Plots of all scores with the cut marked, and the ranking."""
    section = Section("selection", "Which blocks were removed")
    if run.plan is None:
        section.missing = f"No plan yet. Make it with: ghostexport select {run.path}"
        return section
    criterion, scores = run.plan.get("criterion", "manual"), run.plan.get("scores", {})
    section.intro = f"Criterion {criterion} removed {run.cut}."
    for label, series in score_plots(run.plan).items():
        section.plots.append(plots.scores(series, run.plan["removed"], label))
    if not section.plots:
        section.sentences.append("The plan holds no scores: the spans were given by hand.")
    if rows := ranking(scores, run.plan["removed"]):
        columns = ["", "", ""][: max(len(cells) for _, cells in rows)]
        section.tables.append(("The ranking, with the runners-up", columns, rows))
    return section


def score_plots(plan: Mapping[str, Any]) -> dict[str, dict[str, Points]]:
    """Axis label -> series -> ``(block, score)``: one plot per kind of score, the rounds of a greedy search together.

    What can be drawn over the blocks are lists with one number per block and lists of ``[start, stop, score]``.
    """
    found: dict[str, dict[str, Points]] = {}
    own = f"{plan.get('criterion', 'manual')} score"
    for name, values in plan.get("scores", {}).items():
        if (points := _points(values, plan["num_blocks"])) is not None:
            label = own if name in ("blocks", "windows") or name.startswith("round ") else name
            found.setdefault(label, {})[name] = points
    return found


def _points(values: Any, blocks: int) -> Points | None:
    if not isinstance(values, list) or len(values) < 2:
        return None
    if all(isinstance(v, int | float) for v in values) and len(values) <= blocks + 1:
        return [(float(block), float(v)) for block, v in enumerate(values)]
    if all(isinstance(v, list) and len(v) == 3 for v in values):
        return sorted((float(start), float(v)) for start, _, v in values)
    return None


def ranking(scores: Mapping[str, Any], removed: Sequence[Sequence[int]]) -> list[Row]:
    """What was removed and what came next, best first: windows, single blocks, finalists, or rounds of a search."""
    ranked = scores.get("ranking", {})
    if "chosen" in ranked:
        windows = [ranked["chosen"], *ranked["runners_up"]]
        return [_row(_span(*w[:2]), w[2], i == 0) for i, w in enumerate(windows)]
    if "removed" in ranked:
        of = next(v for v in (scores.get("blocks"), scores.get("mean similarity")) if v is not None)
        gone = len(ranked["removed"])
        return [_row(f"block {b}", of[b], i < gone) for i, b in enumerate([*ranked["removed"], *ranked["runners_up"]])]
    if "perplexity" in scores:
        finalists = sorted(scores["perplexity"], key=lambda window: window[2])
        return [_row(_span(*w[:2]), w[2], list(w[:2]) in [list(r) for r in removed]) for w in finalists]
    if "steps" in scores:
        return [
            (f"step {i}", [" ".join(_span(*s) for s in step["removed"]), f"perplexity {number(step['perplexity'])}"])
            for i, step in enumerate(scores["steps"], 1)
        ]
    return [_round(i, found) for i, found in enumerate(scores.get("rounds", []), 1)]


def _row(label: str, score: float, removed: bool) -> Row:
    return label, [number(score), "removed" if removed else "runner-up"]


def _round(index: int, found: Mapping[str, Any]) -> Row:
    score = found["loss"] if "loss" in found else found["score"]
    others = ", ".join(f"{block} ({number(value)})" for block, value in found["runners_up"])
    return f"round {index}", [f"block {found['removed']} removed", number(score), f"next: {others}" if others else ""]


def _span(start: int, stop: int) -> str:
    return f"[{start}, {stop})"
