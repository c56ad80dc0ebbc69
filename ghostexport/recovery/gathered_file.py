"""What was gathered at the cuts, on disk: ``select`` leaves it, ``recover`` fits from it without a pass of its own.

One safetensors file, sums in float64, the token sample in float32. Its header says what it is about: model, calibration
set, removed spans, and what was gathered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ghostexport.calibration import CalibrationSet
from ghostexport.errors import RunFolderError
from ghostexport.files import atomic_path, require_space
from ghostexport.models import LoadedModel
from ghostexport.moments import BoundaryMoments, MagnitudeRatios
from ghostexport.plan import PrunePlan
from ghostexport.recovery.gathering import Gathered, Request

FORMAT = "ghostexport.statistics/1"

_REMAKE = "Delete the file to have it made again: ghostexport select RUN"


def save(path: Path, loaded: LoadedModel, calibration: CalibrationSet, found: Sequence[Gathered]) -> Path:
    """Writes what was gathered at one plan's boundaries, none of it inside a block, atomically; returns the path.

    Raises:
        RunFolderError: the disk is full or the folder not writable.
    """
    one = found[0]
    header = {
        "format": FORMAT,
        **_subject(loaded, calibration, [(s.boundary.span.start, s.boundary.span.stop) for s in found]),
        "bases": sorted(one.ratios),
        "needs": sorted(one.needs),
        "folds": len(one.folds),
    }
    tensors: dict[str, torch.Tensor] = {}
    for s in found:
        for key, sums in _sums(s).items():
            for name, value in _values(sums).items():
                tensors[f"{key}.{name}"] = torch.as_tensor(value, dtype=torch.float64).cpu()
        tensors |= {f"{s.boundary.index}.sample.{i}": column for i, column in enumerate(s.sample.columns)}
    require_space(path.parent, sum(t.nbytes for t in tensors.values()), path.name)
    with atomic_path(path) as temporary:
        try:
            save_file(tensors, temporary, {"ghostexport": json.dumps(header, sort_keys=True)})
        except SafetensorError as error:
            raise RunFolderError(f"Cannot write {path}: {error}", "Check free space and permissions.") from error
    return path


def load(
    path: Path, loaded: LoadedModel, calibration: CalibrationSet, plan: PrunePlan, request: Request
) -> list[Gathered] | None:
    """Reads what :func:`save` wrote, onto the model's device.

    Returns:
        In boundary order; None where there is no file, it is about another model, calibration set or plan,
        or does not hold all that is requested.

    Raises:
        RunFolderError: the file is truncated or edited.
    """
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("ghostexport", "{}"))
            if header.get("format") != FORMAT:
                raise RunFolderError(f"{path} is not a statistics file of format {FORMAT}.", _REMAKE)
            subject = _subject(loaded, calibration, [(span.start, span.stop) for span in plan.removed])
            held = Request(frozenset(header["bases"]), frozenset(header["needs"]), header["folds"])
            served = held.folds == request.folds and request.bases <= held.bases and request.needs <= held.needs
            if not served or any(header[key] != value for key, value in subject.items()):
                return None
            found = held.empty(loaded, plan.boundaries, calibration)
            for gathered in found:
                _fill(gathered, file)
            return found
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise RunFolderError(f"{path} is not a readable statistics file: {error}", _REMAKE) from error


def _subject(loaded: LoadedModel, calibration: CalibrationSet, removed: Sequence[tuple[int, int]]) -> dict[str, Any]:
    return {
        "model": loaded.sha256,
        "calibration": calibration.sha256,
        "removed": [list(span) for span in removed],
    }


def _sums(gathered: Gathered) -> dict[str, BoundaryMoments | MagnitudeRatios]:
    """All sums of a boundary by their key in the file."""
    named: dict[str, BoundaryMoments | MagnitudeRatios] = {}
    for kind in ("folds", "weighted_folds"):
        named |= {f"{kind}.{i}": moments for i, moments in enumerate(getattr(gathered, kind))}
    named |= {f"ratios.{basis}": ratios for basis, ratios in gathered.ratios.items()}
    return {f"{gathered.boundary.index}.{key}": sums for key, sums in named.items()}


def _values(sums: BoundaryMoments | MagnitudeRatios) -> Mapping[str, torch.Tensor | float]:
    """The numbers of a sum by attribute; a basis is not one of them."""
    return {name: value for name, value in vars(sums).items() if name != "basis"}


def _fill(gathered: Gathered, file: Any) -> None:
    for key, sums in _sums(gathered).items():
        for name, empty in _values(sums).items():
            value = file.get_tensor(f"{key}.{name}")
            if value.shape != torch.as_tensor(empty).shape:
                raise ValueError(f"{key}.{name} has the shape {list(value.shape)}")
            setattr(sums, name, value.to(empty.device) if isinstance(empty, torch.Tensor) else type(empty)(value))
    sample = [file.get_tensor(f"{gathered.boundary.index}.sample.{i}") for i in range(2)]
    gathered.sample.columns = sample
