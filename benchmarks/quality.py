"""What is left of the model: criteria x operators at equal calibration tokens, on SmolLM2-135M and Gemma-3-270M.

    python benchmarks/quality.py --work CELLS                 # everything, in the order of PARTS
    python benchmarks/quality.py --work CELLS --parts repairs --prune 7
    python benchmarks/quality.py --work CELLS --parts         # measure nothing, write JSON, tables and figures
    python benchmarks/quality.py --work OTHER --model gemma3 --source FOLDER    # made by gemma3_270m.py

Parts: ``repairs`` (every repair on the span that ``streamline`` picks and on another criterion's plan),
``criteria`` (every criterion with the operators of OPERATORS, on two of the domains), ``sizes`` (16 to 256
calibration sequences), ``tasks`` (zero-shot accuracy on the same items, and a sample of text, on the plans of
``repairs``), ``heal`` (``healing.py``: training over the amount of text, ten windows a domain, results of its own).
Calibration text is wiki and C4; held-out windows come from other documents of both, from code and
from presidential messages of 1790 to 1900. Every measured cell is one JSON file in CELLS, with its operators beside
it, so an interrupted run continues where it stopped (after a change of ghostexport take a new folder).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from healing import Healer, Healing
from healing import render as render_healing
from quality_report import COMPARED, TRAINED, Subject, cell_name, render
from quality_texts import LENGTH, calibration_windows, held_out_windows, pools

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.evaluation.tasks import ask
from ghostexport.evaluation.text import continuation, measure, torch_forward
from ghostexport.execution import Execution
from ghostexport.files import write_bytes, write_json
from ghostexport.operators import OperatorSet, load_operators
from ghostexport.plan import PrunePlan
from ghostexport.recipe import CRITERIA, REFIT, RecoverSection, SelectSection
from ghostexport.recovery.recover import recover
from ghostexport.selection.choosing import select

PARTS = ("repairs", "criteria", "sizes", "tasks", "heal")

#: Trained by the part ``heal``: removed blocks, sequences, draw.
HEALED = (
    Healing(((12, 19),), 64),
    Healing(((12, 19),), 64, rate=3e-4),
    Healing(((12, 19),), 192),
    Healing(((12, 19),), 384),
    Healing(((12, 19),), 64, seed=1),
    Healing(((9, 20),), 192),
)

#: What is measured, and how many blocks are removed from it.
MODELS = {
    "smollm2": (Subject("quality", "SmolLM2-135M", 30), (7, 11, 5)),
    "gemma3": (Subject("quality-gemma3", "Gemma-3-270M", 18), (5, 3)),
}

#: ``@K``: the K blocks before the cut are refitted too.
REPAIRS = (
    "pruned",
    "linearpatch-diag",
    "linearpatch-rotate",
    "prune-and-comp",
    "replaceme-lstsq",
    "ghost",
    "ghost-weighted",
    "ghost-affine",
    "ghost-split",
    "ghost-zero",
    "ghost+refit",
    "ghost-split+refit",
    "ghost-zero+refit",
    "replaceme-cosine",
    "streamline-ffn",
    "linearpatch-distilled",
    "ghost-distilled",
)

OPERATORS = ("pruned", "linearpatch-rotate", "ghost", "ghost-split")
SIZED = ("ghost", "ghost-split", "ghost-split+refit")
ASKED = ("pruned", "linearpatch-rotate", "ghost", "ghost-split+refit")
TASKS = ("arc_easy", "arc_challenge", "hellaswag", "winogrande", "boolq", "openbookqa", "rte", "copa")

#: Repairs that re-solve the last kept block before a cut: none where block 0 is removed.
INSIDE = ("ghost-split", "ghost-zero", "replaceme-lstsq", "replaceme-cosine")

#: Calibration windows behind all others, for the trained repairs.
GUARDS = 4

#: The prompt of the text sample.
PROMPT = "The history of the Roman Empire begins with"
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    arguments = parse()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.parts:
        bench = Bench.open(arguments)
        for part in arguments.parts:
            parts = {"repairs": repairs, "criteria": criteria, "sizes": sizes, "tasks": tasks, "heal": healing}
            parts[part](bench, arguments)
    if arguments.parts == ["heal"]:
        return
    render(arguments.work, arguments.results, MODELS[arguments.model][0], arguments.sequences, OPERATORS)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the measured cells")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--source", default="smollm2", help="folder of the model; needed for gemma3")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--prune", type=int, nargs="+", help="blocks removed")
    parser.add_argument("--criteria", nargs="+", default=list(CRITERIA))
    parser.add_argument("--repairs", nargs="+", default=list(REPAIRS))
    parser.add_argument("--plan", help="criterion whose plans repairs and tasks are measured on besides streamline's")
    parser.add_argument("--asked", nargs="+", default=list(ASKED), help="repairs, of the part tasks")
    parser.add_argument("--sequences", type=int, default=64, help="calibration sequences of 512 tokens")
    parser.add_argument("--criteria-sequences", type=int, default=32, help="the same of the part criteria")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32, 64, 128, 256], help="of the part sizes")
    parser.add_argument("--select-sequences", type=int, default=6, help="the first ones, for every criterion")
    parser.add_argument("--windows", type=int, default=5, help="held-out windows of 512 tokens per domain")
    parser.add_argument("--items", type=int, default=64, help="of every zero-shot task")
    arguments = parser.parse_args()
    arguments.prune = arguments.prune or MODELS[arguments.model][1]
    if arguments.parts and arguments.model != "smollm2" and arguments.source == "smollm2":
        parser.error(f"--model {arguments.model} needs --source FOLDER")
    return arguments


def repairs(bench: Bench, arguments: argparse.Namespace) -> None:
    for plan in bench.plans(arguments):
        bench.measure(plan, arguments.sequences, arguments.repairs)


def criteria(bench: Bench, arguments: argparse.Namespace) -> None:
    two = {domain: bench.held_out[domain] for domain in COMPARED}
    for depth in arguments.prune:
        for criterion in ("streamline", *(c for c in arguments.criteria if c != "streamline")):
            plan = bench.plan(depth, criterion)
            bench.measure(plan, arguments.criteria_sequences, OPERATORS, two, "criteria")


def sizes(bench: Bench, arguments: argparse.Namespace) -> None:
    for size in arguments.sizes:
        for depth in arguments.prune:
            bench.measure(bench.plan(depth, "streamline"), size, SIZED)


def tasks(bench: Bench, arguments: argparse.Namespace) -> None:
    bench.ask("dense", bench.loaded.model, arguments.items)
    for plan in bench.plans(arguments):
        bench.measure(plan, arguments.sequences, arguments.asked)
        for repair in arguments.asked:
            patched = models.patch(bench.loaded, plan, bench.operators(plan, arguments.sequences, repair)).model
            bench.ask(cell_name(plan.to_json(), arguments.sequences, repair), patched, arguments.items)


def healing(bench: Bench, arguments: argparse.Namespace) -> None:
    texts, bos = pools(bench.loaded.tokenizer), bench.loaded.tokenizer.bos_token_id
    healer = Healer(arguments.work, bench.loaded, texts, held_out_windows(texts, max(10, arguments.windows), bos))
    for entry in HEALED:
        healer.run(entry)
    render_healing(arguments.work, arguments.results, f"{MODELS[arguments.model][0].title} (de-quantised)")


@dataclass
class Bench:
    """The model, the texts and the folder of cells."""

    work: Path
    loaded: models.LoadedModel
    calibration: CalibrationSet
    guard: CalibrationSet
    select_sequences: int
    held_out: dict[str, CalibrationSet]

    @classmethod
    def open(cls, arguments: argparse.Namespace) -> Bench:
        loaded = models.load_model(arguments.source, "float32", Execution(device="cpu"))
        texts, bos = pools(loaded.tokenizer), loaded.tokenizer.bos_token_id
        most = max([arguments.sequences, *(arguments.sizes if "sizes" in arguments.parts else [])])
        drawn = calibration_windows(texts, most + GUARDS, bos)
        bench = cls(
            arguments.work,
            loaded,
            CalibrationSet.from_tokens(drawn.tokens[:most]),
            CalibrationSet.from_tokens(drawn.tokens[most:]),
            arguments.select_sequences,
            held_out_windows(texts, arguments.windows, bos),
        )
        bench.cell("text-dense", {"repair": "dense"}, lambda: {"losses": losses(loaded.model, bench.held_out)})
        return bench

    def drawn(self, size: int) -> CalibrationSet:
        return CalibrationSet.from_tokens(self.calibration.tokens[:size])

    def plans(self, arguments: argparse.Namespace) -> list[PrunePlan]:
        """Of every depth, streamline's plan and the other criterion's."""
        criteria = dict.fromkeys(("streamline", arguments.plan or "streamline"))
        return [self.plan(depth, criterion) for criterion in criteria for depth in arguments.prune]

    def plan(self, depth: int, criterion: str) -> PrunePlan:
        """The criterion's plan (kept in a file). Blocks removed in an order give the shallower plans as well."""
        path = self.work / f"plan-{criterion}-n{depth}.json"
        deeper = sorted(self.work.glob(f"plan-{criterion}-n*.json"), reverse=True)
        plan = None
        for known in deeper:
            found = PrunePlan.from_json(json.loads(known.read_text(encoding="utf-8")))
            order = removal_order(found)
            if known == path:
                plan = found
            elif plan is None and len(order) > depth:
                plan = PrunePlan.from_blocks(found.num_blocks, order[:depth], criterion)
        if plan is None:
            section = SelectSection(criterion=criterion, prune=depth)
            plan = select(self.loaded, self.drawn(self.select_sequences), section, Execution())
        write_json(path, plan.to_json())
        print(time.strftime("%H:%M:%S"), criterion, plan, flush=True)
        return plan

    def measure(
        self,
        plan: PrunePlan,
        size: int,
        repairs: Sequence[str],
        held_out: Mapping[str, CalibrationSet] | None = None,
        kind: str = "text",
    ) -> None:
        """Every repair of one plan: the solved ones share a pass, each refit and each training is its own."""
        possible = [r for r in repairs if plan.kept[0] == 0 or r.partition("+")[0] not in INSIDE]
        missing = [r for r in possible if not self._path(plan, size, r, kind).exists()]
        alone = [r for r in missing if REFIT in r or r in TRAINED]
        plain = [r for r in missing if r not in alone and r != "pruned"]
        groups = [["pruned"]] * ("pruned" in missing) + [plain] * bool(plain) + [[r] for r in alone]
        for group in groups:
            started = time.monotonic()
            if group != ["pruned"]:
                self._fit(plan, size, group)
            seconds = round(time.monotonic() - started, 1)
            for repair in group:
                operators = self.operators(plan, size, repair)
                fit = [] if operators is None else [dict(o.fit) for o in operators.operators]
                about = {"prune": plan.num_removed, "removed": plan.to_json()["removed"], "size": size}
                about |= {"repair": repair, "seconds": seconds, "shared_with": len(group) - 1, "fit": fit}
                patched = models.patch(self.loaded, plan, operators).model
                name = self._path(plan, size, repair, kind).stem
                self.cell(name, about, lambda m=patched: {"losses": losses(m, held_out or self.held_out)})

    def _path(self, plan: PrunePlan, size: int, repair: str, kind: str = "text") -> Path:
        return self.work / f"{kind}-{cell_name(plan.to_json(), size, repair)}.json"

    def _fit(self, plan: PrunePlan, size: int, repairs: Sequence[str]) -> None:
        names = tuple(repair.partition("@")[0] for repair in repairs)
        upstream = int(repairs[0].partition("@")[2] or 0)
        section = RecoverSection(operators=names, refit_upstream=upstream)
        measured_on = CalibrationSet.from_tokens(self.held_out["wiki"].tokens[:4])
        held_out = self.guard if repairs[0] in TRAINED else measured_on
        fitted = recover(self.loaded, plan, self.drawn(size), held_out, section, Execution())
        for name, repair in zip(names, repairs, strict=True):
            write_bytes(self._path(plan, size, repair).with_suffix(".safetensors"), fitted[name].to_bytes())

    def operators(self, plan: PrunePlan, size: int, repair: str) -> OperatorSet | None:
        if repair == "pruned":
            return None
        return load_operators(self._path(plan, size, repair).with_suffix(".safetensors"))

    def ask(self, name: str, model: Any, items: int) -> None:
        """Zero-shot answers to the first items of every task in bfloat16, and a greedy continuation of the prompt."""

        def measure() -> dict[str, Any]:
            half = copy.deepcopy(model).to(torch.bfloat16)
            with tempfile.TemporaryDirectory(prefix="ghostexport-") as scratch:
                asked = [f"demo:{task}" for task in TASKS]
                tokenizer = self.loaded.tokenizer
                answers = ask({"it": half}, tokenizer, asked, None, items, Path(scratch), Execution())["it"]
            prompt = tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
            ids = torch.tensor([[tokenizer.bos_token_id, *prompt]])
            sample = continuation(model, tokenizer, ids, 40)
            return {"answers": {task.removeprefix("demo:"): a for task, a in answers.items()}, "sample": sample}

        self.cell(f"tasks{items}-{name}", {"prompt": PROMPT, "items": items}, measure)

    def cell(self, name: str, about: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
        path = self.work / f"{name}.json"
        if path.exists():
            return
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        machine = {"device": f"CPU {platform.machine()}, {torch.get_num_threads()} threads, float32"}
        result = about | measure() | versions | machine
        write_json(path, result)
        found = result.get("losses", {})
        shown = {d: round(math.exp(sum(v) / ((LENGTH - 1) * len(v))), 1) for d, v in found.items()}
        print(time.strftime("%H:%M:%S"), name, result.get("seconds", ""), shown, flush=True)


def losses(model: Any, held_out: Mapping[str, CalibrationSet]) -> dict[str, list[float]]:
    """Summed negative log-likelihood of the 511 predicted tokens of every window, by domain."""
    forward = {"it": torch_forward(model)}
    return {d: [w.nll for w in measure(forward, windows)["it"].windows] for d, windows in held_out.items()}


def removal_order(plan: PrunePlan) -> list[int]:
    """Blocks in the order in which a greedy or one-shot criterion of single blocks removes them; empty for others."""
    if "rounds" in plan.scores:
        return [entry["removed"] for entry in plan.scores["rounds"]]
    ranking = plan.scores.get("ranking", {})
    return list(ranking.get("removed", [])) if plan.criterion != "lorp" else []


if __name__ == "__main__":
    main()
