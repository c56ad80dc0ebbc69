"""Loading plans, after their sidecar was checked against this machine, and refitting them with other operators."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ghostexport.errors import BuildError, RuntimeUnavailableError
from ghostexport.files import atomic_path
from ghostexport.operators import OperatorSet
from ghostexport.runtimes.base import EngineFile
from ghostexport.runtimes.gpu import Gpu
from ghostexport.runtimes.interface import operator_weights
from ghostexport.runtimes.nvinfer.diagnosis import capture_log, explain
from ghostexport.runtimes.sidecar import record_swap, require_intact


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


def swap(trt: Any, title: str, engine: EngineFile, operators: OperatorSet, target: Path) -> EngineFile:
    """Writes every plan of ``engine`` with ``operators`` in it as ``target.*engine``. Needs a GPU.

    Raises:
        BuildError: the engine is not refittable, or the operators do not fit it.
        RuntimeUnavailableError: the plan cannot be loaded here.
    """
    refittable = engine.extra.get("refittable", [])
    if not refittable:
        raise BuildError(
            f"{engine.path} was not built refittable, so its operators are fixed.",
            "Build it again with --refittable.",
        )
    require_intact(engine)
    spliced = {name: tuple(shape) for name, shape in engine.extra["operator_weights"].items()}
    weights = operator_weights(spliced, operators, engine.path)
    stem = engine.sidecar.name.removesuffix(".json")
    new = {name: target.with_name(target.name + name.removeprefix(stem)) for name in engine.sha256}
    for name, path in new.items():
        with atomic_path(path) as temporary:
            temporary.write_bytes(_refit(trt, title, engine.path.with_name(name), weights))
    return record_swap(engine, operators, list(new.values()), sum(path.stat().st_size for path in new.values()))


def _refit(trt: Any, title: str, plan: Path, weights: dict[str, NDArray[Any]]) -> bytes:
    logger = capture_log(trt)
    runtime = create_runtime(trt, title, logger)
    cuda_engine = load_plan(trt, title, plan, logger, runtime)
    refitter = trt.Refitter(cuda_engine, logger)
    alive = []  # Weights do not copy: the arrays must live until the refit is done
    for name, array in weights.items():
        values, kept = _weights(trt, array, refitter.get_weights_prototype(name).dtype)
        alive.append(kept)
        if not refitter.set_named_weights(name, values):
            raise BuildError(f"{plan} refuses new weights for {name}.", "Build it with --refittable.", log=logger.text)
    missing = _missing(refitter.get_missing_weights())
    if missing:
        raise BuildError(
            f"{plan} wants more weights than the operators: {missing}.", "Build it again.", log=logger.text
        )
    if not refitter.refit_cuda_engine():
        raise BuildError(f"{title} cannot refit {plan}.", "Build the variant instead.", log=logger.text)
    serialization = cuda_engine.create_serialization_config()
    if hasattr(trt.SerializationFlag, "INCLUDE_REFIT"):
        serialization.set_flag(trt.SerializationFlag.INCLUDE_REFIT)  # the result can be swapped again
    serialised = cuda_engine.serialize_with_config(serialization)
    if serialised is None:
        raise BuildError(
            f"{title} cannot serialise the refitted {plan}.", "Build the variant instead.", log=logger.text
        )
    return bytes(serialised)


def _weights(trt: Any, array: NDArray[Any], dtype: Any) -> tuple[Any, NDArray[Any]]:
    """Vendor weights in the engine's dtype, and the array that owns their memory."""
    import ml_dtypes

    types = {trt.float32: np.float32, trt.float16: np.float16, trt.bfloat16: ml_dtypes.bfloat16}
    if dtype not in types:
        raise BuildError(
            f"The engine's operator has dtype {dtype}; only float types can be swapped.", "Build the variant."
        )
    values = np.ascontiguousarray(array.astype(types[dtype]))
    return trt.Weights(dtype, values.ctypes.data, values.size), values


def _missing(names: Iterable[Any]) -> list[str]:
    return [str(name) for name in names or ()]
