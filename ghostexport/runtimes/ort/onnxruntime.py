"""ONNX Runtime: an engine is the offline-optimised graph; its untouched weights are the graph's own data files."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from ghostexport.errors import BuildError, RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.files import require_space
from ghostexport.operators import OperatorSet
from ghostexport.recipe import BuildSection
from ghostexport.runtimes.base import Availability, EngineFile
from ghostexport.runtimes.building import PeakMemory, refuse_foreign, refuse_forms
from ghostexport.runtimes.interface import Interface, read_interface
from ghostexport.runtimes.ort import engine_files
from ghostexport.runtimes.ort.ort_session import OrtSession
from ghostexport.runtimes.sidecar import record_build, remove_leftovers, require_intact

#: Our provider names, best first, and ONNX Runtime's.
PROVIDERS = {
    "tensorrt": "TensorrtExecutionProvider",
    "nv-tensorrt-rtx": "NvTensorRTRTXExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "cpu": "CPUExecutionProvider",
}

#: Larger results of constant folding stay unfolded: a tied head would be the embedding once more, transposed, in every
#: engine. The extended level makes its Transpose and MatMul one FusedMatMul; a provider folds what is left on loading.
_LARGEST_FOLD = 1 << 20


class OnnxRuntime:
    """Builds and runs with whichever ``onnxruntime`` wheel is installed."""

    name = "onnxruntime"

    def availability(self) -> Availability:
        try:
            ort = _import()
        except RuntimeUnavailableError as error:
            return Availability(False, False, f"{error.message} {error.remedy}")
        names = ", ".join(installed_providers(ort))
        return Availability(True, True, f"providers: {names}", ort.__version__)

    def build(
        self, graph: Path, target: Path, variant: str, settings: BuildSection, execution: Execution
    ) -> EngineFile:
        """See :class:`Runtime`. The optimised graph holds no vendor kernels when a GPU provider will run it."""
        ort = _import()
        refuse_foreign(self.name, settings)
        interface = read_interface(graph)
        engine = target.with_name(f"{target.name}.onnx")
        if engine.absolute() == graph.absolute():
            raise BuildError(f"The engine would overwrite its own graph {graph}.", "Choose another folder.")
        chosen = choose_providers(ort, settings, execution)
        _refuse(graph, interface, chosen)
        engine.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        require_space(engine.parent, interface.weight_bytes, f"optimising {graph.name}")
        level = "extended" if chosen == ("cpu",) else "basic"
        execution.say(f"onnxruntime {ort.__version__}: {variant}, providers {', '.join(chosen)}, {level} optimisation")
        started = time.perf_counter()
        with (
            tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=engine.parent) as folder,
            PeakMemory() as memory,
        ):
            optimised = _optimise(ort, graph, Path(folder), level)
            files = engine_files.write_sharing(optimised, graph, engine)
        return record_build(
            graph,
            interface,
            settings,
            files,
            {"optimisation": level, "build_peak_bytes": memory.nbytes},
            runtime=self.name,
            version=ort.__version__,
            variant=variant,
            device={"providers": list(chosen)},
            profiles={},
            build_seconds=round(time.perf_counter() - started, 3),
            plan_bytes=engine_files.engine_bytes(engine),
        )

    def load(self, engine: EngineFile, execution: Execution) -> OrtSession:
        """See :class:`Runtime`. An automatic provider that does not start is reported, then the next is tried."""
        ort = _import()
        require_intact(engine)
        explicit = bool(engine.flags["providers"])
        settings = BuildSection(providers=tuple(engine.flags["providers"]))
        candidates = choose_providers(ort, settings, execution)
        for position, first in enumerate(candidates):
            chain = candidates[position:] if candidates[-1] == "cpu" else (*candidates[position:], "cpu")
            options = ort.SessionOptions()
            options.log_severity_level = 3
            try:
                session = ort.InferenceSession(
                    str(engine.path), options, providers=[_with_options(name, engine) for name in chain]
                )
                session.disable_fallback()
                started = session.get_providers()[0] == PROVIDERS[first]
                problem = "it fell back to another provider"
            except Exception as error:
                started, problem = False, str(error)
            if started:
                execution.say(f"onnxruntime runs {engine.variant} with the {first} provider")
                return OrtSession(ort, session, engine.path, engine.inputs, engine.outputs, first)
            if explicit or position == len(candidates) - 1:
                raise RuntimeUnavailableError(
                    f"ONNX Runtime's {first} provider cannot run {engine.path}: {problem}",
                    "Install the provider's libraries and driver, or build again with --provider cpu.",
                )
            execution.say(f"onnxruntime's {first} provider did not start ({problem}); trying the next")
        raise RuntimeUnavailableError("ONNX Runtime has no provider.", "pip install 'ghostexport[cpu]'")

    def swap(self, engine: EngineFile, operators: OperatorSet, target: Path, execution: Execution) -> EngineFile:
        """See :class:`Runtime`. Every engine is swappable: the operators are initializers with public names."""
        require_intact(engine)
        return engine_files.swap(engine, operators, target)


def installed_providers(ort: Any) -> tuple[str, ...]:
    """Our names of the providers of this wheel, best first."""
    have = ort.get_available_providers()
    return tuple(ours for ours, theirs in PROVIDERS.items() if theirs in have)


def choose_providers(ort: Any, settings: BuildSection, execution: Execution) -> tuple[str, ...]:
    """Providers to run with, best first: those asked for, else the installed ones that suit ``execution.device``.

    Raises:
        RuntimeUnavailableError: one that was asked for is not in this wheel.
    """
    installed = installed_providers(ort)
    for name in settings.providers:
        if name not in installed:
            raise RuntimeUnavailableError(
                f"ONNX Runtime {ort.__version__} here has no {name} provider, only {', '.join(installed)}.",
                "pip install 'ghostexport[gpu]' (after removing onnxruntime), or choose another provider.",
            )
    if settings.providers:
        return settings.providers
    return ("cpu",) if execution.device == "cpu" else installed


def open_graph(graph: Path, exact: bool = True, lean: bool = False) -> OrtSession:
    """A session on a graph as it is, on the CPU provider: for comparing numbers, not speed.

    Args:
        graph: an ONNX decoder.
        exact: multiply by quantised weights in float32; an engine's kernels round the inputs to eight bits before.
        lean: run the nodes as they stand; no weight is held a second time, rearranged or widened. For a few calls.

    Raises:
        BuildError: the graph is not a decoder with KV inputs and outputs that pair up.
        RuntimeUnavailableError: onnxruntime is missing, or lacks a kernel or operator of the graph.
    """
    ort, interface = _import(), read_interface(graph)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if exact:
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if lean:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False  # both keep what a node took
        options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        session = ort.InferenceSession(str(graph), options, providers=[PROVIDERS["cpu"]])
    except Exception as error:
        explained = _explain(graph, str(error))
        raise RuntimeUnavailableError(
            f"ONNX Runtime {ort.__version__} cannot run {graph} on the CPU: {error}", explained.remedy
        ) from error
    return OrtSession(ort, session, graph, interface.inputs, interface.outputs, "cpu")


def _import() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"onnxruntime cannot be imported: {error}.", "pip install 'ghostexport[cpu]' (or [gpu])."
        ) from error
    if not hasattr(onnxruntime, "InferenceSession"):
        raise RuntimeUnavailableError("onnxruntime is damaged: it has no InferenceSession.", "Reinstall it.")
    return onnxruntime


def _refuse(graph: Path, interface: Interface, providers: tuple[str, ...]) -> None:
    """Raises BuildError for a graph that the providers cannot run."""
    if interface.capacity is not None:
        raise BuildError(
            f"{graph.name} updates its KV cache in place; this project runs such graphs on TensorRT only.",
            "Build it with --runtime tensorrt or tensorrt-rtx, or export with a growing cache.",
        )
    refuse_forms(OnnxRuntime.name, graph, interface, ())
    if providers == ("cpu",) and interface.dtype == "bfloat16":
        raise BuildError(
            f"{graph.name} is bfloat16, and ONNX Runtime's CPU provider has no bfloat16 kernels.",
            "Build it with --runtime tensorrt-rtx, use a GPU provider, or export with --dtype float32.",
        )


def _optimise(ort: Any, graph: Path, folder: Path, level: str) -> Path:
    """Lets ONNX Runtime write the optimised graph into ``folder``, weights in a data file of their own."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_EXTENDED if level == "extended" else levels.ORT_ENABLE_BASIC
    optimised = folder / "optimised.onnx"
    options.optimized_model_filepath = str(optimised)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimised.data")
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", str(_LARGEST_FOLD))
    try:
        ort.InferenceSession(str(graph), options, providers=[PROVIDERS["cpu"]])
    except Exception as error:
        raise _explain(graph, str(error)) from error
    return optimised


def _explain(graph: Path, raw: str) -> BuildError:
    if "Could not find an implementation" in raw:
        remedy = "This wheel lacks a kernel for that operator and dtype: use another provider, or export in float32."
    elif "is not a registered function/op" in raw or "No Op registered for" in raw:
        remedy = "This onnxruntime does not know an operator of the graph: update it, or export with a lower opset."
    else:
        remedy = "Check the graph with: ghostexport verify"
    return BuildError(f"ONNX Runtime cannot optimise {graph}.", remedy, log=raw)


def _with_options(provider: str, engine: EngineFile) -> tuple[str, dict[str, str]]:
    cache = str(engine.path.with_suffix(".cache"))
    options = {
        "tensorrt": {"trt_engine_cache_enable": "True", "trt_engine_cache_path": cache},
        "nv-tensorrt-rtx": {"nv_runtime_cache_path": cache},
    }
    return PROVIDERS[provider], options.get(provider, {})
