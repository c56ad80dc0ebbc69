"""The eval stage: the quality of every variant of a run on PyTorch and on its ONNX graphs, into its file."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ghostexport import calibration, models
from ghostexport.benchmarking.statistics import differences
from ghostexport.calibration import CalibrationSet
from ghostexport.evaluation.corpora import corpus_windows
from ghostexport.evaluation.cut_errors import boundary_errors
from ghostexport.evaluation.quality_meter import QualityMeter
from ghostexport.evaluation.tasks import ask, compare, retained, summarise
from ghostexport.evaluation.text import Forward, forward_of, measure
from ghostexport.evaluation.writing import write
from ghostexport.execution import Execution
from ghostexport.files import write_json
from ghostexport.models import LoadedModel
from ghostexport.models.rounding import round_weights
from ghostexport.operators import OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import EvalSection, Recipe, float_variant
from ghostexport.runfolder import RunFolder


def eval_run(
    folder: RunFolder, recipe: Recipe, loaded: LoadedModel, plan: PrunePlan, sets: Mapping[str, OperatorSet],
    execution: Execution,
) -> list[Path]:  # fmt: skip
    """Measures every variant.

    The file holds ``text`` (held-out windows, their BOS token), ``variants`` (``perplexity``, ``kl`` in nats and
    ``top1`` against dense, ``kl_float`` against the variant it was quantised from, ``onnx`` the same of the graph,
    ``losses`` per window, ``samples``, ``writing``, ``tasks``, ``retained``), ``corpora`` (whole texts),
    ``differences`` between all pairs with paired bootstrap intervals, ``boundaries`` (ladder, operators).

    Raises:
        RuntimeUnavailableError: ONNX Runtime or lm-eval is missing and was asked for.
    """
    section = recipe.eval
    drawn, held_out = calibration.load(folder.calibration_path)
    windows = held_out.first(section.windows)
    variants = {"dense": loaded, "pruned": models.patch(loaded, plan)}
    variants |= {name: models.patch(loaded, plan, operators) for name, operators in sets.items()}
    sources = {name: float_variant(name) for name in recipe.quantized_variants}
    for name, source in sources.items():
        rounded = round_weights(variants[source].model, folder.graph_path(source), folder.graph_path(name))
        variants[name] = replace(variants[source], model=rounded)
    forwards = {name: forward_of(model, windows.batches(tokens=1), execution) for name, model in variants.items()}
    found = measure(forwards, windows, "dense", execution, sources)
    meters = {name: found[name] for name in variants}
    report: dict[str, Any] = {
        "text": {"windows": len(windows), "length": windows.tokens.shape[1], "spec": dict(windows.spec)},
        "variants": {name: _figures(meter) for name, meter in meters.items()},
        "differences": _differences(meters, section),
        "boundaries": boundary_errors(loaded, plan, sets, drawn, windows, execution) if plan.removed else [],
    }
    for name, source in sources.items():
        report["variants"][name]["kl_float"] = found[f"{name}, {source}"].result().mean_kl
    if section.onnx:
        for name, meter in _onnx_meters(folder, recipe, forwards, windows, execution).items():
            report["variants"][name]["onnx"] = {k: v for k, v in _figures(meter).items() if k != "losses"}
    if section.corpora:
        report["corpora"] = _corpora(variants, loaded, recipe, execution)
    pytorch = {name: variant.model for name, variant in variants.items()}
    if section.generate and loaded.tokenizer is not None:
        beginnings = windows.first(section.prompts)
        for name, figures in write(pytorch, loaded.tokenizer, beginnings, section.generate, execution).items():
            report["variants"][name] |= figures
    if section.tasks:
        _add_tasks(report, pytorch, loaded, section, execution)
    write_json(folder.model_quality_path, report)
    return [folder.model_quality_path]


def _corpora(
    variants: Mapping[str, LoadedModel], loaded: LoadedModel, recipe: Recipe, execution: Execution
) -> dict[str, dict[str, Any]]:
    """Figures of every variant on whole texts, by their names."""
    section = recipe.eval
    calibrated = recipe.calibration.source
    found = {}
    for source in section.corpora:
        if any(source == name.rpartition(":")[0] or source == name for name in _listed(calibrated)):
            execution.say(f"eval: {source} is calibrated on: its figures flatter the repairs")
        length = min(section.corpus_length, loaded.max_length or section.corpus_length)
        windows = corpus_windows(source, loaded.tokenizer, length).first(section.windows)
        forwards = {name: forward_of(model, windows.batches(tokens=1), execution) for name, model in variants.items()}
        meters = measure(forwards, windows, "dense", execution)
        figures = {name: {k: v for k, v in _figures(m).items() if k != "losses"} for name, m in meters.items()}
        found[source] = {"windows": len(windows), "length": length, "variants": figures}
    return found


def _listed(sources: str | tuple[str, ...]) -> tuple[str, ...]:
    return (sources,) if isinstance(sources, str) else sources


def _figures(meter: QualityMeter) -> dict[str, Any]:
    found = meter.result()
    return {
        "perplexity": None if math.isnan(found.perplexity) else found.perplexity,
        "kl": found.mean_kl,
        "top1": found.top1_agreement,
        "tokens": found.tokens,
        "losses": [window.nll for window in meter.windows],
    }


def _differences(meters: Mapping[str, QualityMeter], section: EvalSection) -> list[dict[str, Any]]:
    return [
        {"variant": one, "minus": other}
        | differences(meters[one].windows, meters[other].windows, section.resamples, section.seed)
        for other, one in itertools.combinations(meters, 2)
    ]


def _onnx_meters(
    folder: RunFolder, recipe: Recipe, forwards: Mapping[str, Forward], windows: CalibrationSet, execution: Execution
) -> dict[str, QualityMeter]:
    """Every graph on ONNX Runtime, one at a time, compared with the dense PyTorch model."""
    from ghostexport.float32_twin import for_cpu

    found = {}
    for name in forwards:
        with tempfile.TemporaryDirectory(prefix="ghostexport-") as scratch:
            graph, _ = for_cpu(folder.graph_path(name), recipe.model.dtype, Path(scratch))
            pair = {"dense torch": forwards["dense"], name: onnx_forward(graph)}
            found[name] = measure(pair, windows, "dense torch", execution)[name]
    return found


def onnx_forward(graph: Path) -> Forward:
    """The forward function of an exported decoder on ONNX Runtime, from an empty cache.

    Raises:
        RuntimeUnavailableError: onnxruntime is missing, or cannot run the graph.
    """
    from ghostexport.runtimes.ort.onnxruntime import open_graph

    session = open_graph(graph)

    def forward(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Any:
        ids = input_ids.cpu().numpy()
        mask = None if attention_mask is None else attention_mask.cpu().numpy()
        return session.forward(ids, session.new_cache(len(ids)), mask)[0]

    return forward


def _add_tasks(
    report: dict[str, Any],
    variants: Mapping[str, Any],
    loaded: LoadedModel,
    section: EvalSection,
    execution: Execution,
) -> None:
    folder = None if section.task_folder is None else Path(section.task_folder)
    with tempfile.TemporaryDirectory(prefix="ghostexport-") as scratch:
        answers = ask(variants, loaded.tokenizer, section.tasks, folder, section.limit, Path(scratch), execution)
    summaries = summarise(answers)
    dense = summaries["dense"]
    for name, figures in summaries.items():
        report["variants"][name]["tasks"] = figures
        report["variants"][name]["retained"] = retained(figures["average"], dense["average"])
    for entry in report["differences"]:
        one, other = answers[entry["variant"]], answers[entry["minus"]]
        entry["tasks"] = compare(one, other, section.resamples, section.seed)
