"""Loading plans: the sidecar is checked against this machine first, so that a mismatch is one clear message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ghostexport.errors import RuntimeUnavailableError
from ghostexport.runtimes.base import EngineFile
from ghostexport.runtimes.diagnosis import explain
from ghostexport.runtimes.gpu import Gpu


def why_not_loadable(engine: EngineFile, runtime: str, version: str, gpu: Gpu) -> str | None:
    """Why this machine should not load ``engine``, by its sidecar alone; None when nothing speaks against it.

    Args:
        engine: the sidecar.
        runtime, version: the runtime that would load it.
        gpu: the GPU it would run on.
    """
    if engine.runtime != runtime:
        return f"it was built for {engine.runtime}, not for {runtime}"
    built, have = _numbers(engine.version), _numbers(version)
    if engine.flags["version_compatible"]:
        if have < built:
            return f"it was built with version {engine.version}, which is newer than {version} here"
    elif built != have:
        return f"it was built with version {engine.version}, here is {version}"
    targets = engine.flags["compute_capability"]
    if targets and targets != ["CURRENT"]:
        if gpu.sm not in targets:
            return f"it was built for {', '.join(targets)}, this GPU is {gpu.sm}"
    elif engine.runtime == "tensorrt" or targets:
        capability = engine.device.get("compute_capability")
        ampere = engine.flags["hardware_compatibility"] == "ampere-plus" and _numbers(gpu.compute_capability) >= (8, 0)
        if capability != gpu.compute_capability and not ampere:
            return f"it was built on compute capability {capability}, this GPU has {gpu.compute_capability}"
    driver = engine.device.get("driver")
    if driver is not None and _numbers(driver)[0] > _numbers(gpu.driver)[0]:
        return f"it was built with CUDA driver {driver}, this driver supports only {gpu.driver}"
    return None


def create_runtime(trt: Any, title: str, logger: Any) -> Any:
    """The vendor's runtime object.

    Raises:
        RuntimeUnavailableError: there is no GPU or driver.
    """
    try:
        return trt.Runtime(logger)
    except (TypeError, RuntimeError) as error:
        meaning, remedy = explain(f"{logger.text}\n{error}") or (str(error), "Run: ghostexport doctor")
        raise RuntimeUnavailableError(f"{title} cannot start: {meaning}.", remedy) from error


def load_plan(trt: Any, title: str, plan: Path, logger: Any, runtime: Any) -> Any:
    """Deserialises a plan; ``runtime`` must outlive the result.

    Raises:
        RuntimeUnavailableError: this machine or version cannot load it; the log is in the message.
    """
    cuda_engine = runtime.deserialize_cuda_engine(plan.read_bytes())
    if cuda_engine is None:
        meaning, remedy = explain(logger.text) or ("the library refuses it", "Build the engine again on this machine.")
        raise RuntimeUnavailableError(f"{title} cannot load {plan}: {meaning}.\n{logger.text}", remedy)
    return cuda_engine


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
