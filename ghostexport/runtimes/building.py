"""What every build shares: settings that nobody understands are refused, and peak host memory is watched.

On a board with shared memory the peak decides whether an engine can be built there at all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import psutil

from ghostexport.errors import BuildError, RecipeError
from ghostexport.quantization.obstacles import find_obstacle
from ghostexport.quantization.targets import refusal, weight_form
from ghostexport.recipe import BuildSection
from ghostexport.runtimes.interface import Interface

_INTERVAL_SECONDS = 0.01


class PeakMemory:
    """Samples the resident memory of this process from a thread of its own while the ``with`` block runs.

    Attributes:
        nbytes: largest growth seen over the memory at the start of the block. Builders release Python's lock, so the
            thread runs beside them; a peak shorter than the 10 ms between two samples can be missed.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._process = psutil.Process()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._floor = self._process.memory_info().rss
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._done.wait(_INTERVAL_SECONDS):
            self._sample()

    def _sample(self) -> None:
        self.nbytes = max(self.nbytes, self._process.memory_info().rss - self._floor)


_NVINFER = ("tensorrt", "tensorrt-rtx")

#: Settings that only some runtimes understand.
CONCERNS: dict[str, tuple[str, ...]] = {
    "profiles": _NVINFER,
    "batch_points": _NVINFER,
    "token_points": _NVINFER,
    "workspace": _NVINFER,
    "hardware_compatibility": _NVINFER,
    "version_compatible": _NVINFER,
    "weight_streaming": _NVINFER,
    "strip_plan": _NVINFER,
    "opt_level": _NVINFER,
    "compute_capability": ("tensorrt-rtx",),
    "providers": ("onnxruntime",),
}


def refuse_forms(
    runtime: str, graph: Path, interface: Interface, capabilities: Iterable[str], version: str = ""
) -> None:
    """Raises BuildError when ``runtime``, or a target such as ``SM86``, cannot hold the quantisation of the graph."""
    obstacle = find_obstacle(graph, runtime, version)
    if obstacle is not None:
        remedy = "Quantise the float graph instead: ghostexport quantize GRAPH.onnx -o OUT --format int4."
        raise BuildError(f"{graph.name} is quantised in a way that {runtime} cannot build. {obstacle}", remedy)
    form = weight_form(interface.weight_types)
    reason = None if form is None else refusal(form, runtime, capabilities)
    if reason is not None:
        raise BuildError(f"The graph's weights are in {form}. {reason}", "Quantise the float graph to a form it holds.")


def refuse_foreign(runtime: str, settings: BuildSection) -> None:
    """Raises RecipeError when a setting is not at its default and none of the runtimes to build for understands it."""
    default = BuildSection()
    building = {runtime, *settings.runtimes}
    for name, runtimes in CONCERNS.items():
        value = getattr(settings, name)
        if value != getattr(default, name) and building.isdisjoint(runtimes):
            raise RecipeError(
                f"build.{name} = {value!r} means nothing to {', '.join(sorted(building))}.",
                f"It concerns {' and '.join(runtimes)}: remove it, or build for one of these.",
            )
