"""Runtimes: ways to build and run engines. The registry, which one is best here, and what works and why."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ghostexport.errors import GhostExportError, RecipeError, RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.operators import load_operators
from ghostexport.quantization.targets import refusal
from ghostexport.recipe import BuildSection
from ghostexport.runtimes.base import EngineFile, Runtime, Session
from ghostexport.runtimes.building import refuse_foreign
from ghostexport.runtimes.interface import read_interface
from ghostexport.runtimes.nvinfer.flavours import TensorRT, TensorRTRTX
from ghostexport.runtimes.ort.onnxruntime import OnnxRuntime
from ghostexport.runtimes.sidecar import is_current, read_sidecar, require_intact
from ghostexport.validation import require_name

#: All runtimes, best first.
RUNTIMES: dict[str, Runtime] = {
    "tensorrt": TensorRT(),
    "tensorrt-rtx": TensorRTRTX(),
    "onnxruntime": OnnxRuntime(),
}


def doctor() -> list[tuple[str, bool, bool, str, str]]:
    """``(name, build, run, version, reason)`` of every runtime, each reason one line."""
    rows = []
    for name, runtime in RUNTIMES.items():
        found = runtime.availability()
        rows.append((name, found.build, found.run, found.version, " ".join(found.reason.split())))
    return rows


def default_runtime() -> tuple[str, str]:
    """The best runtime that can build and run here, and the reason.

    Raises:
        RuntimeUnavailableError: none can.
    """
    rejected: list[str] = []
    for name, build, run, version, reason in doctor():
        if build and run:
            why = f"{version}, {reason}"
            return name, f"{why}; {'; '.join(rejected)}" if rejected else why
        rejected.append(f"not {name}: {reason}")
    raise RuntimeUnavailableError("No runtime can build and run engines here.", "\n".join(rejected))


def current_engine(runtime: Runtime, graph: Path, target: Path, settings: BuildSection) -> EngineFile | None:
    """The engine at ``target`` when building ``graph`` with ``settings`` would make it again, else None.

    Raises:
        RunFolderError: it is current, but one of its files was edited.
    """
    try:
        engine = read_sidecar(target.with_name(f"{target.name}.json"))
    except GhostExportError:
        return None  # missing or unreadable: build it
    version = runtime.availability().version
    if not is_current(engine, version, graph, read_interface(graph).data_files, settings):
        return None
    require_intact(engine)
    return engine


def engine_path(graph: Path, runtime: str) -> Path:
    """Where an engine of a graph outside a run folder goes, without its suffix."""
    return graph.parent / "engines" / runtime / graph.stem


def require_buildable(name: str, settings: BuildSection, forms: Iterable[str] = ()) -> None:
    """Refuses before any work what a runtime cannot build here.

    Args:
        name: of the runtime.
        settings: of the builds.
        forms: that the variants' weights take.

    Raises:
        RecipeError: unknown runtime, or a setting or form that it, or a target device, does not support.
        RuntimeUnavailableError: it cannot build on this machine.
    """
    runtime = RUNTIMES[require_name(name, RUNTIMES, "runtime")]
    refuse_foreign(name, settings)
    for form in forms:
        if (reason := refusal(form, name, settings.compute_capability)) is not None:
            raise RecipeError(
                f"{name} engines with {form} weights cannot be built: {reason}", "Name another --quantize."
            )
    found = runtime.availability()
    if not found.build:
        raise RuntimeUnavailableError(f"{name} cannot build engines here.", found.reason)


def build_engine(
    name: str, graph: Path, target: Path, variant: str, settings: BuildSection, execution: Execution
) -> EngineFile:
    """The engine of ``graph`` at ``target`` (without suffix): the one that is there where it is current, else built.

    Raises:
        RecipeError: unknown runtime, or a setting that it does not support.
        RunFolderError: the engine is current, but one of its files was edited.
        GhostExportError: as :meth:`Runtime.build`.
    """
    runtime = RUNTIMES[require_name(name, RUNTIMES, "runtime")]
    found = current_engine(runtime, graph, target, settings)
    return found or runtime.build(graph, target, variant, settings, execution)


def load_engine(path: Path, execution: Execution) -> tuple[EngineFile, Session]:
    """Reads the sidecar of an engine and opens a session on it."""
    engine = read_sidecar(path)
    require_name(engine.runtime, RUNTIMES, "runtime")
    return engine, RUNTIMES[engine.runtime].load(engine, execution)


def swap_operator(
    engine: Path, operators: Path, target: Path | None = None, execution: Execution | None = None
) -> EngineFile:
    """Puts other operators into a built engine without a rebuild.

    Args:
        engine: an engine file or its sidecar.
        operators: an operator file of the same plan.
        target: path of the new engine without suffix; by default beside the old one, named after the operators.
        execution: how to run.

    Raises:
        BuildError: the engine is not refittable, or the operators do not fit.
    """
    old = read_sidecar(engine)
    require_name(old.runtime, RUNTIMES, "runtime")
    new = load_operators(operators)
    return RUNTIMES[old.runtime].swap(old, new, target or old.path.with_name(new.name), execution or Execution())
