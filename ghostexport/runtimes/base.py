"""The two protocols every runtime implements, and the values that cross them. Imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ghostexport.execution import Execution
from ghostexport.operators import OperatorSet
from ghostexport.recipe import BuildSection


@dataclass(frozen=True)
class Availability:
    """Whether a runtime can be used on this machine, and the one-line reason.

    Attributes:
        build: engines can be built here.
        run: engines can be executed here.
        reason: one line: what was found, or what is missing and the remedy.
        version: version of the vendor library, empty when it is not installed.
    """

    build: bool
    run: bool
    reason: str
    version: str = ""


@dataclass(frozen=True)
class Tensor:
    """A binding of a decoder graph.

    Attributes:
        name: as in the graph.
        dtype: NumPy (or ml_dtypes) name, such as ``int64`` or ``bfloat16``.
        dims: integers, or roles ``batch``, ``tokens``, ``past``, ``total`` (= past + tokens).
    """

    name: str
    dtype: str
    dims: tuple[int | str, ...]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape where roles have these sizes."""
        return tuple(d if isinstance(d, int) else sizes[d] for d in self.dims)

    def nbytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes of its values where roles have these sizes."""
        return math.prod(self.shape(sizes)) * (2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize)


@dataclass(frozen=True)
class EngineFile:
    """A built engine; the sidecar JSON beside it holds exactly these fields.

    Attributes:
        path: the engine (``.engine`` plan, or ``.onnx`` for ONNX Runtime); of split profiles, the prefill plan.
        runtime, version: who built it.
        variant: ``dense``, ``pruned`` or an operator's name.
        device: fingerprint of the device it was built on or for.
        profiles: optimization profiles: name -> input -> (min, opt, max) shapes; empty for ONNX Runtime.
        flags: every build setting, by name: an engine is current when they are unchanged.
        build_seconds: wall-clock seconds of the build.
        plan_bytes: bytes of the engine and the weights it uses (a data file may hold others' as well).
        weight_bytes: bytes of the weights in the graph it was built from.
        graph_sha256: hash of the ONNX file it was built from.
        plan_sha256: hash of the engine file.
        sha256: hash of every file the engine consists of, by name in its folder; the first is ``path``.
        graph_data_sha256: hash of every data file of the graph, by name.
        inputs, outputs: the graph's bindings in order: name, dtype and dims, a dim being an integer or its role
            (``batch``, ``tokens``, ``past``, ``total``).
        extra: what only some runtimes have, such as trtexec lines; ``build_peak_bytes`` is the build's peak of host
            memory.
    """

    path: Path
    runtime: str
    version: str
    variant: str
    device: Mapping[str, Any]
    profiles: Mapping[str, Any]
    flags: Mapping[str, Any]
    build_seconds: float
    plan_bytes: int
    weight_bytes: int
    graph_sha256: str
    plan_sha256: str
    sha256: Mapping[str, str] = field(default_factory=dict)
    graph_data_sha256: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sidecar(self) -> Path:
        """``dense.json`` of ``dense.engine``, ``dense.prefill.engine`` or ``dense.onnx``."""
        stem = self.path.name.removesuffix(self.path.suffix)
        return self.path.with_name(stem.removesuffix(".prefill") + ".json")

    def profiles_of(self, plan: str) -> list[str]:
        """The profiles in one of its plans, in order: of two plans, ``dense.decode.engine`` has those for decode."""
        part = plan.removesuffix(".engine").rpartition(".")[2]
        return [name for name in self.profiles if len(self.sha256) == 1 or name.startswith(part)]

    def largest(self, profile: str, role: str) -> int:
        """The largest size of ``role`` in a profile; 0 where no input has it."""
        shapes = self.profiles[profile]
        held = [t for t in self.inputs if role in t.dims and t.name in shapes]
        return max((shapes[t.name][2][t.dims.index(role)] for t in held), default=0)

    @property
    def files(self) -> tuple[Path, ...]:
        """All files of the engine, the sidecar last."""
        return (*(self.path.parent / name for name in self.sha256), self.sidecar)


class KVCache(Protocol):
    """The KV cache of a session, held where the runtime wants it (host or device memory)."""

    @property
    def length(self) -> int:
        """Tokens held."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...


class Session(Protocol):
    """A loaded engine of a decoder-only LLM with KV cache."""

    clock: str
    """``perf_counter_ns`` or ``cuda-events``: what :meth:`timed_forward` measures with."""

    def new_cache(self, batch: int, length: int = 0) -> KVCache:
        """A cache of ``length`` zero tokens, for an empty start or for a decode benchmark at that past length."""
        ...

    def forward(
        self, input_ids: NDArray[np.int64], cache: KVCache, attention_mask: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.float32], KVCache]:
        """Runs ``(B, T)`` token ids after ``cache``; returns logits ``(B, T, V)`` as float32 and the longer cache.

        ``attention_mask`` ``(B, past + T)`` is 0 at padding, all ones when None.
        """
        ...

    def timed_forward(self, input_ids: NDArray[np.int64], cache: KVCache) -> tuple[float, KVCache]:
        """Like :meth:`forward` without bringing the logits to the host; returns seconds and the longer cache."""
        ...

    def close(self) -> None:
        """Frees the engine."""
        ...


class Runtime(Protocol):
    """One way to build and run engines. The registry :data:`ghostexport.runtimes.RUNTIMES` holds the instances."""

    name: str

    def availability(self) -> Availability:
        """What works here; never raises, never imports the vendor library at module level."""
        ...

    def build(
        self, graph: Path, target: Path, variant: str, settings: BuildSection, execution: Execution
    ) -> EngineFile:
        """Builds ``graph`` (ONNX) into ``target`` plus the runtime's suffix, atomically; the sidecar is written last.

        Raises:
            RecipeError: this runtime or version does not support a setting.
            RuntimeUnavailableError: this runtime cannot build here.
            BuildError: the builder failed; its log is attached.
        """
        ...

    def load(self, engine: EngineFile, execution: Execution) -> Session:
        """Loads a built engine after checking its sidecar against this machine.

        Raises:
            RuntimeUnavailableError: it cannot run here, or was built for something else.
        """
        ...

    def swap(self, engine: EngineFile, operators: OperatorSet, target: Path, execution: Execution) -> EngineFile:
        """Writes ``target`` plus suffix: the engine with other operators in the same places, without a rebuild.

        Raises:
            BuildError: the engine was not built refittable, or the operators do not fit it.
        """
        ...
