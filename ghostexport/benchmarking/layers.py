"""Per-layer times in trtexec's layout, ``layers_X.json`` and ``profile_X.json``, for NVIDIA's report viewers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ghostexport.benchmarking.workloads import Workload
from ghostexport.files import write_json
from ghostexport.runtimes.base import KVCache, Session

#: Executions that are timed layer by layer.
EXECUTIONS = 10

LayerTimes = Mapping[str, float]


@runtime_checkable
class Profiled(Protocol):
    """A session whose library times layers: TensorRT's."""

    def profile(
        self, input_ids: NDArray[np.int64], cache: KVCache, repeats: int
    ) -> tuple[Mapping[str, Any], Sequence[LayerTimes]]:
        """The engine's layers, and per execution layer name -> milliseconds."""
        ...


@dataclass(frozen=True)
class LayerProfile:
    """The layers of one engine.

    Attributes:
        workload: name of the workload they were timed on.
        layers: what the library's inspector says, ``{"Layers": [...]}``.
        runs: per execution layer name -> milliseconds, all with the same layers.
    """

    workload: str
    layers: Mapping[str, Any]
    runs: Sequence[LayerTimes]


def profile_layers(session: Session, workloads: Sequence[Workload]) -> LayerProfile | None:
    """Times the layers of a decode step after the longest past, at the smallest batch (without one, of the first
    workload). None where the library has no profiler, or reports nothing.

    The session is slower afterwards: close it.
    """
    if not isinstance(session, Profiled):
        return None
    decodes = [w for w in workloads if w.kind == "decode"] or workloads[:1]
    chosen = min(decodes, key=lambda w: (w.batch, -w.past))
    token_ids = np.zeros((chosen.batch, chosen.tokens), np.int64)
    layers, runs = session.profile(token_ids, session.new_cache(chosen.batch, chosen.past), EXECUTIONS)
    return LayerProfile(chosen.name, layers, runs) if runs[0] else None


def trtexec_profile(runs: Sequence[LayerTimes]) -> list[dict[str, Any]]:
    """The list that ``trtexec --exportProfile`` writes.

    Args:
        runs: one mapping layer name -> milliseconds per execution, all with the same layers.

    Returns:
        ``{"count"}``, then per layer name, timeMs (sum), averageMs, medianMs, percentage (of the sum over layers).
    """
    names = list(runs[0])
    sums = {name: sum(run[name] for run in runs) for name in names}
    total = sum(sums.values())
    entries: list[dict[str, Any]] = [{"count": len(runs)}]
    for name in names:
        times = [run[name] for run in runs]
        share = 100 * sums[name] / total if total else 0.0
        entries.append(
            {
                "name": name,
                "timeMs": sums[name],
                "averageMs": sums[name] / len(runs),
                "medianMs": float(np.median(times)),
                "percentage": share,
            }
        )
    return entries


def write_layers(layers: Path, times: Path, profile: LayerProfile) -> None:
    """Writes what ``trtexec`` writes with ``--exportLayerInfo`` and with ``--exportProfile``."""
    write_json(layers, dict(profile.layers))
    write_json(times, trtexec_profile(profile.runs))
