"""Building with TensorRT and TensorRT-RTX: one code path, the vendor module is passed in as ``trt``.

Every release from 10.0 to 11.x and RTX has the names used here, or a probe (``hasattr``) stands before them; a test
checks that against listings of the releases. Networks are strongly typed, so the graph alone decides the dtypes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ghostexport.errors import BuildError, RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.files import atomic_path, require_space, sha256_file
from ghostexport.operators import OperatorSet
from ghostexport.recipe import BuildSection
from ghostexport.runtimes.base import Availability, EngineFile
from ghostexport.runtimes.building import PeakMemory, refuse_foreign, refuse_forms
from ghostexport.runtimes.cuda_device import open_device
from ghostexport.runtimes.gpu import Cuda, Gpu, find_gpu
from ghostexport.runtimes.interface import Interface, read_interface
from ghostexport.runtimes.nvinfer import build_config, engine_loading
from ghostexport.runtimes.nvinfer.diagnosis import capture_log, explain
from ghostexport.runtimes.nvinfer.engine_loading import why_not_loadable
from ghostexport.runtimes.nvinfer.nv_session import NvSession
from ghostexport.runtimes.nvinfer.profiles import Profile, plan_profiles, require_capacity, trtexec_lines
from ghostexport.runtimes.sidecar import record_build, remove_leftovers, require_intact

#: Host memory a build needs, as a multiple of the weights' bytes (reports of TensorRT-Edge-LLM users: three to four).
_MEMORY_FACTOR = 4


class NvInfer:
    """A TensorRT flavour. Subclasses hold the differences: the module, where it runs, what it refuses.

    Attributes:
        name: as in the registry.
        title: as the vendor spells it.
        trtexec: the vendor's command that builds and times an engine.
    """

    name = ""
    title = ""
    trtexec = "trtexec"

    def vendor(self) -> Any:
        """Imports the vendor module."""
        raise NotImplementedError

    def why_not_here(self, trt: Any, gpu: Gpu) -> str | None:
        """Why this flavour cannot run on ``gpu``; None when it can."""
        return None

    def refuse(self, settings: BuildSection, interface: Interface, execution: Execution) -> None:
        """Raises RecipeError for settings that this flavour is known not to support."""

    def availability(self) -> Availability:
        try:
            trt = self.module()
        except RuntimeUnavailableError as error:
            return Availability(False, False, f"{error.message} {error.remedy}")
        logger = capture_log(trt)
        try:
            trt.Builder(logger)
        except (TypeError, RuntimeError) as error:
            known = explain(f"{logger.text}\n{error}")
            return Availability(False, False, "; ".join(known) if known else str(error), trt.__version__)
        gpu = find_gpu()
        if isinstance(gpu, str):
            return Availability(True, False, f"builds engines; cannot run them: {gpu}", trt.__version__)
        obstacle = self.why_not_here(trt, gpu) or _torch_obstacle()
        if obstacle:
            return Availability(True, False, f"builds engines; cannot run them: {obstacle}", trt.__version__)
        return Availability(True, True, f"{gpu.name} ({gpu.compute_capability})", trt.__version__)

    def module(self) -> Any:
        """The vendor module.

        Raises:
            RuntimeUnavailableError: it cannot be imported; the message says what is missing.
        """
        try:
            return self.vendor()
        except (ImportError, OSError) as error:
            meaning, _ = explain(str(error)) or (str(error), "")
            raise RuntimeUnavailableError(
                f"{self.title} cannot be imported: {meaning}.", f"pip install 'ghostexport[{self.name}]'"
            ) from error

    def build(
        self, graph: Path, target: Path, variant: str, settings: BuildSection, execution: Execution
    ) -> EngineFile:
        """See :class:`Runtime`. Split profiles make ``target.prefill.engine`` and ``target.decode.engine``."""
        trt = self.module()
        refuse_foreign(self.name, settings)
        interface = read_interface(graph)
        if interface.capacity is not None:
            require_capacity(settings, interface.capacity)
        profiles = plan_profiles(settings, interface.inputs)
        self.refuse(settings, interface, execution)
        build_config.refuse(trt, self.title, settings)
        here = find_gpu()
        devices = settings.compute_capability or ((here.sm,) if isinstance(here, Gpu) else ())
        refuse_forms(self.name, graph, interface, devices, trt.__version__)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        require_space(target.parent, interface.weight_bytes, f"the {variant} engine")
        execution.say(_estimate(f"{self.title} {trt.__version__}: {variant}", interface))
        network_name = f"{variant}|{sha256_file(graph)[:16]}"
        started = time.perf_counter()
        parts = _plans(target, profiles, settings)
        facts: dict[str, Any] = {}
        with contextlib.ExitStack() as stack, PeakMemory() as memory:
            for path, part in parts.items():
                work = _Work(trt, self.title, graph, interface, network_name, settings, execution)
                work.prepare(part)
                work.serialise(stack.enter_context(atomic_path(path)))
                facts = work.facts
        gpu = find_gpu()
        extra = facts | {
            "trtexec": trtexec_lines(self.trtexec, graph, parts, interface.inputs, settings),
            "network_name": network_name,
            "build_peak_bytes": memory.nbytes,
            "kv_capacity": interface.capacity,
        }
        return record_build(
            graph,
            interface,
            settings,
            list(parts),
            extra,
            runtime=self.name,
            version=trt.__version__,
            variant=variant,
            device=vars(gpu) if isinstance(gpu, Gpu) else {"name": None, "reason": gpu},
            profiles={wanted.name: wanted.shapes(interface.inputs) for wanted in profiles},
            build_seconds=round(time.perf_counter() - started, 3),
            plan_bytes=sum(path.stat().st_size for path in parts),
        )

    def load(self, engine: EngineFile, execution: Execution) -> NvSession:
        """See :class:`Runtime`."""
        trt = self.module()
        gpu = find_gpu()
        if isinstance(gpu, str):
            raise RuntimeUnavailableError(f"{self.title} cannot run {engine.path}: {gpu}.", "Run: ghostexport doctor")
        reason = why_not_loadable(engine, self.name, trt.__version__, gpu) or self.why_not_here(trt, gpu)
        if reason:
            raise RuntimeUnavailableError(
                f"{engine.path} cannot be loaded: {reason}.",
                f"Build it here: ghostexport build engine MODEL -o RUN --runtime {self.name}",
            )
        require_intact(engine)
        return NvSession(trt, self.title, engine, Cuda() if find_spec("torch") else open_device())

    def swap(self, engine: EngineFile, operators: OperatorSet, target: Path, execution: Execution) -> EngineFile:
        """See :class:`Runtime`. Needs a GPU: the engine is refitted in device memory and serialised again."""
        return engine_loading.swap(self.module(), self.title, engine, operators, target)


class _Work:
    """One plan: parse, check, configure, build. The captured log belongs to every error it raises."""

    def __init__(
        self,
        trt: Any,
        title: str,
        graph: Path,
        interface: Interface,
        network_name: str,
        settings: BuildSection,
        execution: Execution,
    ) -> None:
        self.trt, self.title, self.graph, self.interface = trt, title, graph, interface
        self.network_name, self.settings, self.execution = network_name, settings, execution
        self.logger = capture_log(trt)
        self.facts: dict[str, Any] = {}
        self._alive: list[Any] = []  # a parser owns weights that the network refers to until the build ends

    def prepare(self, profiles: Sequence[Profile]) -> None:
        """Parses the graph and sets up network, config and profiles."""
        trt = self.trt
        try:
            builder = trt.Builder(self.logger)
        except (TypeError, RuntimeError) as error:
            meaning, remedy = explain(f"{self.logger.text}\n{error}") or (str(error), "Run: ghostexport doctor")
            raise RuntimeUnavailableError(f"{self.title} cannot create a builder: {meaning}.", remedy) from error
        network = self._parse(builder)
        config = builder.create_builder_config()
        self.facts |= build_config.configure(trt, config, network, self.settings, self.execution, self.interface)
        for wanted in profiles:
            profile = builder.create_optimization_profile()
            try:
                for name, (low, opt, high) in wanted.shapes(self.interface.inputs).items():
                    profile.set_shape(name, low, opt, high)
                added = config.add_optimization_profile(profile)
            except (RuntimeError, ValueError, TypeError) as error:
                raise self._error(f"profile {wanted.name} is refused: {error}") from error
            if added < 0:
                raise self._error(f"profile {wanted.name} is refused")
        self._builder, self._network, self._config = builder, network, config

    def serialise(self, path: Path) -> None:
        """Builds into ``path``: streamed where this release can, so that the plan is never in memory twice."""
        trt, builder, network, config = self.trt, self._builder, self._network, self._config
        with path.open("wb") as file:
            writer = _stream_writer(trt, file)
            if writer is not None and hasattr(builder, "build_serialized_network_to_stream"):
                done = builder.build_serialized_network_to_stream(network, config, writer)
                if writer.error is not None:
                    raise writer.error
            else:
                plan = builder.build_serialized_network(network, config)
                done = plan is not None
                if done:
                    file.write(plan)
        build_config.save_timing_cache(config, self.execution)
        if not done or path.stat().st_size == 0:
            raise self._error("the builder returned no plan")

    def _parse(self, builder: Any) -> Any:
        trt = self.trt
        network = builder.create_network(build_config.creation_flags(trt))
        parser = trt.OnnxParser(network, self.logger)
        self._alive.append(parser)
        if not parser.parse_from_file(str(self.graph)):
            errors = [_describe(parser.get_error(i)) for i in range(parser.num_errors)]
            raise self._error("the parser refuses the graph:\n" + "\n".join(errors))
        network.name = self.network_name
        inputs = [network.get_input(i).name for i in range(network.num_inputs)]
        if inputs != [t.name for t in self.interface.inputs]:
            raise self._error(f"the parser made other inputs than the graph has: {inputs}")
        layers = [network.get_layer(i).name for i in range(network.num_layers)]
        missing = sorted(set(self.interface.spliced_nodes) - set(layers))
        if missing:
            raise self._error(f"the parser lost the operator's layers {missing}")
        self.facts = {
            "network_layers": len(layers),
            "fused_attention": build_config.allow_decomposition(trt, network),
            "operator_layers": list(self.interface.spliced_nodes),
            "operator_weights": {name: list(shape) for name, shape in self.interface.spliced.items()},
        }
        return network

    def _error(self, problem: str) -> BuildError:
        text = f"{problem}\n{self.logger.text}"
        known = explain(text)
        message = f"{self.title} cannot build {self.graph}: {known[0] + '; ' if known else ''}{problem}"
        return BuildError(message, known[1] if known else "The builder's log is above.", log=self.logger.text)


def _plans(target: Path, profiles: Sequence[Profile], settings: BuildSection) -> dict[Path, list[Profile]]:
    """Plan file -> its profiles, in order."""
    if settings.profiles != "split":
        return {target.with_name(f"{target.name}.engine"): list(profiles)}
    return {
        target.with_name(f"{target.name}.{kind}.engine"): [p for p in profiles if p.name.startswith(kind)]
        for kind in ("prefill", "decode")
    }


def _stream_writer(trt: Any, file: Any) -> Any:
    """A vendor stream writer onto ``file``; None where the release has none."""
    if not hasattr(trt, "IStreamWriter"):
        return None

    class Writer(trt.IStreamWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)
            self.error: OSError | None = None

        def write(self, data: bytes) -> int:
            # an exception must not cross the library's C++ frames: a short write stops the build
            try:
                return int(file.write(data))
            except OSError as error:
                self.error = error
                return 0

    return Writer()


def _describe(parser_error: Any) -> str:
    node = f"node {parser_error.node()} {parser_error.node_name()!r} ({parser_error.node_operator()})"
    position = f"{parser_error.func()} at {parser_error.file()}:{parser_error.line()}"
    return f"  {node}: {parser_error.desc()} [{parser_error.code()}, {position}]"


def _estimate(what: str, interface: Interface) -> str:
    import psutil

    need, have = _MEMORY_FACTOR * interface.weight_bytes, psutil.virtual_memory().available
    verdict = "" if need < have else " - likely too little: add swap or build elsewhere"
    single = " (a float32 graph makes a float32 engine)" if interface.dtype == "float32" else ""
    return (
        f"{what}, {interface.weight_bytes / 1e6:.0f} MB of {interface.dtype} weights{single}; the build needs about "
        f"{need / 1e9:.1f} GB of host memory, {have / 1e9:.1f} GB are free{verdict}"
    )


def _torch_obstacle() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return "torch here is a CPU build; install one with CUDA" if version("torch").endswith("+cpu") else None
    except PackageNotFoundError:
        try:
            version("cuda-bindings")
        except PackageNotFoundError:
            return "neither torch nor cuda-bindings is installed: pip install cuda-bindings"
        return None
