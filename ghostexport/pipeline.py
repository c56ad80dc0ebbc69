"""The pipeline: the stages in order, what each reads and writes, and :func:`run`. Start reading here.

::

    calibrate ─▶ select ─▶ recover ─┐
    export ─────────────────────────┴─▶ surgery ─▶ quantize ─▶ verify ─▶ build ─▶ bench

Stages hand each other files in a run folder, never objects: each can be run alone, is skipped when it is current, and
resumes after a crash. A stage is a function ``(RunFolder, Recipe, Execution) -> the files it wrote``.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ghostexport.errors import GhostExportError, RecipeError, RunFolderError
from ghostexport.execution import Execution
from ghostexport.files import write_bytes, write_json
from ghostexport.manifest import versions_of
from ghostexport.recipe import Recipe, float_variant, parse_recipe, read_recipe
from ghostexport.resolution import loaded_of, resolve, resolve_machine, source_of
from ghostexport.runfolder import Outside, RunFolder

if TYPE_CHECKING:
    from ghostexport.models import LoadedModel


@dataclass(frozen=True)
class Stage:
    """One step of the pipeline.

    Attributes:
        name: also the verb of the command line.
        run: does the work and returns the files it wrote.
        needs: earlier stages whose files it reads.
        sections: recipe sections that change its files.
        packages: installed packages whose version changes its files.
    """

    name: str
    run: Callable[[RunFolder, Recipe, Execution], list[Path]]
    needs: tuple[str, ...]
    sections: tuple[str, ...]
    packages: tuple[str, ...]

    def needed(self, recipe: Recipe) -> list[str]:
        """Those of ``needs`` that run with this recipe."""
        return [need for need in self.needs if need != QUANTIZE or recipe.quantize.format]


def calibrate(folder: RunFolder, recipe: Recipe, execution: Execution) -> list[Path]:
    """Draws token windows for calibration and, from other documents, held-out windows."""
    from ghostexport import calibration, models

    tokenizer = models.load_tokenizer(source_of(recipe, execution), recipe.model.trust_remote_code)
    drawn, held_out = calibration.draw(recipe.calibration, tokenizer, execution)
    return [calibration.save(folder.calibration_path, drawn, held_out)]


def select(folder: RunFolder, recipe: Recipe, execution: Execution) -> list[Path]:
    """Chooses the spans to remove, or takes the ones in the recipe; may gather what ``recover`` needs on the way."""
    from ghostexport import calibration
    from ghostexport.recovery import gathered_file
    from ghostexport.selection.choosing import select_and_gather

    folder.statistics_path.unlink(missing_ok=True)
    loaded = loaded_of(recipe, execution)
    drawn, _ = calibration.load(folder.calibration_path)
    execution = replace(execution, scratch=folder.path)
    plan, gathered = select_and_gather(loaded, drawn, recipe.select, recipe.recover, execution)
    if folder.checkpoints_path.exists():  # of an earlier plan, or of another model
        shutil.rmtree(folder.checkpoints_path)
    write_json(folder.plan_path, plan.to_json())
    if gathered is None:
        return [folder.plan_path]
    try:
        gathered_file.save(folder.statistics_path, loaded, drawn, gathered)
    except RunFolderError as error:  # a convenience: recover makes its own pass without it
        execution.say(f"select: the statistics for recover were not kept. {error.message}")
        return [folder.plan_path]
    return [folder.plan_path, folder.statistics_path]


def recover(folder: RunFolder, recipe: Recipe, execution: Execution) -> list[Path]:
    """Fits one operator per boundary and variant from streamed moments of the dense model."""
    from ghostexport import calibration, models
    from ghostexport.recovery import gathered_file
    from ghostexport.recovery.recover import recover as fit_operators
    from ghostexport.recovery.recover import shareable

    plan = folder.read_plan()
    loaded = loaded_of(recipe, execution)
    drawn, held_out = calibration.load(folder.calibration_path)
    request = shareable(recipe.recover, len(plan.removed))
    gathered = gathered_file.load(folder.statistics_path, loaded, drawn, plan, request) if request else None
    if gathered is None:
        execution.say("recover: own pass over the calibration set (select left no statistics that serve it)")
    else:
        execution.say("recover: no own pass over the calibration set (select gathered the statistics in its pass)")
    execution = replace(execution, scratch=folder.path)
    sets = fit_operators(loaded, plan, drawn, held_out, recipe.recover, execution, gathered)
    written = []
    for name, operators in sets.items():
        write_bytes(folder.operators_path(name), operators.to_bytes())
        written.append(folder.operators_path(name))
        if not operators.adds_nodes:  # an ordinary model with fewer blocks: for any runtime that reads checkpoints
            written += models.save_model(models.patch(loaded, plan, operators), folder.checkpoints_path / name)
    return written


def export(folder: RunFolder, recipe: Recipe, execution: Execution) -> list[Path]:
    """Exports the dense model once, with KV cache, and what whoever runs its graphs needs beside weights."""
    from ghostexport import exporters, models

    name, reason = exporters.choose_exporter(recipe.export.exporter)
    execution.say(f"exporter: {name} ({reason})")
    loaded = loaded_of(recipe, execution)
    graph = folder.graph_path("dense")
    exporters.export_model(loaded.model, graph, exporter=name, opset=recipe.export.opset, execution=execution)
    described = models.save_description(loaded, folder.model_path)
    return [graph, graph.with_name(f"{graph.name}.data"), *described]


def surgery(folder: RunFolder, recipe: Recipe, execution: Execution) -> list[Path]:
    """Derives every other variant from the dense graph: blocks cut out, operator spliced in."""
    from ghostexport.surgery import operate

    plan = folder.read_plan()
    written = []
    for done, variant in enumerate(recipe.float_variants[1:]):
        execution.progress("surgery", done, len(recipe.float_variants) - 1)
        graph, operators = folder.graph_path(variant), folder.read_operators(variant)
        if operators is not None:
            own, reason = operators.dtype_in(recipe.model.dtype)
            if own != recipe.model.dtype:
                execution.say(f"surgery: the operator of {variant} computes in {own} ({reason})")
        report = operate(folder.graph_path("dense"), plan, operators, graph)
        write_json(folder.surgery_path(variant), report.to_json())
        written += [graph, folder.surgery_path(variant)]
        data = graph.with_name(f"{graph.name}.data")
        written += [data] if data.exists() else []
    return written


def quantize(folder: RunFolder, recipe: Recipe, execution: Execution) -> list[Path]:
    """Derives the quantised variants from the float graphs, scales weighted by what each graph sees itself."""
    from ghostexport import calibration
    from ghostexport.quantization.inputs import measure_inputs
    from ghostexport.quantization.writer import quantize_graph

    settings = recipe.quantize.settings
    written: list[Path] = []
    drawn, _ = calibration.load(folder.calibration_path)
    for source in dict.fromkeys(map(float_variant, recipe.quantized_variants)):
        graph = folder.graph_path(source)
        with tempfile.TemporaryDirectory(prefix=".inputs.", dir=graph.parent) as grams:
            inputs = None
            if settings.needs_inputs:
                seen = functools.partial(execution.progress, f"quantize: what {source} sees")
                inputs = measure_inputs(graph, drawn.tokens, seen, Path(grams) if settings.rounding == "gptq" else None)
            for variant in (name for name in recipe.quantized_variants if float_variant(name) == source):
                output, form = folder.graph_path(variant), variant.rpartition(".")[2]
                progress = functools.partial(execution.progress, f"quantize: {variant}")
                report = quantize_graph(graph, output, form, settings, inputs=inputs, progress=progress)
                written += [output, output.with_name(f"{output.name}.data"), folder.quantization_path(variant)]
                execution.say(f"quantize: {variant}: {report.summary}")
    return written


def verify(folder: RunFolder, recipe: Recipe, execution: Execution) -> list[Path]:
    """Compares every graph on ONNX Runtime with the PyTorch model changed the same way."""
    from ghostexport import models, verification
    from ghostexport.models.rounding import round_weights

    plan = folder.read_plan()
    verification.remove_leftovers(folder.graph_path("dense").parent)
    dense, references = loaded_of(recipe, execution), {}
    for done, variant in enumerate(recipe.variants):
        execution.progress("verify: PyTorch", done, len(recipe.variants))
        source = float_variant(variant)
        model = (dense if source == "dense" else models.patch(dense, plan, folder.read_operators(variant))).model
        if variant != source:
            model = round_weights(model, folder.graph_path(source), folder.graph_path(variant))
        references[variant] = verification.refer(model, folder.graph_path(variant))
    del dense, model  # a graph is opened where no model is in memory
    reports = {}
    for done, variant in enumerate(recipe.variants):
        execution.progress("verify: graphs", done, len(recipe.variants))
        reports[variant] = references.pop(variant).verify(folder.graph_path(variant), variant).to_json()
    write_json(folder.parity_path, reports)
    return [folder.parity_path]


def evaluate(folder: RunFolder, recipe: Recipe, execution: Execution) -> list[Path]:
    """Measures the quality of every variant on PyTorch and ONNX Runtime."""
    from ghostexport.evaluation.eval_run import eval_run

    plan = folder.read_plan()
    loaded = loaded_of(recipe, execution)
    sets = {name: folder.read_operators(name) for name in recipe.recover.operators}
    return eval_run(folder, recipe, loaded, plan, {n: s for n, s in sets.items() if s is not None}, execution)


def build(folder: RunFolder, recipe: Recipe, execution: Execution) -> list[Path]:
    """Builds one engine per runtime and variant; engines that are current are kept."""
    from ghostexport import runtimes

    written: list[Path] = []
    variants = folder.variants(recipe.variants)
    for name in recipe.build.runtimes:
        for done, variant in enumerate(variants):
            execution.progress(f"build {name}", done, len(variants))
            graph, target = folder.graph_path(variant), folder.engine_path(name, variant)
            written += runtimes.build_engine(name, graph, target, variant, recipe.build, execution).files
    return written


def bench(folder: RunFolder, recipe: Recipe, execution: Execution) -> list[Path]:
    """Measures quality and speed of every engine that can run here."""
    from ghostexport.benchmarking.bench_run import bench_run

    return bench_run(folder, recipe, execution)


#: The stage that is left out where a recipe names no format.
QUANTIZE = "quantize"

STAGES = (
    Stage("calibrate", calibrate, (), ("model", "calibration"), ("transformers", "tokenizers")),
    Stage("select", select, ("calibrate",), ("model", "select"), ("torch", "transformers")),
    Stage("recover", recover, ("calibrate", "select"), ("model", "recover"), ("torch", "transformers", "numpy")),
    Stage("export", export, (), ("model", "export"), ("torch", "transformers", "onnxscript", "onnx-ir")),
    Stage("surgery", surgery, ("select", "recover", "export"), ("model", "recover"), ("onnx-ir",)),
    Stage(
        QUANTIZE,
        quantize,
        ("calibrate", "export", "surgery"),
        ("recover", "quantize"),
        ("numpy", "onnx-ir", "onnxruntime"),
    ),
    Stage("verify", verify, ("select", "recover", "export", "surgery", QUANTIZE), ("model",), ("torch", "onnxruntime")),
    Stage(
        "eval",
        evaluate,
        ("calibrate", "select", "recover", "export", "surgery", QUANTIZE),
        ("model", "recover", "eval"),
        ("torch", "transformers", "onnxruntime", "lm-eval"),
    ),
    Stage("build", build, ("export", "surgery", QUANTIZE, "verify"), ("recover", "build"), ()),
    Stage("bench", bench, ("calibrate", "build"), ("recover", "build", "bench"), ("onnxruntime",)),
)


#: Goal beside the stages: `recover` writes a folded variant as a checkpoint.
CHECKPOINT = "checkpoint"


def run(recipe: Recipe, folder: RunFolder, execution: Execution | None = None, goal: str = "build") -> None:
    """Runs ``goal`` and every stage it needs that is not current.

    Args:
        recipe: what to do; written to ``recipe.yaml`` with all defaults; runtimes, dtype and ``best`` resolved.
        folder: where.
        execution: how.
        goal: name of the last stage wanted, or ``checkpoint``: every variant an ordinary checkpoint, nothing exported.

    Raises:
        GhostExportError: any of :mod:`ghostexport.errors`; finished stages are kept.
    """
    execution, asked = execution or Execution(), list(recipe.recover.operators)
    building = "build" in {stage.name for stage in _wanted(goal, recipe)}
    recipe = _as_resolved_before(resolve_machine(recipe, execution, building), folder, execution)
    recipe, loaded = resolve(recipe, execution, fitting=goal not in ("calibrate", "export"))
    with folder.lock():
        write_bytes(folder.recipe_path, recipe.to_yaml().encode())
        wanted = _wanted(goal, recipe)
        early = [stage for stage in wanted if stage.name in ("calibrate", "select")]
        if len(early) == 2 and not all(_is_current(stage, folder, recipe, execution) for stage in early):
            preflight(recipe, execution, goal, loaded)
        del loaded
        for stage in wanted:
            _run_stage(stage, folder, recipe, execution)
        if asked != list(recipe.recover.operators) and "recover" in {stage.name for stage in wanted}:
            folder.note("recover", asked=asked)


def _as_resolved_before(recipe: Recipe, folder: RunFolder, execution: Execution) -> Recipe:
    """With what ``best`` stood for when ``recover`` ran, where that is current: the model need not be looked at."""
    entry = folder.manifest()["stages"].get("recover", {})
    if entry.get("asked") != list(recipe.recover.operators) or not folder.recipe_path.is_file():
        return recipe
    operators = parse_recipe(read_recipe(folder.recipe_path)).recover.operators
    before = recipe.model_copy(update={"recover": recipe.recover.model_copy(update={"operators": operators})})
    (recover_stage,) = (stage for stage in STAGES if stage.name == "recover")
    return before if _is_current(recover_stage, folder, before, execution) else recipe


def preflight(recipe: Recipe, execution: Execution, goal: str, loaded: LoadedModel | None = None) -> None:
    """Refuses, before a token is drawn, what a stage on the way to ``goal`` would refuse of this model and machine.

    ``loaded`` is the recipe's model where the caller holds it.

    Raises:
        GhostExportError: as that stage; the message says what works instead.
    """
    from ghostexport import exporters, runtimes
    from ghostexport.recovery.recover import require_folded, require_operators

    names = {stage.name for stage in _wanted(goal, recipe)}
    if goal == CHECKPOINT:
        require_folded(recipe.recover)
    if "build" in names:
        for name in recipe.build.runtimes:
            runtimes.require_buildable(name, recipe.build, recipe.quantize.format)
    loaded = loaded or loaded_of(recipe, execution)
    require_operators(loaded, recipe.recover, recipe.select.spans, recipe.calibration.sequences)
    if "export" in names:
        asked = recipe.build.runtimes if "build" in names else ()
        exporters.require_exportable(loaded.model, recipe.export.exporter, asked)


def _is_current(stage: Stage, folder: RunFolder, recipe: Recipe, execution: Execution) -> bool:
    return folder.is_current(stage.name, *_depends_on(stage, folder, recipe), _outside(stage, recipe, execution))


def _depends_on(stage: Stage, folder: RunFolder, recipe: Recipe) -> tuple[str, list[Path], dict[str, str]]:
    """Hash of the stage's sections, the files it reads, and the versions of its packages."""
    inputs = [path for need in stage.needed(recipe) for path in folder.outputs(need)]
    return recipe.section_sha256(stage.sections), inputs, versions_of(stage.packages)


def _run_stage(stage: Stage, folder: RunFolder, recipe: Recipe, execution: Execution) -> None:
    if _is_current(stage, folder, recipe, execution):
        execution.say(f"{stage.name}: current, kept")
        return
    sections, inputs, versions = _depends_on(stage, folder, recipe)
    _require_capacity(stage.name, folder, recipe, execution)
    folder.forget(stage.name)
    started = time.monotonic()
    outputs, seconds = stage.run(folder, recipe, execution), time.monotonic() - started
    folder.record(stage.name, sections, inputs, outputs, versions, seconds, _outside(stage, recipe, execution))
    execution.say(f"{stage.name}: done in {seconds:.1f} s")


def _require_capacity(stage: str, folder: RunFolder, recipe: Recipe, execution: Execution) -> None:
    try:
        from ghostexport.models.shape import read_shape
        from ghostexport.sizing import capacity
        from ghostexport.sizing.estimate import require_capacity

        shape = read_shape(source_of(recipe, execution), recipe.model.trust_remote_code)
    except (ImportError, GhostExportError, OSError):  # no model here, as on a device
        return
    machine = capacity.measure_machine(folder.path, execution.device)
    require_capacity(stage, shape, recipe, machine, execution.device, execution.say)


def _wanted(goal: str, recipe: Recipe) -> list[Stage]:
    if goal == QUANTIZE and not recipe.quantize.format:
        raise RecipeError("No format to quantise to is named.", "Give --format int4 (or int8, fp8, mxfp8, nvfp4).")
    by_name = {stage.name: stage for stage in STAGES}
    wanted: set[str] = set()
    frontier = ["recover" if goal == CHECKPOINT else goal]
    while frontier:
        name = frontier.pop()
        wanted.add(name)
        frontier += by_name[name].needed(recipe)
    return [stage for stage in STAGES if stage.name in wanted]


def _outside(stage: Stage, recipe: Recipe, execution: Execution) -> Outside:
    """The files of the model, and of tuned weights, that the stage reads; None where there are none, as on a device."""

    def files() -> dict[str, Path] | None:
        try:
            from ghostexport import models

            folders = {"model": source_of(recipe, execution)} if "model" in stage.sections else {}
            if stage.name == "recover" and recipe.recover.weights is not None:
                folders["weights"] = Path(recipe.recover.weights)
            weighty = stage.name != "calibrate"  # it reads the tokenizer
            every = ((role, path) for role, place in folders.items() for path in models.source_files(place, weighty))
            return {f"{role}/{path.name}": path for role, path in every}
        except (ImportError, GhostExportError, OSError):
            return None

    return files
