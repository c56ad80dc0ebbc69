"""Per-layer times in trtexec's layout, ``layers_X.json`` and ``profile_X.json``, for NVIDIA's report viewers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ghostexport.runfolder import write_json


def trtexec_profile(runs: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
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


def write_layers(
    folder: Path, name: str, layers: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, float]]
) -> tuple[Path, Path]:
    """Writes ``layers_<name>.json`` (the inspector's ``{"Layers": [...]}``) and ``profile_<name>.json``."""
    paths = folder / f"layers_{name}.json", folder / f"profile_{name}.json"
    write_json(paths[0], {"Layers": list(layers)})
    write_json(paths[1], trtexec_profile(runs))
    return paths
