"""TensorRT 10 and 11: data-centre GPUs, workstations and Jetson. Needs a GPU to build as well as to run."""

from __future__ import annotations

from typing import Any

from ghostexport.runtimes.nvinfer import NvInfer


class TensorRT(NvInfer):
    """The ``tensorrt`` module."""

    name = "tensorrt"
    title = "TensorRT"

    def vendor(self) -> Any:
        import tensorrt

        return tensorrt
