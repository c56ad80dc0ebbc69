"""The benchmark of a run: quality and speed of every engine that can run here, and the report; or of engines."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ghostexport import runtimes
from ghostexport.benchmarking.benchmark import bench
from ghostexport.benchmarking.engine_checks import agreements, engine_quality
from ghostexport.benchmarking.ideal import VariantFacts, read_facts
from ghostexport.benchmarking.measuring import Loaders, write_layers
from ghostexport.benchmarking.result import BenchReport
from ghostexport.calibration import CalibrationSet
from ghostexport.calibration import load as load_calibration
from ghostexport.errors import RecipeError, RunFolderError, RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.files import write_json
from ghostexport.plan import PrunePlan
from ghostexport.recipe import BenchSection, BuildSection, Recipe, float_variant
from ghostexport.report.page import write_report
from ghostexport.report.table import live_rows, summary_cells
from ghostexport.runfolder import RunFolder
from ghostexport.runtimes.base import EngineFile, Runtime
from ghostexport.runtimes.sidecar import read_sidecar


def bench_run(folder: RunFolder, recipe: Recipe, execution: Execution) -> list[Path]:
    """Measures every runtime of the recipe that can run here, and returns the files it wrote.

    Raises:
        RuntimeUnavailableError: none of the recipe's runtimes can run on this machine.
        RunFolderError: an artefact is missing or was edited.
    """
    plan = folder.read_plan()
    heads = _query_heads(folder)
    variants = folder.variants(recipe.variants)
    facts = {v: _facts(folder, plan, v, heads) for v in variants}
    usable, reasons = _usable(recipe)
    for reason in reasons:
        execution.say(f"bench: {reason}")
    if not usable:
        raise RuntimeUnavailableError(
            "None of this run's engines can be executed here.\n" + "\n".join(reasons),
            "Copy the run folder to a machine with the device, or add --runtime onnxruntime.",
        )
    quality = _quality(folder, recipe, usable, facts, execution)
    write_json(folder.engine_quality_path, quality)
    written = [folder.engine_quality_path]
    for name, runtime in usable.items():
        engines = _engines(folder, recipe, name)
        loaders = {v: functools.partial(runtime.load, engine, execution) for v, engine in engines.items()}
        measured = bench(
            loaders,
            engines,
            facts,
            recipe.bench,
            execution,
            parity=_parity(folder, recipe, engines[variants[0]], loaders, execution),
            recipe_sha256=recipe.sha256,
            observe=lambda cells: execution.table(variants, live_rows(cells)),
        )
        written += write_bench(folder, name, measured)
    try:
        write_report(folder)
    except RuntimeUnavailableError as error:
        execution.say(f"report.html was not written: {error.message} {error.remedy}")
    return written


def bench_engines(
    files: Sequence[Path | EngineFile],
    section: BenchSection,
    execution: Execution,
    held_out: CalibrationSet | None = None,
) -> BenchReport:
    """Measures engines of one runtime against each other.

    Args:
        files: engines, their sidecars, or graphs, which are built as the first engine was, beside the graph. The first
            is the reference, ``dense`` by convention.
        section: workloads, rounds, seed.
        execution: told what is done.
        held_out: text for the quality of every engine (``extra["quality"]``); None: not measured.

    Raises:
        RecipeError: no files, several runtimes, or a variant twice; no workload fits the engines.
        RunFolderError: the graph that an engine was built from is gone.
    """
    engines = _by_variant(files, execution)
    one = next(iter(engines.values()))
    graphs = {variant: _graph(engine) for variant, engine in engines.items()}
    facts = {variant: read_facts(graph) for variant, graph in graphs.items()}
    runtime = runtimes.RUNTIMES[one.runtime]
    loaders = {v: functools.partial(runtime.load, engine, execution) for v, engine in engines.items()}
    quality = {}
    if held_out is not None:
        longest = int(one.flags["max_tokens"])
        quality = {"quality": engine_quality(loaders, held_out, section.eval_tokens, longest, execution)}
    parity = agreements(loaders, graphs, one, facts[one.variant].dtype, section.seed, execution)
    return replace(bench(loaders, engines, facts, section, execution, parity=parity), extra=quality)


def write_bench(folder: RunFolder, runtime: str, measured: BenchReport) -> list[Path]:
    """Writes the figures of one runtime, and the profile of every engine whose layers were timed."""
    report = measured.to_json()
    report["summary"] = summary_cells(report)
    write_json(folder.bench_path(runtime), report)
    written = [folder.bench_path(runtime)]
    for variant, found in measured.footprints.items():
        if found.profile is not None:
            files = folder.layers_path(runtime, variant), folder.profile_path(runtime, variant)
            write_layers(*files, found.profile)
            written += files
    return written


def _facts(folder: RunFolder, plan: PrunePlan, variant: str, query_heads: int | None) -> VariantFacts:
    source = float_variant(variant)
    blocks = plan.num_blocks if source == "dense" else len(plan.kept)
    made_by = "quantize" if variant != source else "export" if variant == "dense" else "surgery"
    graph = folder.require(folder.graph_path(variant), made_by)
    return read_facts(graph, blocks, query_heads)


def _query_heads(folder: RunFolder) -> int | None:
    """Query heads of a block from the model's config; None leaves attention out of the FLOPs."""
    config = folder.model_path / "config.json"
    found = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    heads = (found.get("text_config") or found).get("num_attention_heads")
    return heads if isinstance(heads, int) else None


def _usable(recipe: Recipe) -> tuple[dict[str, Runtime], list[str]]:
    usable, reasons = {}, []
    for name in recipe.build.runtimes:
        found = runtimes.RUNTIMES[name].availability()
        if found.run:
            usable[name] = runtimes.RUNTIMES[name]
        else:
            reasons.append(f"{name} engines are not measured: {found.reason}")
    return usable, reasons


def _engines(folder: RunFolder, recipe: Recipe, runtime: str) -> dict[str, EngineFile]:
    named = folder.variants(recipe.variants)
    return {v: read_sidecar(folder.require(folder.sidecar_path(runtime, v), "build engine")) for v in named}


def _quality(
    folder: RunFolder,
    recipe: Recipe,
    usable: Mapping[str, Runtime],
    facts: Mapping[str, VariantFacts],
    execution: Execution,
) -> dict[str, Any]:
    """Perplexity, KL and top-1 of the engines of every usable runtime; the first one is the run's headline."""
    _, held_out = load_calibration(folder.require(folder.calibration_path, "calibrate"))
    by_runtime = {}
    for name, runtime in usable.items():
        engines = _engines(folder, recipe, name)
        loaders = {v: functools.partial(runtime.load, engine, execution) for v, engine in engines.items()}
        by_runtime[name] = engine_quality(
            loaders, held_out, recipe.bench.eval_tokens, recipe.build.max_tokens, execution
        )
    first = next(iter(by_runtime))
    sizes = {
        v: {"blocks": f.blocks, "parameters": f.parameters, "weight_bytes": f.weight_bytes} for v, f in facts.items()
    }
    return {"runtime": first, **by_runtime[first], "sizes": sizes, "runtimes": by_runtime}


def _parity(
    folder: RunFolder, recipe: Recipe, engine: EngineFile, loaders: Loaders, execution: Execution
) -> dict[str, bool]:
    """Variant -> whether its graph agreed with PyTorch (the verify stage) and its engine agrees with the graph."""
    reports = folder.read_parity()
    graphs = {variant: folder.graph_path(variant) for variant in loaders}
    agreed = agreements(loaders, graphs, engine, recipe.model.dtype, recipe.bench.seed, execution)
    return {v: agrees and bool(reports.get(v, {}).get("passed", False)) for v, agrees in agreed.items()}


def _by_variant(files: Sequence[Path | EngineFile], execution: Execution) -> dict[str, EngineFile]:
    known = [file if isinstance(file, EngineFile) else _sidecar(file) for file in files]
    built = [engine for engine in known if engine is not None]
    names = {engine.runtime for engine in built} or {runtimes.default_runtime()[0]}
    if not known or len(names) > 1:
        raise RecipeError(
            f"The engines of one benchmark are of one runtime, not of {len(names) if known else 0}.",
            "Call it once for each runtime.",
        )
    runtime = names.pop()
    settings = BuildSection.model_validate({**(built[0].flags if built else {}), "runtimes": (runtime,)})
    engines: dict[str, EngineFile] = {}
    for file, engine in zip(files, known, strict=True):
        if engine is None:
            assert isinstance(file, Path)
            target = runtimes.engine_path(file, runtime)
            engine = runtimes.build_engine(runtime, file, target, file.stem, settings, execution)
        if engine.variant in engines:
            raise RecipeError(f"Two engines are called {engine.variant!r}.", "Name their graphs differently.")
        engines[engine.variant] = engine
    return engines


def _sidecar(file: Path) -> EngineFile | None:
    """The engine that ``file`` belongs to; None for a graph."""
    return None if file.suffix == ".onnx" and not file.with_suffix(".json").exists() else read_sidecar(file)


def _graph(engine: EngineFile) -> Path:
    graph = engine.path.parent / str(engine.extra.get("graph"))
    if not graph.is_file():
        raise RunFolderError(f"{graph}, the graph that {engine.path} was built from, is missing.", "Build it again.")
    return graph
