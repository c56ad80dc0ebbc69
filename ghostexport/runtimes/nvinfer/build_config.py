"""Build settings on a TensorRT builder config: each is probed in the vendor module, and refused clearly when absent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ghostexport.errors import BuildError, RecipeError
from ghostexport.execution import Execution
from ghostexport.files import write_bytes
from ghostexport.recipe import BuildSection
from ghostexport.runtimes.interface import Interface

#: Settings that are one builder flag.
_FLAGS = {
    "version_compatible": "VERSION_COMPATIBLE",
    "weight_streaming": "WEIGHT_STREAMING",
    "strip_plan": "STRIP_PLAN",
}


def creation_flags(trt: Any) -> int:
    """Network creation flags: strongly typed wherever the release still asks for it."""
    if hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"):
        return 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    return 0


def allow_decomposition(trt: Any, network: Any) -> int:
    """Lets fused attention fall back to its parts where no kernel fits its dtype and shapes; returns their number.

    Graphs of opset 23 have such layers, and no fused kernel exists for float32, for example.
    """
    count = 0
    if hasattr(trt.LayerType, "ATTENTION_INPUT"):
        for index in range(network.num_layers):
            attention_input = network.get_layer(index)
            if attention_input.type == trt.LayerType.ATTENTION_INPUT:
                attention_input.__class__ = trt.IAttentionInputLayer  # bindings hand out the base class
                attention = attention_input.attention
                attention.decomposable = True
                count += 1
    return count


def refuse(trt: Any, title: str, settings: BuildSection) -> None:
    """Raises RecipeError for a setting that this release does not know."""
    for name, flag in _FLAGS.items():
        if getattr(settings, name) and not hasattr(trt.BuilderFlag, flag):
            raise _unsupported(trt, title, name, f"it has no builder flag {flag}")
    level = _member(settings.hardware_compatibility)
    if not hasattr(trt.HardwareCompatibilityLevel, level):
        raise _unsupported(trt, title, "hardware_compatibility", f"it has no level {settings.hardware_compatibility}")
    if settings.compute_capability:
        if not hasattr(trt, "ComputeCapability"):
            raise _unsupported(trt, title, "compute_capability", "it builds for the GPU it runs on")
        names = {name for name in dir(trt.ComputeCapability) if name.startswith("SM")} | {"CURRENT"}
        for target in settings.compute_capability:
            if target not in names:
                raise _unsupported(trt, title, "compute_capability", f"it has {', '.join(sorted(names))}, not {target}")
        if "CURRENT" in settings.compute_capability and len(settings.compute_capability) > 1:
            raise _unsupported(trt, title, "compute_capability", "CURRENT stands alone")


def configure(
    trt: Any, config: Any, network: Any, settings: BuildSection, execution: Execution, interface: Interface
) -> dict[str, Any]:
    """Applies ``settings``; returns facts worth keeping in the sidecar."""
    for name, flag in _FLAGS.items():
        if getattr(settings, name):
            config.set_flag(getattr(trt.BuilderFlag, flag))
    if settings.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace << 20)
    if settings.hardware_compatibility != "none":
        level = getattr(trt.HardwareCompatibilityLevel, _member(settings.hardware_compatibility))
        config.hardware_compatibility_level = level
    if settings.opt_level is not None:
        config.builder_optimization_level = settings.opt_level
    if settings.compute_capability and hasattr(trt, "ComputeCapability"):
        config.num_compute_capabilities = len(settings.compute_capability)
        for index, target in enumerate(settings.compute_capability):
            if not config.set_compute_capability(getattr(trt.ComputeCapability, target), index):
                raise BuildError(f"The target {target} is refused.", "See --compute-capability.")
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    facts: dict[str, Any] = {"tf32": bool(config.get_flag(trt.BuilderFlag.TF32))}
    if settings.refittable or settings.strip_plan:
        facts["refittable"] = _refittable(trt, config, network, interface, settings)
    if execution.timing_cache is not None:
        _load_timing_cache(config, execution.timing_cache)
    return facts


def _refittable(trt: Any, config: Any, network: Any, interface: Interface, settings: BuildSection) -> list[str]:
    """Marks what may be refitted; returns the names, or ``["*"]`` when the release can only mark all weights."""
    if settings.strip_plan and not settings.refittable:
        config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)
        return ["*"]
    if hasattr(trt.BuilderFlag, "REFIT_INDIVIDUAL") and not settings.strip_plan:
        config.set_flag(trt.BuilderFlag.REFIT_INDIVIDUAL)
        for name in interface.spliced:
            if not network.mark_weights_refittable(name):
                raise BuildError(f"Weights {name} cannot be made refittable.", "Build without --refittable.")
        return list(interface.spliced)
    config.set_flag(trt.BuilderFlag.REFIT)
    return ["*"]


def _load_timing_cache(config: Any, path: Path) -> None:
    cache = config.create_timing_cache(path.read_bytes() if path.exists() else b"")
    if not config.set_timing_cache(cache, False):
        raise BuildError(
            f"Timing cache {path} is of another TensorRT version or GPU.", "Delete it, or give another --timing-cache."
        )


def save_timing_cache(config: Any, execution: Execution) -> None:
    """Writes the config's timing cache back, extended by the build."""
    if execution.timing_cache is not None:
        write_bytes(execution.timing_cache, bytes(config.get_timing_cache().serialize()))


def _member(name: str) -> str:
    return name.upper().replace("-", "_")


def _unsupported(trt: Any, title: str, name: str, why: str) -> RecipeError:
    return RecipeError(f"build.{name} is not supported by {title} {trt.__version__}: {why}.", "Remove the option.")
