"""Part ``heal`` of ``quality.py``: healing over the amount of text, on several plans and draws of the calibration text.

Each draw (seed 0: the windows of all other parts, in their order; others: a permutation of all windows) has one start,
``ghost-split`` of the first 64 sequences, and one training per size. Eight windows that no training sees judge. Every
cell is one JSON file, with its operators beside it where they are a start, so an interrupted run continues.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality_figures import draw_healing
from quality_report import AVERAGED, geometric_mean, interval, perplexity, ratio, read, spans
from quality_texts import LENGTH, Pools, calibration_windows

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.evaluation.text import losses as losses_of
from ghostexport.execution import Execution
from ghostexport.files import write_bytes, write_json
from ghostexport.operators import OperatorSet, load_operators
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.recover import recover
from ghostexport.recovery.trained.healed import LEARNING_RATE, heal

#: Windows of either domain that calibration may draw, and how many behind them judge.
DRAWN, JUDGES = 392, 8

#: Sequences that the start is fitted on.
STARTED_ON = 64

#: Closed forms that share the pass of the start.
STARTS = ("ghost", "ghost-split")


@dataclass(frozen=True)
class Healing:
    """One training."""

    removed: Sequence[Sequence[int]]
    size: int
    epochs: int = 1
    seed: int = 0
    rate: float | None = None

    @property
    def name(self) -> str:
        spans = "-".join(f"{a}.{b}" for a, b in self.removed)
        rate = "" if self.rate is None else f"-lr{self.rate:g}"
        return f"heal-{spans}-{self.size}-e{self.epochs}-s{self.seed}{rate}"


@dataclass
class Healer:
    """The model, the texts and the folder of cells."""

    work: Path
    loaded: models.LoadedModel
    pools: Pools
    held_out: dict[str, CalibrationSet]
    shown: Callable[..., None] = print

    def __post_init__(self) -> None:
        bos = self.loaded.tokenizer.bos_token_id
        drawn = calibration_windows(self.pools, DRAWN + JUDGES, bos).tokens
        self.windows, self.judges = drawn[:DRAWN], CalibrationSet.from_tokens(drawn[DRAWN:])

    def drawn(self, seed: int, size: int) -> CalibrationSet:
        """Half of the windows wiki, half C4, alternating."""
        order = np.arange(DRAWN // 2)
        if seed:
            order = np.random.default_rng(seed).permutation(order)
        pairs = self.windows.reshape(DRAWN // 2, 2, LENGTH)[order]
        return CalibrationSet.from_tokens(pairs.reshape(-1, LENGTH)[:size])

    def start(self, removed: Sequence[Sequence[int]], seed: int) -> OperatorSet:
        """The start of a plan and draw, measured with the other closed forms of its pass."""
        plan = PrunePlan.from_spans(self.loaded.num_blocks, removed)
        own = Healing(removed, STARTED_ON, seed=seed)
        files = {kind: self.work / f"start-{own.name}-{kind}.safetensors" for kind in STARTS}
        begun = time.monotonic(), cpu_seconds()
        if not all(file.exists() for file in files.values()):
            section = RecoverSection(operators=STARTS, statistics="sequential")
            sets = recover(self.loaded, plan, self.drawn(seed, STARTED_ON), self.judges, section, self.execution())
            for kind, file in files.items():
                write_bytes(file, sets[kind].to_bytes())
        for kind, file in files.items():
            if not file.with_suffix(".json").exists():
                self.cell(file.stem, own, kind, load_operators(file), begun)
        return load_operators(files["ghost-split"])

    def run(self, healing: Healing) -> None:
        if not (self.work / "dense.json").exists():
            losses = {domain: window_losses(self.loaded.model, windows) for domain, windows in self.held_out.items()}
            write_json(self.work / "dense.json", {"losses": losses})
        if (self.work / f"{healing.name}.json").exists():
            return
        start, begun = self.start(healing.removed, healing.seed), (time.monotonic(), cpu_seconds())
        section = RecoverSection(epochs=healing.epochs, learning_rate=healing.rate)
        tokens = self.drawn(healing.seed, healing.size)
        found = heal(self.loaded, start, tokens, self.judges, section, self.execution())
        write_bytes(self.work / f"{healing.name}.safetensors", found.to_bytes())
        self.cell(healing.name, healing, "ghost-healed", found, begun)

    def cell(
        self, name: str, healing: Healing, repair: str, operators: OperatorSet, begun: tuple[float, float]
    ) -> None:
        seconds = round(time.monotonic() - begun[0], 1), round(cpu_seconds() - begun[1], 1)
        model = models.patch(self.loaded, operators.plan, operators).model
        losses = {domain: window_losses(model, windows) for domain, windows in self.held_out.items()}
        about: dict[str, Any] = {"repair": repair, "removed": [list(span) for span in healing.removed]}
        about |= {"size": healing.size, "epochs": healing.epochs, "seed": healing.seed, "rate": healing.rate}
        about |= {"seconds": seconds[0], "cpu_seconds": seconds[1], "fit": [dict(o.fit) for o in operators.operators]}
        about |= {"losses": losses, "torch": torch.__version__, "threads": torch.get_num_threads()}
        write_json(self.work / f"{name}.json", about)
        shown = {d: round(math.exp(sum(v) / ((LENGTH - 1) * len(v))), 1) for d, v in losses.items()}
        self.shown(time.strftime("%H:%M:%S"), name, *seconds, shown, flush=True)

    def execution(self) -> Execution:
        return Execution(say=lambda line: self.shown(time.strftime("%H:%M:%S"), line, flush=True), scratch=self.work)


@torch.no_grad()
def window_losses(model: Any, windows: CalibrationSet) -> list[float]:
    """Summed next-token loss of every window; matrix products in bfloat16, which moves a perplexity by 0.1 %."""
    found = []
    for batch in windows.batches(tokens=1):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch.input_ids, use_cache=False).logits
        found.append(sum(float(loss) for loss, _ in losses_of(logits, batch)))
    return found


def cpu_seconds() -> float:
    """Processor time of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def render(work: Path, results: Path, title: str) -> None:
    """Writes ``healing.json``, ``healing.md`` and ``healing.png``; rows that no cell in ``work`` measures anew stay."""
    cells = [read(file) for file in sorted(work.glob("start-heal-*.json")) + sorted(work.glob("heal-*.json"))]
    dense = read(work / "dense.json")
    same = {(str(c["removed"]), c["seed"], c["repair"]): c for c in cells if c["repair"] in STARTS}
    rows = []
    for cell in cells:
        row = {key: value for key, value in cell.items() if key not in ("losses", "fit")}
        row |= {domain: perplexity(losses) for domain, losses in cell["losses"].items()}
        row |= {"geometric_mean": geometric_mean(cell), "fit": cell["fit"][0]}
        if cell["repair"] in STARTS:  # share a pass, and are evaluated again without it
            del row["seconds"], row["cpu_seconds"]
        for name, kind in (("ghost", "ghost"), ("start", "ghost-split")):
            other = same.get((str(cell["removed"]), cell["seed"], kind))
            if other is not None and cell["repair"] != kind:
                row[f"ratio_to_{name}"] = ratio(cell, other, AVERAGED)
                row[f"ratio_to_{name}_by_domain"] = {d: ratio(cell, other, (d,)) for d in cell["losses"]}
        rows.append(row)
    measured = [_what(row) for row in rows]
    if (results / "healing.json").exists():
        rows += [row for row in read(results / "healing.json")["rows"] if _what(row) not in measured]
    rows.sort(
        key=lambda row: (str(row["removed"]), row["seed"], row["repair"] not in STARTS, row["size"], row["rate"] or 0)
    )
    about = {"title": title, "windows": len(dense["losses"]["wiki"]), "judges": JUDGES, "started_on": STARTED_ON}
    whole = {d: perplexity(v) for d, v in dense["losses"].items()} | {"geometric_mean": geometric_mean(dense)}
    write_json(results / "healing.json", about | {"dense": whole, "rows": rows})
    write_bytes(results / "healing.md", "\n".join(table(about, whole, rows)).encode())
    draw_healing([row for row in rows if row["rate"] is None], whole["geometric_mean"], results / "healing.png")


def _what(row: dict[str, Any]) -> str:
    return str([row[key] for key in ("removed", "seed", "repair", "size", "epochs", "rate")])


def table(about: dict[str, Any], dense: dict[str, float], rows: Sequence[dict[str, Any]]) -> list[str]:
    domains = ("wiki", "c4", "code", "speeches")
    lines = [
        f"# Healing, {about['title']}",
        "",
        f"Perplexity on {about['windows']} held-out windows of 512 tokens per domain (the first of them those of "
        f"quality.md); geo = geometric mean of {', '.join(AVERAGED)}; calibration on wiki and C4 only. Ratios have 95 "
        "% intervals over windows, as wide as so few demand. `ghost` and the start, `ghost-split`, are of the first "
        f"{about['started_on']} sequences of the draw. KL: of the {about['judges']} judging sequences, before and "
        "after. CPU s: training, judging and the dense model's pass for the targets, one thread of a shared machine.",
        "",
        "dense: " + ", ".join(f"{d} {p:.1f}" for d, p in dense.items()),
        "",
        "| removed | draw | repair | sequences | rate | "
        f"{' | '.join(domains)} | geo | / ghost | / start | KL | CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        fit = row["fit"]
        kl = f"{fit['kl_before']:.3f} -> {fit['kl_after']:.3f}" if "kl_after" in fit else ""
        rate = f"{row['rate'] or LEARNING_RATE:g}" if kl else ""
        cells = [spans(row), row["seed"], row["repair"], row["size"], rate, *(f"{row[d]:.1f}" for d in domains)]
        cells += [f"**{row['geometric_mean']:.1f}**", interval(row.get("ratio_to_ghost"))]
        cells += [interval(row.get("ratio_to_start")), kl, f"{row['cpu_seconds']:.0f}" if kl else ""]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "Ratio to the start by domain:", "", f"| removed | draw | sequences | rate | {' | '.join(domains)} |"]
    lines.append("|---|---|---|---|" + "---|" * len(domains))
    for row in (row for row in rows if row["repair"] not in STARTS):
        shown = " | ".join(interval(row.get("ratio_to_start_by_domain", {}).get(d)) for d in domains)
        rate = f"{row['rate'] or LEARNING_RATE:g}"
        lines.append(f"| {spans(row)} | {row['seed']} | {row['size']} | {rate} | {shown} |")
    return [*lines, ""]
