"""The figures of ``quality.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

#: Lines of the depth figure, in legend order: colour and width.
LINES = {
    "pruned": ("#999999", 1.5),
    "linearpatch-rotate": ("#c49a00", 1.5),
    "ghost": ("black", 2.5),
    "ghost-weighted": ("#1f77b4", 1.5),
    "ghost-zero+refit": ("#2ca02c", 1.5),
    "ghost-split+refit": ("#d62728", 2.5),
}


def draw_depths(result: dict[str, Any], size: int, blocks: int, path: Path) -> None:
    """Depth on x, geometric-mean perplexity on y, one line per repair, on the spans that streamline picks."""
    rows = [row for row in result["rows"] if row["size"] == size and "streamline" in row["criteria"]]
    drawing, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for repair, (colour, width) in LINES.items():
        points = sorted((row["prune"], row["geometric_mean"]) for row in rows if row["repair"] == repair)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=repair, color=colour, linewidth=width)
    axes.axhline(result["dense"]["geometric_mean"], color="#555555", linestyle=":", label="dense")
    depths = sorted({row["prune"] for row in rows})
    axes.set(xlabel=f"removed blocks of {blocks}", ylabel="perplexity (geometric mean)", yscale="log", xticks=depths)
    ticks = [20, 30, 50, 100, 200, 500, 1000]
    _finish(drawing, axes, ticks, path)


def draw_healing(rows: Sequence[dict[str, Any]], dense: float, path: Path) -> None:
    """Sequences on x, geometric-mean perplexity on y: healing over the amount of text, the closed forms as levels."""
    drawing, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    plans = sorted({str(row["removed"]) for row in rows})
    for plan, colour in zip(plans, ("#d62728", "#1f77b4", "#2ca02c", "#9467bd"), strict=False):
        own = [row for row in rows if str(row["removed"]) == plan]
        label = ", ".join(f"[{a}, {b})" for a, b in own[0]["removed"])
        for seed in sorted({row["seed"] for row in own}):
            healed = [r for r in own if r["repair"] == "ghost-healed" and r["seed"] == seed]
            points = sorted((row["size"], row["geometric_mean"]) for row in healed)
            if points:
                name = f"{label} healed" if seed == 0 else None
                style = {"marker": "o" if seed == 0 else "s", "markerfacecolor": colour if seed == 0 else "white"}
                axes.plot(*zip(*points, strict=True), color=colour, label=name, **style)
        for kind, line in (("ghost", "-."), ("ghost-split", "--")):
            level = next((r["geometric_mean"] for r in own if r["repair"] == kind and r["seed"] == 0), None)
            if level is not None and level < 300:
                axes.axhline(level, color=colour, linestyle=line, linewidth=1, label=f"{label} {kind}")
    axes.axhline(dense, color="#555555", linestyle=":", label="dense")
    sizes = sorted({row["size"] for row in rows if row["repair"] == "ghost-healed"})
    axes.set(xlabel="calibration sequences of 512 tokens", ylabel="perplexity (geometric mean)")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(sizes, labels=[str(size) for size in sizes])
    ticks = [tick for tick in (15, 20, 25, 30, 40, 50, 70, 100, 200, 300) if tick > 0.8 * dense]
    _finish(drawing, axes, ticks, path)


def draw_criteria(rows: Sequence[dict[str, Any]], operators: Sequence[str], blocks: int, path: Path) -> None:
    """Every plan's perplexity, one panel per depth, one mark per operator; the best plan on top."""
    depths = sorted({row["prune"] for row in rows})
    if not depths:
        return
    drawing, panels = plt.subplots(1, len(depths), figsize=(4.6 * len(depths), 5), layout="constrained", squeeze=False)
    for panel, depth in zip(panels[0], depths, strict=True):
        own = [row | {"label": "\n".join(row["criteria"])} for row in rows if row["prune"] == depth]
        best: dict[str, float] = {}
        for row in own:
            best[row["label"]] = min(best.get(row["label"], float("inf")), row["geometric_mean"])
        labels = sorted(best, key=lambda label: -best[label])
        for operator, mark in zip(operators, "x^oD", strict=True):
            points = [(r["geometric_mean"], labels.index(r["label"])) for r in own if r["repair"] == operator]
            panel.plot(*zip(*points, strict=True), mark, label=operator, markersize=6, alpha=0.8)
        panel.set_yticks(range(len(labels)), labels=labels, fontsize=7)
        panel.set(xscale="log", title=f"{depth} of {blocks} blocks removed")
        panel.set(xlabel="perplexity, up to ten times the lowest")
        low = min(best.values())
        panel.set_xlim(0.9 * low, 10 * low)
        ticks = [tick for tick in (20, 30, 50, 100, 200, 300, 500, 1000) if 0.9 * low <= tick <= 10 * low]
        panel.set_xticks(ticks, labels=[str(tick) for tick in ticks])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    handles, labels = panels[0][0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    drawing.savefig(path, dpi=150)
    plt.close(drawing)


def _finish(drawing: Any, axes: Any, ticks: Sequence[int], path: Path) -> None:
    """Ticks of the perplexity axis, grid and legend; writes the figure."""
    axes.set_yticks(ticks, labels=[str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    drawing.savefig(path, dpi=150)
    plt.close(drawing)
