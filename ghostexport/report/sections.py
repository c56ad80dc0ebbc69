"""The parts of the report's page that need tables of their own: models (eval) and the choice of blocks (select)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ghostexport.recipe import is_repaired
from ghostexport.report import plots
from ghostexport.report.table import Row
from ghostexport.runfiles import RunFiles


@dataclass
class Section:
    """One part of the page.

    Attributes:
        id, title: of the heading.
        intro: one or two sentences.
        tables: ``(caption, column names, rows)``; a table of one column holds text.
        plots: SVG texts.
        sentences: results in words.
        pre: preformatted text.
        cuts: drawings of the graph around each boundary.
        missing: why the section is empty and which command fills it.
    """

    id: str
    title: str
    intro: str = ""
    tables: list[tuple[str, list[str], list[Row]]] = field(default_factory=list)
    plots: list[str] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    pre: str = ""
    cuts: list[dict[str, Any]] = field(default_factory=list)
    missing: str = ""


def number_rows(columns: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """One row per key that holds a plain number anywhere, one cell per column."""
    numbers = {n: {k: v for k, v in c.items() if type(v) in (int, float)} for n, c in columns.items()}
    keys = dict.fromkeys(k for c in numbers.values() for k in c)
    return [(k.replace("_", " "), [number(c.get(k)) for c in numbers.values()]) for k in keys]


def number(value: float | None) -> str:
    """Four digits, or an integer in full; empty for None."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


Evaluation = Mapping[str, Any]

#: Figures of the greedy continuations, as rows.
WRITING = {"distinct_1": "different tokens", "distinct_2": "different pairs", "repeated": "repeated 4-grams"}


def evaluation_section(evaluation: Evaluation) -> Section:
    """Tables of everything that ``ghostexport eval`` measured.

    Args:
        evaluation: what eval wrote, as :mod:`ghostexport.evaluation.eval_run` describes it.
    """
    section = Section(
        "evaluation",
        "Quality of the models",
        "Measured by ghostexport eval on PyTorch; the summary's figures are those of the engines. Brackets are 95 % "
        "intervals of a paired bootstrap over the same windows or items.",
    )
    variants, text = list(evaluation["variants"]), evaluation["text"]
    caption = f"Held-out text: {text['windows']} windows of {text['length']} tokens"
    section.tables.append((caption, variants, text_rows(evaluation)))
    if rows := corpus_rows(evaluation):
        section.tables.append(("Whole texts, as papers measure them", variants, rows))
    if rows := task_rows(evaluation):
        section.tables.append(("Zero-shot tasks, accuracy in % ± standard error", variants, rows))
    for cut in evaluation["boundaries"]:
        start, stop = cut["span"]
        caption = f"Cut [{start}, {stop}): error of the stream behind it on held-out text"
        section.tables.append((caption, ["NMSE", "relative error", "of first tokens"], cut_rows(cut)))
    if rows := sample_rows(evaluation):
        section.tables.append(("Greedy continuations, one beginning after the other", ["continuation"], rows))
    return section


def sample_rows(evaluation: Evaluation) -> list[Row]:
    """Per beginning, what every variant made of it."""
    samples = {v: found["samples"] for v, found in evaluation["variants"].items() if "samples" in found}
    rows: list[Row] = []
    for number, first in enumerate(next(iter(samples.values()), [])):
        rows.append((first["prompt"], []))
        rows += [(v, [own[number]["text"]]) for v, own in samples.items()]
    return rows


def corpus_rows(evaluation: Evaluation) -> list[Row]:
    """Perplexity, and its ratio to dense, on whole texts."""
    rows: list[Row] = []
    for name, corpus in evaluation.get("corpora", {}).items():
        found = [figures["perplexity"] for figures in corpus["variants"].values()]
        rows.append((f"{name}, {corpus['windows']} windows of {corpus['length']}", []))
        rows += [("perplexity", [number(p) for p in found]), ("/ dense", [f"{p / found[0]:.3f}" for p in found])]
    return rows


def text_rows(evaluation: Evaluation) -> list[Row]:
    """Perplexity and its ratios with intervals, KL and top-1 agreement to dense, and the ONNX graphs' perplexity."""
    found = evaluation["variants"]
    rows: list[Row] = [("perplexity", [number(v["perplexity"]) for v in found.values()])]
    known = {v: f["perplexity"] for v, f in found.items() if is_repaired(v) and f["perplexity"] is not None}
    best = [min(known, key=lambda v: known[v])] if len(known) > 1 else []
    for against in ("dense", *best):
        ratio = [_difference(evaluation, v, against, "loss", math.exp, "{:.3f}") for v in found]
        rows.append((f"perplexity / {against}", ratio))
    rows.append(("KL to dense, nats", [_difference(evaluation, v, "dense", "kl", float, "{:.4f}") for v in found]))
    agreement = [_difference(evaluation, v, "dense", "top1", lambda d: 1 + d, "{:.1%}") for v in found]
    rows.append(("top-1 = dense", agreement))
    for key, label in WRITING.items():
        rows.append((label, [_share(v.get("writing", {}).get(key)) for v in found.values()]))
    rows.append(("perplexity, ONNX graph", [number(v.get("onnx", {}).get("perplexity")) for v in found.values()]))
    return [r for r in rows if any(r[1])]


def task_rows(evaluation: Evaluation) -> list[Row]:
    """Per task and metric the accuracies; of the average also the difference from dense."""
    tasks = {v: found["tasks"] for v, found in evaluation["variants"].items() if "tasks" in found}
    rows: list[Row] = []
    for task, metrics in next(iter(tasks.values()), {}).items():
        items = {m["items"] for m in metrics.values() if isinstance(m, Mapping)}
        rows.append((f"{task}, {max(items)} items" if items else task, []))
        for metric in metrics:
            rows.append((metric, [_accuracy(own[task][metric]) for own in tasks.values()]))
            if task == "average":
                change = [_difference(evaluation, v, "dense", metric, float, "{:+.1%}", task) for v in tasks]
                rows.append((f"{metric} minus dense", change))
                kept = [_share(evaluation["variants"][v].get("retained", {}).get(metric)) for v in tasks]
                rows.append((f"{metric} retained", kept))
    return rows


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def cut_rows(cut: Mapping[str, Any]) -> list[Row]:
    """Errors of the operators, and of the ladder of constrained maps below them."""
    rows: list[Row] = []
    for title, kind in (("operators", "operators"), ("ladder: the best map of each kind", "ladder")):
        rows.append((title, []))
        for name, found in cut[kind].items():
            keys = ("nmse", "relative_error", "sink_relative_error")
            rows.append((name, [number(found[key]) for key in keys]))
    return rows


def _difference(
    evaluation: Evaluation,
    variant: str,
    minus: str,
    key: str,
    scale: Callable[[float], float],
    form: str,
    task: str | None = None,
) -> str:
    """``scale`` of the difference between two variants with its interval; of a variant to itself there is none."""
    if variant == minus:
        return form.format(scale(0.0))
    for entry in evaluation["differences"]:
        sign = {(variant, minus): 1, (minus, variant): -1}.get((entry["variant"], entry["minus"]))
        figures = entry if task is None else entry.get("tasks", {}).get(task, {})
        if sign is not None and key in figures:
            low, high = sorted(scale(sign * x) for x in figures[key]["interval"])
            value = scale(sign * figures[key]["difference"])
            return f"{form.format(value)} [{form.format(low)}, {form.format(high)}]"
    return ""


def _accuracy(found: Any) -> str:
    if isinstance(found, Mapping):
        return f"{found['value']:.1%} ±{found['stderr'] * 100:.1f}"
    return f"{found:.1%}"


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
    if all(v is None or isinstance(v, int | float) for v in values) and len(values) <= blocks + 1:
        return [(float(block), float(v)) for block, v in enumerate(values) if v is not None]
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


def quantization_section(run: RunFiles) -> Section:
    """The quantised variants: form, block, errors, what was kept."""
    section = Section(
        "quantization",
        "Quantised weights",
        "Relative errors of the matrices' outputs, weighted by what they see on the calibration set where measured. "
        "Under gptq, their mean error on that set itself, with nearest rounding and with rounding in turn.",
    )
    rows: list[Row] = []
    for variant, report in run.quantization.items():
        linears = [row for row in report["linears"] if row["form"]]
        kept = [row["weight"] for row in report["linears"] if not row["form"]]
        errors = [row["relative_error"] for row in linears]
        blocks = ", ".join(dict.fromkeys(str(row["block"] or "channel") for row in linears))
        inputs = sum(row["activations"] for row in linears)
        form = report["form"] + (f", inputs of {inputs} too" if inputs else "")
        scales = report["settings"]["scales"] + " (weighted)" * report["weighted"]
        cells = [form, blocks, scales, str(len(linears))]
        cells += [f"{statistics.mean(errors):.3f}", f"{max(errors):.3f}"]
        turned = [row["output_error"] for row in linears if row.get("output_error")]
        cells.append(" -> ".join(f"{statistics.mean(errors):.3f}" for errors in zip(*turned, strict=True)))
        rows.append((variant, [*cells, ", ".join(kept) or "none", f"{report['weight_bytes_after'] / 1e6:.1f}"]))
    columns = ["form", "block", "scales", "matrices", "mean error", "largest", "gptq", "kept in float", "MB"]
    section.tables.append(("", columns, rows))
    return section
