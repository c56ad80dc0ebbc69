"""From a model to graphs and engines: export, surgery, verify, build, bench."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from ghostexport.api.options import (
    BenchOptions,
    BuildOptions,
    ExportOptions,
    File,
    Plan,
    drawn_of,
    held_out_of,
    operators_of,
    options_of,
    path_of,
    plan_of,
)
from ghostexport.errors import RecipeError
from ghostexport.execution import Execution
from ghostexport.operators import OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import BenchSection, BuildSection, ExportSection

if TYPE_CHECKING:
    from ghostexport.benchmarking.result import BenchReport
    from ghostexport.calibration import CalibrationSet, Tokens
    from ghostexport.exporters.graph_file import OnnxGraphFile
    from ghostexport.models import LoadedModel
    from ghostexport.quantization.writer import QuantizationReport
    from ghostexport.recipe import QuantizeSection
    from ghostexport.runtimes.base import EngineFile
    from ghostexport.surgery.surgery_report import SurgeryReport
    from ghostexport.verification import ParityReport


@options_of(ExportSection(), ExportOptions)
def export(
    model: LoadedModel,
    output: str | Path,
    *,
    execution: Execution | None = None,
    **options: Unpack[ExportOptions],
) -> OnnxGraphFile:
    """Exports a model with its KV cache as ``output`` and ``output.data``; see :func:`exporters.export_model`.

    Args:
        output: path of the graph; its name without suffix is the variant's name (``dense.onnx``).
        options: of :class:`ExportSection`.

    Raises:
        ExportError: the exporter failed (its error is chained).
        RuntimeUnavailableError: the exporter is not installed.
    """
    from ghostexport.exporters import export_model

    section = ExportSection.model_validate(options)
    return export_model(model.model, Path(output), exporter=section.exporter, opset=section.opset, execution=execution)


def surgery(
    graph: File,
    change: OperatorSet | Plan | str | Path | None,
    output: str | Path,
    *,
    weights: str | Path | None = None,
    drop: bool = False,
    self_contained: bool = False,
    kv_pattern: str | Iterable[str] | None = None,
    dry_run: bool = False,
) -> SurgeryReport:
    """Cuts blocks out of an exported graph and splices operators in; see :func:`ghostexport.surgery.operate`.

    A graph that was cut before is cut further. Operators for all its cuts, in blocks of the dense model, take the place
    of those it has; spans and plans may also count the blocks that are left, and then its operators stay.

    Args:
        graph: ONNX file of a decoder, of any producer.
        change: operators (a set, or a file of one) with the plan they repair; or a plan or spans, for a bare cut.
            With ``weights``, spans or None: which blocks the checkpoint lacks is found by its weights. With ``drop``
            None removes nothing more.
        output: the new ONNX file.
        weights: checkpoint folder of the model without some blocks, trained elsewhere, to put into the graph.
        drop: take the operators out that earlier surgery put in; :func:`read_operators` gives them.
        self_contained: give it a data file of its own in the graph's folder too.
        kv_pattern: templates of unusual KV names, such as ``cache_k_{}``.
        dry_run: do everything but write.

    Returns:
        what was changed, and ``path``.

    Raises:
        SurgeryError: the graph cannot be cut as asked; nothing was written.
    """
    from ghostexport.surgery import inspect_graph, operate

    path = path_of(graph)
    pattern = kv_pattern if isinstance(kv_pattern, str) else ",".join(kv_pattern or ()) or None
    operators: OperatorSet | None = None
    plan: PrunePlan | None = None
    if weights is not None:
        if isinstance(change, OperatorSet | str | Path):
            raise RecipeError("Operators and weights are both given.", "Give spans, or None, with weights.")
        operators = _tuned(path, Path(weights), None if change is None else change, pattern)
        plan = operators.plan
    elif isinstance(change, OperatorSet | str | Path):
        operators = operators_of(change)
        plan = operators.plan
    elif change is None and not drop:
        raise RecipeError("Nothing to do.", "Give operators, a plan or spans, weights, or drop.")
    elif change is not None:
        plan = change if isinstance(change, PrunePlan) else plan_of(change, inspect_graph(path, pattern).num_blocks)
    target, own = Path(output), self_contained
    return operate(path, plan, operators, target, drop=drop, self_contained=own, kv_pattern=pattern, dry_run=dry_run)


def quantize(
    graph: File,
    output: str | Path,
    form: str = "int4",
    *,
    calibration: Tokens | CalibrationSet | str | Path | None = None,
    settings: QuantizeSection | None = None,
    execution: Execution | None = None,
) -> QuantizationReport:
    """Quantises a graph; see :func:`ghostexport.quantization.writer.quantize_graph`.

    Args:
        graph: ONNX file of a float decoder, of any producer.
        output: the new ONNX file; its report lies beside it.
        form: ``int4``, ``int8``, ``fp8``, ``mxfp8`` or ``nvfp4``.
        calibration: tokens, or a run's file of them; the search is weighted by what the graph sees on them.
        settings: all but its ``format``; rounded activations need ``calibration``.

    Raises:
        RecipeError: an unknown form, or settings that it has no kernels for.
        SurgeryError: nothing to quantise, quantised already, or a block that does not divide.
    """
    from ghostexport.calibration import load
    from ghostexport.quantization.inputs import measure_inputs
    from ghostexport.quantization.writer import quantize_graph
    from ghostexport.recipe import QuantizeSection

    execution, path = execution or Execution(), path_of(graph)
    how = (settings or QuantizeSection()).settings
    progress = functools.partial(execution.progress, f"quantize: {form}")
    with tempfile.TemporaryDirectory(prefix="ghostexport-inputs-") as grams:
        inputs = None
        if calibration is not None:
            drawn = load(Path(calibration)) if isinstance(calibration, str | Path) else calibration
            seen = functools.partial(execution.progress, "quantize: inputs")
            folder = Path(grams) if how.rounding == "gptq" else None
            inputs = measure_inputs(path, drawn_of(drawn).tokens, seen, folder)
        return quantize_graph(path, Path(output), form, how, inputs=inputs, progress=progress)


def convert(graph: File, output: str | Path) -> Path:
    """Rewrites a graph quantised by others so that every runtime reads it, exactly.

    Args:
        graph: ONNX file with ``MatMulNBits``, or with blocks under an opset that has none (ModelOpt).
        output: the new ONNX file.

    Raises:
        SurgeryError: it cannot be rewritten exactly, or has nothing to rewrite.
    """
    from ghostexport.quantization.conversion import convert_graph

    convert_graph(path_of(graph), Path(output))
    return Path(output)


def split(graph: File, output: str | Path) -> tuple[Path, Path]:
    """Takes the token embedding out of a graph; see :func:`ghostexport.surgery.embedding.split_embedding`.

    Args:
        graph: ONNX file of a decoder, of any producer, cut and quantised or not.
        output: folder of the two new graphs.

    Returns:
        the decoder, which takes ``inputs_embeds``, and the graph that makes them from ``input_ids``.

    Raises:
        SurgeryError: the decoder uses token ids for more than one lookup.
    """
    from ghostexport.surgery.embedding import split_embedding

    path, folder = path_of(graph), Path(output)
    decoder, embedding = (folder / f"{path.stem}-{part}.onnx" for part in ("decoder", "embedding"))
    split_embedding(path, decoder, embedding)
    return decoder, embedding


def _tuned(graph: Path, folder: Path, change: Plan | None, pattern: str | None) -> OperatorSet:
    """The weights of a checkpoint, for a graph that holds what they were before."""
    from ghostexport.models import load_model
    from ghostexport.models.foreign import near_operators, plan_of_kept
    from ghostexport.models.reweighting import all_weights
    from ghostexport.surgery import inspect_graph, kept_of

    cut = load_model(folder, "float32", Execution(device="cpu"))
    if change is not None:
        return near_operators(cut, plan_of(change, inspect_graph(graph, pattern).num_blocks))
    if cut.operators is not None:
        return near_operators(cut, cut.operators.plan)
    count, kept = kept_of(graph, all_weights(cut.model), str(folder), pattern)
    return near_operators(cut, plan_of_kept(count, kept))


def verify(model: Any, graph: File, variant: str | None = None, tokens: Any = None) -> ParityReport:
    """Compares a graph on ONNX Runtime with the PyTorch model changed the same way; see :mod:`verification`.

    Args:
        model: a loaded model, or one of transformers.
        graph: ONNX decoder.
        variant: name for the report; default: the file's.
        tokens: ``(2, >= 25)`` token ids to use instead of random ones.

    Raises:
        ParityError: an output differs by more than the tolerance; names output, metric and tolerance.
        RuntimeUnavailableError: onnxruntime is missing, or cannot run the graph.
    """
    from ghostexport.models import LoadedModel
    from ghostexport.verification import verify

    path = path_of(graph)
    return verify(model.model if isinstance(model, LoadedModel) else model, path, variant or path.stem, tokens)


@options_of(BuildSection(), BuildOptions)
def build(
    graph: File,
    output: str | Path | None = None,
    *,
    runtime: str | None = None,
    execution: Execution | None = None,
    **options: Unpack[BuildOptions],
) -> EngineFile:
    """Builds an engine of a graph; one that is current is kept.

    Args:
        graph: ONNX decoder; its name without suffix is the variant's name.
        output: path of the engine without suffix; default: ``engines/RUNTIME/`` beside the graph.
        runtime: ``onnxruntime``, ``tensorrt`` or ``tensorrt-rtx``; default: the best one usable here.
        options: of :class:`BuildSection`.

    Raises:
        RecipeError: unknown runtime, or an option that it lacks.
        RuntimeUnavailableError: the runtime cannot build here.
        BuildError: the builder failed; its log is attached.
    """
    from ghostexport import runtimes

    path = path_of(graph)
    name = runtime or runtimes.default_runtime()[0]
    section = BuildSection.model_validate({**options, "runtimes": (name,)})
    target = runtimes.engine_path(path, name) if output is None else Path(output)
    return runtimes.build_engine(name, path, target, path.stem, section, execution or Execution())


@options_of(BenchSection(), BenchOptions)
def bench(
    engines: Iterable[File],
    *,
    tokens: Tokens | CalibrationSet | None = None,
    execution: Execution | None = None,
    **options: Unpack[BenchOptions],
) -> BenchReport:
    """Measures engines of one runtime against each other; the first is what the others are compared with.

    Args:
        engines: from :func:`build`, their files, or graphs, which are built as the engines are.
        tokens: held-out text to measure every engine's quality on (``report.extra["quality"]``); None: not measured.
        options: of :class:`BenchSection`.

    Raises:
        RecipeError: engines of several runtimes or of one name; no workload fits them.
        RuntimeUnavailableError: the runtime cannot run here.
    """
    from ghostexport.benchmarking.bench_run import bench_engines
    from ghostexport.runtimes.base import EngineFile

    section = BenchSection.model_validate(options)
    held_out = None if tokens is None else held_out_of(tokens)
    files = [file if isinstance(file, EngineFile) else path_of(file) for file in engines]
    return bench_engines(files, section, execution or Execution(), held_out)
