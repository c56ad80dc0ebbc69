"""Which variant to deploy: what each needs and reaches at most on a device, what is left of it, and the choice.

::

    memory     = weights + context x KV bytes of a token           the runtime's own memory comes on top
    tokens/s  <= 0.7 x bandwidth / (streamed weights + context x KV bytes of a token)              one sequence, decode
    keeps      = mean accuracy over dense's, where tasks were asked; else dense's perplexity over its own
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ghostexport.benchmarking.ideal import read_facts
from ghostexport.errors import RecipeError
from ghostexport.execution import Execution
from ghostexport.recipe import float_variant
from ghostexport.runfolder import RunFolder

SCHEMA = "ghostexport.fit/1"

#: Share of a device's published bandwidth that decode is taken to reach: an assumption until the engine is measured.
REACHED = 0.7

FIT_COLUMNS = ["weights, MB", "memory, MB", "tokens/s", "perplexity", "keeps", "verdict"]

_UNITS = {"": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tok/s": 1.0}


@dataclass(frozen=True)
class Budget:
    """What a device allows and the user wants; None where nothing is asked.

    Attributes:
        bandwidth: bytes a second that it reads.
        context: tokens in the KV cache.
        memory: bytes.
        decode: tokens a second.
        keep: share of the dense model that must be left.
    """

    bandwidth: float
    context: int
    memory: float | None = None
    decode: float | None = None
    keep: float | None = None

    def misses(self, candidate: Candidate) -> dict[str, float]:
        """What a candidate misses, in words, with the factor that it misses it by; empty where it fits."""
        found = {}
        if self.memory is not None:
            words = f"needs {candidate.memory / 1e6:.0f} MB of {self.memory / 1e6:.0f}"
            found[words] = candidate.memory / self.memory
        if self.decode is not None:
            words = f"reaches {candidate.tokens_per_second:.1f} of {self.decode:g} tokens/s"
            found[words] = self.decode / candidate.tokens_per_second
        if self.keep is not None:
            found[f"keeps {candidate.keeps:.1%} of {self.keep:.1%}"] = self.keep / candidate.keeps
        return {words: factor for words, factor in found.items() if factor > 1}


@dataclass(frozen=True)
class Candidate:
    """One variant at one depth."""

    model: str
    removed: int
    variant: str
    run: str
    weight_bytes: int
    memory: float
    tokens_per_second: float
    perplexity: float
    keeps: float

    @property
    def title(self) -> str:
        return f"{Path(self.model).name}, {self.removed} removed, {self.variant}"

    def no_worse_than(self, other: Candidate) -> bool:
        return (
            self.tokens_per_second >= other.tokens_per_second
            and self.keeps >= other.keeps
            and self.memory <= other.memory
        )


@dataclass(frozen=True)
class Fit:
    """All candidates and the chosen one; None where none fits."""

    budget: Budget
    candidates: tuple[Candidate, ...]
    frontier: tuple[Candidate, ...]
    chosen: Candidate | None

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "budget": asdict(self.budget) | {"reached": REACHED},
            "candidates": [
                asdict(c) | {"frontier": c in self.frontier, "misses": list(self.budget.misses(c))}
                for c in self.candidates
            ],
            "chosen": None if self.chosen is None else asdict(self.chosen),
        }

    def rows(self) -> list[tuple[str, list[str]]]:
        """For a table with :data:`FIT_COLUMNS`."""
        found = []
        for c in self.candidates:
            verdict = "; ".join(self.budget.misses(c)) or ("on the frontier" if c in self.frontier else "fits")
            cells = [f"{c.weight_bytes / 1e6:.1f}", f"{c.memory / 1e6:.0f}", f"{c.tokens_per_second:.1f}"]
            cells += [f"{c.perplexity:.2f}", f"{c.keeps:.1%}", "chosen" if c == self.chosen else verdict]
            found.append((c.title, cells))
        return found

    def lines(self) -> dict[str, list[tuple[float, float]]]:
        """Tokens a second and perplexity by variant, for a plot."""
        found: dict[str, list[tuple[float, float]]] = {}
        for c in sorted(self.candidates, key=lambda c: c.removed):
            name = c.variant if c.model == self.candidates[0].model else f"{Path(c.model).name} {c.variant}"
            found.setdefault(name, []).append((c.tokens_per_second, c.perplexity))
        return found

    def require_chosen(self) -> Candidate:
        """Raises RecipeError, naming the candidate that misses least, where none fits."""
        if self.chosen is not None:
            return self.chosen
        nearest = min(self.candidates, key=lambda c: max(self.budget.misses(c).values()))
        raise RecipeError(
            f"Nothing measured fits. {nearest.variant} with {nearest.removed} blocks removed comes nearest: it "
            f"{' and '.join(self.budget.misses(nearest))}.",
            "Try other depths (--prune), a smaller format in the recipe, --quality heal, or a smaller model.",
        )


def amount(text: str | None) -> float | None:
    """``4GB``, ``512MiB``, ``40tok/s`` or a plain number, in bytes or tokens a second.

    Raises:
        RecipeError: it is none of them.
    """
    if text is None:
        return None
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-z/]*)\s*", text.lower())
    if found is None or found[2] not in _UNITS or found[1].count(".") > 1:
        raise RecipeError(f"{text!r} is no amount.", "Examples: --memory 4GB, --decode 40tok/s")
    return float(found[1]) * _UNITS[found[2]]


def candidates(folder: RunFolder, budget: Budget, dense: Mapping[str, Any] | None = None) -> list[Candidate]:
    """The variants of one evaluated run, without ``pruned`` and what has no finite perplexity.

    Args:
        dense: figures in ``model_quality.json`` of the model that all are compared with; None for the run's own.
    """
    run = folder.read()
    figures = run.model_quality["variants"]
    found = []
    for variant in (v for v, own in figures.items() if v != "pruned" and own["perplexity"] is not None):
        facts = read_facts(folder.graph_path(variant))
        cache = budget.context * facts.kv_bytes_per_token
        streamed = facts.weight_bytes - facts.gathered_bytes + cache
        removed = 0 if float_variant(variant) == "dense" else run.num_removed
        found.append(
            Candidate(
                run.model,
                removed,
                variant,
                str(folder.path),
                facts.weight_bytes,
                facts.weight_bytes + cache,
                REACHED * budget.bandwidth / streamed,
                figures[variant]["perplexity"],
                retained(figures[variant], figures["dense"] if dense is None else dense),
            )
        )
    return found


def retained(own: Mapping[str, Any], dense: Mapping[str, Any]) -> float:
    """What is left of the dense model: mean of its tasks' accuracies over dense's, or the ratio of perplexities."""
    if "tasks" in own and "tasks" in dense:
        metrics = [m for m in dense["tasks"]["average"] if m in own["tasks"]["average"]]
        metric = "acc_norm" if "acc_norm" in metrics else metrics[0]
        return float(own["tasks"]["average"][metric] / dense["tasks"]["average"][metric])
    return float(dense["perplexity"] / own["perplexity"])


def choose(budget: Budget, found: Sequence[Candidate]) -> Fit:
    """The fastest that keeps what is asked for; where nothing is, the best of those that fit."""
    unique = list({(c.model, c.removed, c.variant): c for c in reversed(found)}.values())
    ordered = sorted(unique, key=lambda c: (c.model != found[0].model, c.removed, found.index(c)))
    frontier = [c for c in ordered if not any(o.no_worse_than(c) and not c.no_worse_than(o) for o in ordered)]
    fitting = [c for c in ordered if not budget.misses(c)]
    fast, good = operator.attrgetter("tokens_per_second", "keeps"), operator.attrgetter("keeps", "tokens_per_second")
    chosen = max(fitting, key=good if budget.keep is None else fast, default=None)
    return Fit(budget, tuple(ordered), tuple(frontier), chosen)


def comparable(one: RunFolder, other: RunFolder, execution: Execution) -> bool:
    """Whether two models were measured on the same held-out tokens; says so where they were not."""
    from ghostexport.calibration import load

    texts = [load(run.calibration_path)[1] for run in (one, other)]
    same = texts[0].tokens.shape == texts[1].tokens.shape and bool((texts[0].tokens == texts[1].tokens).all())
    if not same:
        execution.say(f"fit: {other.read().model} has another tokenizer: its perplexity cannot be compared")
    return same
