"""The layers of an engine and their times, from the vendor's inspector and profiler."""

from __future__ import annotations

import json
from typing import Any


def layer_information(trt: Any, cuda_engine: Any, context: Any) -> dict[str, Any]:
    """The inspector's JSON, ``{"Layers": [...], "Bindings": [...]}``, for the shapes that ``context`` is bound to."""
    inspector = cuda_engine.create_engine_inspector()
    inspector.execution_context = context
    found: dict[str, Any] = json.loads(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
    return found


def layer_timer(trt: Any) -> Any:
    """A vendor profiler with ``milliseconds``: layer name -> time, added up until it is replaced."""

    class Timer(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.milliseconds: dict[str, float] = {}

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.milliseconds[layer_name] = self.milliseconds.get(layer_name, 0.0) + ms

    return Timer()
