"""The files of a run as its readers see them: parsed, whatever is missing empty."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ghostexport.operators import read_fits
from ghostexport.recipe import float_variant


@dataclass(frozen=True)
class RunFiles:
    """The parsed files of one run; what is missing is None or empty.

    Attributes:
        path, finished: the run folder; its finished stages.
        outdated: of bench and eval those that read a file which has changed since.
        recipe_text, recipe: the recipe as text and as data.
        plan: the plan as data.
        engine_quality: by bench.
        model_quality: by eval; nothing where the plan, an operator or a graph has changed since.
        parity: by verify.
        benches: runtime -> figures.
        sidecars: runtime -> variant -> engine sidecar.
        surgery: variant -> surgery report.
        quantization: quantised variant -> quantisation report.
        operator_files: variant -> file of its operators; weights are not read unless asked for.
    """

    path: Path
    finished: tuple[str, ...]
    outdated: frozenset[str]
    recipe_text: str | None
    recipe: dict[str, Any]
    plan: dict[str, Any] | None
    engine_quality: dict[str, Any]
    model_quality: dict[str, Any]
    parity: dict[str, Any]
    benches: dict[str, dict[str, Any]]
    sidecars: dict[str, dict[str, dict[str, Any]]]
    surgery: dict[str, dict[str, Any]]
    quantization: dict[str, dict[str, Any]]
    operator_files: dict[str, Path]

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
        measured = [v for found in (self.engine_quality, self.model_quality) for v in found.get("variants", {})]
        found = dict.fromkeys(
            ["dense", "pruned", *operators, *named, *measured, *self.operator_files, *self.quantization]
        )
        return sorted(found, key=lambda name: name != float_variant(name))  # the quantised ones last

    @property
    def fits(self) -> dict[str, list[dict[str, Any]]]:
        """Variant -> figures of the fit at every cut, from the heads of the files."""
        return {variant: read_fits(path) for variant, path in self.operator_files.items()}
