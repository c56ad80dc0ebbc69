"""Table, figure and JSON of the measured cells of ``quality.py``."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from ghostexport.runfolder import write_bytes, write_json

#: Geometric means: over the demo texts, and over prose alone (code and presidential messages are never calibrated on).
AVERAGED = ("wiki", "c4", "code")
PROSE = ("wiki", "c4", "speeches")
PREDICTED = 511  # tokens of a window
RESAMPLES = 4000

Cell = dict[str, Any]


def render(work: Path, results: Path) -> None:
    """Writes ``quality.json``, ``quality.md`` and, with two depths or more, ``quality.png``."""
    cells = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(work.glob("*.json"))]
    dense = [cell for cell in cells if cell.get("repair") == "dense"]
    cells = [cell for cell in cells if "size" in cell]
    groups = sorted({(cell["prune"], cell["criterion"], cell["size"]) for cell in cells})
    rows = [row for group in groups for row in compared([c for c in cells if key(c) == group])]
    versions = {name: cells[0][name] for name in ("device", "torch", "transformers")} if cells else {}
    recipe = {"source": "SmolLM2-135M (de-quantised)", "length": 512, "averaged": AVERAGED, "groups": groups}
    recipe_sha256 = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    dense_row = {d: perplexity(cell["losses"][d]) for cell in dense[:1] for d in cell["losses"]}
    result = versions | {"recipe": recipe, "recipe_sha256": recipe_sha256, "dense": dense_row, "rows": rows}
    results.mkdir(parents=True, exist_ok=True)
    write_json(results / "quality.json", result)
    write_bytes(results / "quality.md", markdown(result).encode())
    if len({row["prune"] for row in rows}) > 1:
        figure(result, results / "quality.png")


def key(cell: Cell) -> tuple[int, str, int]:
    return cell["prune"], cell["criterion"], cell["size"]


def perplexity(losses: list[float]) -> float:
    return math.exp(sum(losses) / (PREDICTED * len(losses)))


def compared(cells: list[Cell]) -> list[Cell]:
    """One row per repair of a plan: perplexities, their geometric mean, and the paired ratio to ghost."""
    ghost = next((cell for cell in cells if cell["repair"] == "ghost"), None)
    rows = []
    for cell in cells:
        row = {name: cell[name] for name in ("prune", "criterion", "size", "repair", "removed", "seconds")}
        row["windows"] = cell["windows"]
        row |= {domain: round(perplexity(losses), 2) for domain, losses in cell["losses"].items()}
        row["geometric_mean"] = round(math.exp(mean_log(cell, AVERAGED)), 2)
        row["geometric_mean_prose"] = round(math.exp(mean_log(cell, PROSE)), 2)
        row["relative_error_held_out"] = [fit.get("relative_error_held_out") for fit in cell["fit"]]
        row["nmse_held_out"] = [fit.get("nmse_held_out") for fit in cell["fit"]]
        if ghost is not None:
            row["ratio_to_ghost"] = ratio(cell, ghost, AVERAGED)
            row["ratio_to_ghost_prose"] = ratio(cell, ghost, PROSE)
        rows.append(row)
    return sorted(rows, key=lambda row: -row["geometric_mean"])


def mean_log(cell: Cell, domains: tuple[str, ...]) -> float:
    """Mean over domains of the log perplexity."""
    return float(np.mean([np.mean(cell["losses"][domain]) / PREDICTED for domain in domains]))


def ratio(cell: Cell, ghost: Cell, domains: tuple[str, ...]) -> dict[str, float]:
    """Ratio of geometric means with its 95 % interval: windows are drawn again, the same ones for both models."""
    random = np.random.default_rng(0)
    count = len(ghost["losses"][domains[0]])
    logs = []
    for _ in range(RESAMPLES):
        difference = 0.0
        for domain in domains:
            chosen = random.integers(0, count, count)
            pair = np.asarray(cell["losses"][domain])[chosen] - np.asarray(ghost["losses"][domain])[chosen]
            difference += float(pair.mean()) / PREDICTED / len(domains)
        logs.append(difference)
    low, high = np.exp(np.percentile(logs, [2.5, 97.5]))
    value = math.exp(mean_log(cell, domains) - mean_log(ghost, domains))
    return {"value": round(value, 3), "low": round(float(low), 3), "high": round(float(high), 3)}


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "# Quality of the repairs, SmolLM2-135M (de-quantised)",
        "",
        f"Perplexity on held-out windows of 512 tokens; geo = geometric mean of {', '.join(AVERAGED)}; prose = of "
        f"{', '.join(PROSE)}. Ratio to `ghost` with its 95 % interval (paired bootstrap over windows); relative error "
        "behind the operator; s = seconds of the recovery on a shared machine. "
        f"{result.get('device', '')}, torch {result.get('torch', '')}, recipe {result['recipe_sha256'][:12]}.",
        "",
    ]
    if result["dense"]:
        lines += ["dense: " + ", ".join(f"{d} {p:.1f}" for d, p in result["dense"].items()), ""]
    seen = None
    for row in result["rows"]:
        group = (row["prune"], row["criterion"], row["size"])
        if group != seen:
            seen = group
            spans = ", ".join(f"[{a}, {b})" for a, b in row["removed"])
            lines += [
                "",
                f"## n = {row['prune']}, {row['criterion']} {spans}, {row['size']} calibration sequences, "
                f"{row['windows']} windows per domain",
                "",
                "| repair | wiki | c4 | code | speeches | geo | / ghost | geo prose | / ghost | relative error | s |",
                "|---|---|---|---|---|---|---|---|---|---|---|",
            ]
        lines.append(markdown_row(row))
    return "\n".join(lines) + "\n"


def markdown_row(row: Cell) -> str:
    texts = " | ".join(f"{row[d]:.1f}" for d in ("wiki", "c4", "code", "speeches"))
    cells = []
    for kind in ("", "_prose"):
        found = row.get(f"ratio_to_ghost{kind}")
        interval = f"{found['value']:.3f} ({found['low']:.3f} - {found['high']:.3f})" if found else ""
        cells.append(f"**{row[f'geometric_mean{kind}']:.1f}** | {interval}")
    errors = ", ".join(f"{e:.3f}" for e in row["relative_error_held_out"] if e is not None)
    return f"| {row['repair']} | {texts} | {' | '.join(cells)} | {errors} | {row['seconds']:.0f} |"


def figure(result: dict[str, Any], path: Path) -> None:
    """Depth on x, geometric-mean perplexity on y, one line per repair, of the streamline plans."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if row["criterion"] == "streamline"]
    most = max(row["size"] for row in rows)
    repairs = list(dict.fromkeys(row["repair"] for row in rows if row["size"] == most))
    drawing, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for repair in repairs:
        points = sorted((r["prune"], r["geometric_mean"]) for r in rows if r["repair"] == repair and r["size"] == most)
        style = {"ghost": {"color": "black", "linewidth": 2.5}}.get(repair, {})
        axes.plot(*zip(*points, strict=True), marker="o", label=repair, **style)
    axes.set(xlabel="removed blocks of 30", ylabel="perplexity (geometric mean)", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    drawing.savefig(path, dpi=150)
    plt.close(drawing)
