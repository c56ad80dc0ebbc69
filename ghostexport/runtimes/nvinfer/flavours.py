"""The two flavours of the vendor's library, each imported here and nowhere else.

TensorRT 10 and 11 (data centre, workstation, Jetson) need a GPU to build; TensorRT-RTX (GeForce, RTX PCs) builds ahead
of time without one and makes its kernels on the user's machine.
"""

from __future__ import annotations

from typing import Any

from ghostexport.errors import RecipeError
from ghostexport.execution import Execution
from ghostexport.recipe import BuildSection
from ghostexport.runtimes.gpu import Gpu, find_gpu
from ghostexport.runtimes.interface import Interface
from ghostexport.runtimes.nvinfer.builder import NvInfer


class TensorRTRTX(NvInfer):
    """The ``tensorrt_rtx`` module."""

    name = "tensorrt-rtx"
    title = "TensorRT-RTX"
    trtexec = "tensorrt_rtx"

    def vendor(self) -> Any:
        try:
            import tensorrt_rtx
        except ModuleNotFoundError as error:
            if error.name != "tensorrt_rtx":
                raise
            import tensorrt_rtx_bindings  # what wheels give without the meta package

            return tensorrt_rtx_bindings
        return tensorrt_rtx

    def why_not_here(self, trt: Any, gpu: Gpu) -> str | None:
        if hasattr(trt.ComputeCapability, gpu.sm):
            return None
        targets = ", ".join(name for name in dir(trt.ComputeCapability) if name.startswith("SM"))
        return f"{gpu.name} is {gpu.sm}, TensorRT-RTX has only {targets}; use tensorrt"

    def refuse(self, settings: BuildSection, interface: Interface, execution: Execution) -> None:
        """What 1.7 does not do: each was seen to fail deep inside the library with a misleading message."""
        if settings.version_compatible:
            raise RecipeError(
                "build.version_compatible is not supported by TensorRT-RTX: it ships no lean runtime.",
                "Remove the option.",
            )
        if execution.timing_cache is not None:
            raise RecipeError("TensorRT-RTX has no timing cache: it times nothing at build time.", "Remove the option.")
        if isinstance(find_gpu(), Gpu):
            return
        for name in ("refittable", "strip_plan"):
            if getattr(settings, name):
                raise RecipeError(
                    f"build.{name} needs a GPU at build time with TensorRT-RTX, and there is none here.",
                    "Build on the machine that will run the engine, or remove the option.",
                )
        if "CURRENT" in settings.compute_capability:
            raise RecipeError(
                "build.compute_capability CURRENT means the GPU of this machine, and there is none here.",
                "Name the targets, such as SM86, SM89 or SM120.",
            )


class TensorRT(NvInfer):
    """The ``tensorrt`` module."""

    name = "tensorrt"
    title = "TensorRT"

    def vendor(self) -> Any:
        import tensorrt

        return tensorrt
