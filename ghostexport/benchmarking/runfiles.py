"""What the files of a run folder say, for the report, the comparison and the sweep. A missing file is None or empty."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ghostexport.benchmarking.result import SCHEMA
from ghostexport.errors import RunFolderError
from ghostexport.operators import OperatorSet, load_operators
from ghostexport.runfolder import RunFolder


@dataclass(frozen=True)
class RunFiles:
    """Parsed files of one run.

    Attributes:
        path: the run folder.
        recipe_text, recipe: ``recipe.yaml`` as text and as data.
        plan: ``plan.json``.
        quality: ``eval.json``, of the engines.
        evaluation: ``evaluation.json``, of the models.
        parity: ``parity.json``.
        benches: runtime -> ``bench/<runtime>.json``.
        sidecars: runtime -> variant -> engine sidecar.
        surgery: variant -> surgery report.
        operators: variant -> operators.
    """

    path: Path
    recipe_text: str | None
    recipe: dict[str, Any]
    plan: dict[str, Any] | None
    quality: dict[str, Any]
    evaluation: dict[str, Any]
    parity: dict[str, Any]
    benches: dict[str, dict[str, Any]]
    sidecars: dict[str, dict[str, dict[str, Any]]]
    surgery: dict[str, dict[str, Any]]
    operators: dict[str, OperatorSet]

    @property
    def model(self) -> str:
        return str(self.recipe.get("model", {}).get("source", self.path.name))

    @property
    def cut(self) -> str:
        """Such as ``[10, 17) of 30 blocks``."""
        if self.plan is None:
            return "no plan yet"
        spans = ", ".join(f"[{start}, {stop})" for start, stop in self.plan["removed"])
        return f"{spans or 'nothing'} of {self.plan['num_blocks']} blocks"

    @property
    def num_removed(self) -> int:
        return sum(stop - start for start, stop in self.plan["removed"]) if self.plan else 0

    @property
    def variants(self) -> list[str]:
        """In report order, from whatever names them."""
        operators = self.recipe.get("recover", {}).get("operators", [])
        named = [v for b in self.benches.values() for v in b["variants"]]
        measured = [v for found in (self.quality, self.evaluation) for v in found.get("variants", {})]
        known = ["dense", "pruned", *operators, *named, *measured, *self.operators]
        return list(dict.fromkeys(known))


def read_run(path: Path) -> RunFiles:
    """Reads a run folder.

    Raises:
        RunFolderError: not a folder, or one of its files is unreadable or of another schema.
    """
    if not path.is_dir():
        raise RunFolderError(f"{path} is not a run folder.", "Make one with: ghostexport build engine MODEL -o RUN")
    recipe = path / "recipe.yaml"
    text = recipe.read_text(encoding="utf-8") if recipe.exists() else None
    benches = {file.stem: _json(file) for file in sorted((path / "bench").glob("*.json"))}
    for name, data in benches.items():
        if data.get("schema") != SCHEMA:
            raise RunFolderError(
                f"{path / 'bench' / name}.json is not a result of schema {SCHEMA}.", f"Run: ghostexport bench {path}"
            )
    engines = sorted(d for d in (path / "engines").glob("*") if d.is_dir())
    return RunFiles(
        path=path,
        recipe_text=text,
        recipe=yaml.safe_load(text) if text else {},
        plan=_json(path / "plan.json") if (path / "plan.json").exists() else None,
        quality=_json(path / "eval.json") if (path / "eval.json").exists() else {},
        evaluation=_evaluation(path),
        parity=_json(path / "parity.json") if (path / "parity.json").exists() else {},
        benches=benches,
        sidecars={d.name: {f.stem: _json(f) for f in sorted(d.glob("*.json"))} for d in engines},
        surgery={f.name.split(".surgery")[0]: _json(f) for f in sorted((path / "onnx").glob("*.surgery.json"))},
        operators={f.stem: load_operators(f) for f in sorted((path / "operators").glob("*.safetensors"))},
    )


def _evaluation(path: Path) -> dict[str, Any]:
    """What ``ghostexport eval`` found; nothing where the plan, an operator or a graph has changed since."""
    file = path / "evaluation.json"
    return _json(file) if file.exists() and not RunFolder(path).is_outdated("eval") else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} is not readable JSON: {error}", "Delete it and run the stage again.") from error
    if not isinstance(data, dict):
        raise RunFolderError(f"{path} is not a JSON object.", "Delete it and run the stage again.")
    return data
