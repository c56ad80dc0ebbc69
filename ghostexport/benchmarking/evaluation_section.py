"""The report's section on ``evaluation.json``: text, tasks and cuts measured on the models, and how they write."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ghostexport.benchmarking.sections import Section, number
from ghostexport.benchmarking.table import Row

Evaluation = Mapping[str, Any]


def evaluation_section(evaluation: Evaluation) -> Section:
    """Tables of everything that ``ghostexport eval`` measured.

    Args:
        evaluation: content of ``evaluation.json``, as :mod:`ghostexport.evaluation.stage` describes it.
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
    if rows := task_rows(evaluation):
        section.tables.append(("Zero-shot tasks, accuracy in % ± standard error", variants, rows))
    for cut in evaluation["boundaries"]:
        start, stop = cut["span"]
        caption = f"Cut [{start}, {stop}): error of the stream behind it on held-out text"
        section.tables.append((caption, ["NMSE", "relative error", "of first tokens"], cut_rows(cut)))
    samples = {v: found["sample"] for v, found in evaluation["variants"].items() if "sample" in found}
    if samples:
        prompt = next(iter(samples.values()))["prompt"]
        rows = [(v, [sample["text"]]) for v, sample in samples.items()]
        section.tables.append((f"Greedy continuations of: {prompt}", ["continuation"], rows))
    return section


def text_rows(evaluation: Evaluation) -> list[Row]:
    """Perplexity and its ratios with intervals, KL and top-1 agreement to dense, and the ONNX graphs' perplexity."""
    found = evaluation["variants"]
    rows: list[Row] = [("perplexity", [number(v["perplexity"]) for v in found.values()])]
    known = {
        v: f["perplexity"] for v, f in found.items() if v not in ("dense", "pruned") and f["perplexity"] is not None
    }
    best = [min(known, key=lambda v: known[v])] if len(known) > 1 else []
    for against in ("dense", *best):
        ratio = [_difference(evaluation, v, against, "loss", math.exp, "{:.3f}") for v in found]
        rows.append((f"perplexity / {against}", ratio))
    rows.append(("KL to dense, nats", [_difference(evaluation, v, "dense", "kl", float, "{:.4f}") for v in found]))
    agreement = [_difference(evaluation, v, "dense", "top1", lambda d: 1 + d, "{:.1%}") for v in found]
    rows.append(("top-1 = dense", agreement))
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
    return rows


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
