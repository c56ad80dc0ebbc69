"""A variant of a run on its way to a runtime, and what every deployed folder carries whatever the runtime."""

from __future__ import annotations

import functools
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ghostexport.files import sha256_files, write_bytes
from ghostexport.operators import OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import float_variant
from ghostexport.runfolder import RunFolder
from ghostexport.runtimes.interface import Interface, read_interface
from ghostexport.serving.codec import Codec

SUMS = "SHA256SUMS"
CARD = "README.md"
#: Where the base model's own card goes.
BASE_CARD = "BASE_MODEL.md"
_LEGAL = ("LICENSE", "LICENCE", "NOTICE")


@dataclass(frozen=True)
class Bundle:
    """One variant of a verified run.

    Attributes:
        folder: the run.
        variant: float or quantised.
        plan: of the cut; the empty one for ``dense``.
        operators: None for ``dense`` and ``pruned``.
        exported: folder of what the runtime's own exporter made of the whole model, where that is given.
    """

    folder: RunFolder
    variant: str
    plan: PrunePlan
    operators: OperatorSet | None
    exported: Path | None = None

    @property
    def graph(self) -> Path:
        return self.folder.graph_path(self.variant)

    @property
    def adds_nodes(self) -> bool:
        """Whether it has an operator that no stock class computes."""
        return self.operators is not None and self.operators.adds_nodes

    @property
    def form(self) -> str | None:
        """Of quantised weights, such as ``int4``."""
        return self.variant.partition(".")[2] or None

    @property
    def kept(self) -> int:
        """Decoder blocks."""
        return self.plan.num_blocks if self.variant_source == "dense" else len(self.plan.kept)

    @property
    def variant_source(self) -> str:
        return float_variant(self.variant)

    @functools.cached_property
    def interface(self) -> Interface:
        return read_interface(self.graph)

    @functools.cached_property
    def codec(self) -> Codec:
        return Codec(self.folder.model_path)

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The dense model's configuration, the language tower's where there are several."""
        found = json.loads((self.folder.model_path / "config.json").read_text(encoding="utf-8"))
        return dict(found.get("text_config") or found)

    @property
    def window(self) -> int | None:
        """How many tokens one attends to in the model's sliding blocks, where that is fewer than its positions."""
        window = self.config.get("sliding_window") if self.config.get("use_sliding_window", True) else None
        return window if window and window < (self.codec.positions or window + 1) else None

    @functools.cached_property
    def recipe(self) -> dict[str, Any]:
        return self.folder.read().recipe

    @functools.cached_property
    def licence(self) -> str | None:
        """The licence's identifier, as the base model's card names it."""
        try:
            parts = (self.folder.model_path / CARD).read_text(encoding="utf-8").split("---", 2)
            head = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else {}
        except (OSError, yaml.YAMLError):
            return None
        found = head.get("license") if isinstance(head, dict) else None
        return found if isinstance(found, str) else None

    def copy_description(self, output: Path, config: bool = False) -> None:
        """Copies tokenizer, chat template and licence of the base model; its configuration is of the uncut model."""
        output.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.model_path.iterdir()):
            if path.is_file() and (config or path.name != "config.json"):
                shutil.copyfile(path, output / (BASE_CARD if path.name == CARD else path.name))


def write_card(bundle: Bundle, output: Path, target: str, use: str) -> None:
    """Writes the model card: base model and licence, plan, operator, parity, quality, how it was made and is used."""
    source, operators = str(bundle.recipe["model"]["source"]), bundle.operators
    legal = sorted(p.name for p in output.iterdir() if p.name.upper().startswith(_LEGAL))
    base = source if re.fullmatch(r"[\w.-]+/[\w.-]+", source) else Path(source).name
    head = {
        "base_model": base,
        "license": bundle.licence or "other",
        "tags": ["ghostexport", target],
        "library_name": target,
    }
    spans = ", ".join(f"[{span.start}, {span.stop})" for span in bundle.plan.removed)
    parity = bundle.folder.read_parity().get(bundle.variant, {})
    worst = max((o["relative"] for o in parity.get("outputs", ())), default=None)
    kinds = sorted({o.kind for o in operators.operators}) if operators else []
    removed = spans if bundle.variant_source != "dense" else "none"
    error = "not measured" if worst is None else f"largest error {worst:.1e} of the deviation"
    lines = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n# {base}, variant {bundle.variant}\n",
        f"Base model: {base}. Licence: that of the base model"
        + (f" ({', '.join(legal)})." if legal else "; the source brought no licence file: look it up there."),
        f"\n* Removed decoder blocks: {removed} of {bundle.plan.num_blocks} (criterion {bundle.plan.criterion}).",
        f"* Repair: {', '.join(kinds) if kinds else 'none'}"
        + (f", {operators.num_parameters} parameters at {len(operators.operators)} cuts." if operators else "."),
        f"* Weights: {bundle.form or bundle.interface.dtype}.",
        f"* Parity with PyTorch: {error} (tolerance {parity.get('tolerance', {}).get('relative', 'none')}).",
        *_quality(bundle),
        f"\n## Use\n\n{use}\n",
        f"## How it was made\n\n```yaml\n{yaml.safe_dump(bundle.recipe, sort_keys=False)}```\n",
        f"`{SUMS}` lists every file; `ghostexport selftest FOLDER` compares the folder's answers with `selftest.json`.",
    ]
    write_bytes(output / CARD, "\n".join(lines).encode() + b"\n")


def _quality(bundle: Bundle) -> list[str]:
    files = bundle.folder.read()
    for found in (files.model_quality, files.engine_quality):
        figures = found.get("variants", {})
        if bundle.variant in figures and "dense" in figures:
            own, dense = figures[bundle.variant]["perplexity"], figures["dense"]["perplexity"]
            return [f"* Perplexity on held-out text: {own:.2f}; of the base model {dense:.2f}."]
    return ["* Quality: not measured in this run (`ghostexport eval`)."]


def write_sums(output: Path) -> None:
    """Writes ``SHA256SUMS`` of every other file below ``output``."""
    files = sorted(p for p in output.rglob("*") if p.is_file() and p != output / SUMS and "__pycache__" not in p.parts)
    hashes = sha256_files(files)
    lines = [f"{hashes[path]}  {path.relative_to(output).as_posix()}\n" for path in files]
    write_bytes(output / SUMS, "".join(lines).encode())


def damage(folder: Path) -> str | None:
    """The first file of a deployed folder that is missing or is not what ``SHA256SUMS`` says, as a sentence."""
    entries = [line.split("  ", 1) for line in (folder / SUMS).read_text(encoding="utf-8").splitlines()]
    missing = next((name for _, name in entries if not (folder / name).is_file()), None)
    if missing is not None:
        return f"{missing} is missing"
    hashes = sha256_files([folder / name for _, name in entries])
    changed = next((name for digest, name in entries if hashes[folder / name] != digest), None)
    return None if changed is None else f"{changed} was changed"
