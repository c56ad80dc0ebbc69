"""What works on which architecture: tiny random models of every decoder family through the whole pipeline.

    python benchmarks/architectures.py --work ROWS                 # every row that is not there yet
    python benchmarks/architectures.py --work ROWS --only lfm2 'llama@*'
    python benchmarks/architectures.py --work ROWS --again         # rows made by other code, or that did not pass
    python benchmarks/architectures.py --work ROWS --only gptj --cells load select ghost best   # the rest stays
    python benchmarks/architectures.py --work ROWS --write         # the JSON, the table and README's families

A row is one model (``tiny_decoders.py``), possibly in another dtype or opset (``llama@opset23``). It runs in a
process of its own and keeps each cell when it is known, so an interrupted run continues where it stopped. Cells:
``load``; ``select`` one block of four; ``ghost`` and ``best`` recovered (with the operator that ``best`` became);
``export``; ``surgery``; ``verify`` (batch 2, past 0, 7 and 24, against PyTorch); ``tensorrt-rtx`` (an engine is built);
``reload`` (the pruned checkpoint, loaded by transformers, gives the same logits, and generates the same with a cache).
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "architectures.json"
README = ROOT / "README.md"
MARKERS = ("<!-- architectures -->", "<!-- /architectures -->")
CELLS = ("load", "select", "ghost", "best", "export", "surgery", "verify", "tensorrt-rtx", "reload")

#: Rows in other dtypes and opsets.
DOZEN = (
    "llama", "qwen3", "gemma3", "gpt2", "gptj", "falcon", "granite", "cohere2", "mixtral", "gpt_oss", "deepseek_v3",
    "qwen3_next",
)  # fmt: skip
SETTINGS = ("float16", "bfloat16", "opset23")

LIMIT = 900  # seconds of one row

MARKS = {"passed": "✓", "refused": "-", "failed": "✗", "after": "·"}


def row_names() -> list[str]:
    from tiny_decoders import DECODERS

    return [*DECODERS, *(f"{name}@{setting}" for name in DOZEN for setting in SETTINGS)]


class Row:
    """The cells of one model, each written when it is known."""

    def __init__(self, name: str, work: Path) -> None:
        self.name = name
        self.model, _, self.setting = name.partition("@")
        self.dtype = self.setting if self.setting in ("float16", "bfloat16") else "float32"
        self.opset = int(self.setting.removeprefix("opset")) if self.setting.startswith("opset") else 20
        self.path = row_path(work, name)
        self.folder = work / "runs" / name
        self.source = self.folder / "model"
        self.cells: dict[str, dict[str, Any]] = {}
        self.kept: dict[str, dict[str, Any]] = {}
        self.code = code_sha256()
        self.operators: dict[str, Any] = {"operators": ["ghost"]}

    def run(self, engine: bool = True, only: Sequence[str] = CELLS) -> None:
        """Runs every cell (``engine`` or not); a cell that needs one that did not pass is ``after`` it.

        Cells beside ``only`` stay as an earlier run left them.
        """
        import tiny_decoders

        if set(only) != set(CELLS):
            earlier = json.loads(self.path.read_text())
            self.kept = {column: cell for column, cell in earlier["cells"].items() if column not in only}
            self.code = earlier["code"]  # of the oldest cell
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        tiny_decoders.save(self.model, self.source, self.dtype)
        text = "\n\n".join(" ".join(f"{w * p % 997:x}" for w in range(1, 60)) for p in range(1, 80))
        (self.folder / "text.txt").write_text(text)
        self.cell("load", self.load)
        self.cell("select", lambda: self.stage("select"), "load")
        self.cell("ghost", lambda: self.stage("recover"), "select")
        self.cell("best", self.best, "ghost")
        self.cell("export", lambda: self.stage("export"), "load")
        self.cell("surgery", lambda: self.stage("surgery"), "ghost", "export")
        self.cell("verify", self.verify, "surgery")
        if engine:
            self.cell("tensorrt-rtx", self.engine, "surgery")
        self.cell("reload", self.reload, "select")
        shutil.rmtree(self.folder)

    def cell(self, column: str, work: Callable[[], str], *needs: str) -> None:
        from ghostexport.errors import GhostExportError, ParityError

        if column in self.kept:
            self.cells[column] = self.kept[column]
            return
        for need in needs:
            if self.cells[need]["state"] != "passed":
                self.cells[column] = {"state": "after", "note": need}
                self.write()
                return
        self.cells[column] = {"state": "failed", "note": "the process ended here"}
        self.write()
        started = time.monotonic()
        try:
            found = {"state": "passed", "note": work()}
        except ParityError as error:  # nothing was refused: it was done, and is not equal
            found = {"state": "failed", "note": str(error)}
        except GhostExportError as error:
            found = {"state": "refused", "note": str(error).replace(str(self.folder), "RUN")}
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            found = {"state": "failed", "note": f"{type(error).__name__}: {error} ({where.name}:{where.lineno})"}
            (self.path.with_suffix(f".{column}.txt")).write_text(traceback.format_exc())
        self.cells[column] = found | {"seconds": round(time.monotonic() - started, 1)}
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        row = {"name": self.name, "code": self.code, "cells": self.cells}
        self.path.write_text(json.dumps(row, indent=1))

    def load(self) -> str:
        from ghostexport import models

        loaded = models.load_model(self.source, self.dtype)  # type: ignore[arg-type]
        return f"{type(loaded.model).__name__}, {loaded.num_blocks} blocks"

    def stage(self, goal: str) -> str:
        from ghostexport.pipeline import run
        from ghostexport.recipe import parse_recipe
        from ghostexport.runfolder import RunFolder

        recipe = parse_recipe(
            {
                "model": {"source": str(self.source), "dtype": self.dtype},
                "calibration": {
                    "source": str(self.folder / "text.txt"), "sequences": 24, "length": 32, "held_out_sequences": 4
                },
                "select": {"prune": 1},
                "recover": self.operators,
                "export": {"opset": self.opset},
                "build": {"runtimes": ["tensorrt-rtx"], "max_tokens": 32, "max_past": 63},
            }
        )  # fmt: skip
        folder = RunFolder(self.folder / "run")
        run(recipe, folder, goal=goal)
        return ", ".join(name for name in recipe.variants[2:]) if goal == "recover" else ""

    def best(self) -> str:
        before, self.operators = self.operators, {"quality": "best"}
        try:
            self.stage("recover")
        except BaseException:
            self.operators = before
            raise
        return ", ".join(sorted(path.stem for path in (self.folder / "run" / "operators").glob("*best*"))) or (
            ", ".join(sorted(p.stem for p in (self.folder / "run" / "operators").iterdir() if p.stem != "ghost"))
        )

    def verify(self) -> str:
        self.stage("verify")
        parity = json.loads((self.folder / "run" / "parity.json").read_text())
        worst = max(output["relative"] for report in parity.values() for output in report["outputs"])
        return f"largest error {worst:.1e} of a standard deviation"

    def engine(self) -> str:
        from ghostexport import exporters, models
        from ghostexport.execution import Execution
        from ghostexport.recipe import BuildSection
        from ghostexport.runtimes import RUNTIMES

        loaded = models.load_model(self.source, self.dtype)  # type: ignore[arg-type]
        exporters.require_exportable(loaded.model, runtimes=["tensorrt-rtx"])
        graph = sorted(p for p in (self.folder / "run" / "onnx").glob("*.onnx") if p.stem not in ("dense", "pruned"))[0]
        section = BuildSection(runtimes=("tensorrt-rtx",), max_tokens=32, max_past=63)
        engine = RUNTIMES["tensorrt-rtx"].build(graph, self.folder / "engine", graph.stem, section, Execution())
        return f"{graph.stem}, {engine.plan_bytes / 1e6:.1f} MB"

    def reload(self) -> str:
        import torch
        import transformers

        from ghostexport import models
        from ghostexport.plan import PrunePlan

        plan = PrunePlan.from_json(json.loads((self.folder / "run" / "plan.json").read_text()))
        loaded = models.load_model(self.source, self.dtype)  # type: ignore[arg-type]
        pruned = models.drop_blocks(loaded.model, plan)
        models.save_checkpoint(pruned, loaded.tokenizer, self.folder / "saved")
        again = transformers.AutoModelForCausalLM.from_pretrained(self.folder / "saved", dtype=pruned.dtype).eval()
        ids = torch.arange(1, 25).view(2, 12)
        with torch.no_grad():
            torch.testing.assert_close(again(ids).logits, pruned(ids).logits)
            options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            equal = [
                torch.equal(*(model.generate(ids, use_cache=use, **options) for use in (True, False)))
                for model in (loaded.model, again)
            ]
        if self.dtype == "float32" and equal == [True, False]:
            raise AssertionError("generation with a cache differs from generation without")
        if not equal[0]:
            return "the dense model itself generates otherwise with a cache than without"
        return ""


def row_path(work: Path, name: str) -> Path:
    return work / "rows" / f"{name}.json"


def code_sha256() -> str:
    """Of the package's source: a row made by other code is stale."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "ghostexport").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def is_wanted(path: Path, again: bool) -> bool:
    if not path.exists():
        return True
    row = json.loads(path.read_text(encoding="utf-8"))
    finished = set(row["cells"]) == set(CELLS)
    passed = finished and all(cell["state"] != "failed" for cell in row["cells"].values())
    return not finished or (again and (not passed or row["code"] != code_sha256()))


def run_rows(names: list[str], work: Path, again: bool, cells: Sequence[str]) -> None:
    """Runs the rows that are wanted, each in a process of its own."""
    for name in names:
        path = row_path(work, name)
        if not is_wanted(path, again) and set(cells) == set(CELLS):
            continue
        started = time.monotonic()
        command = [sys.executable, __file__, "--work", str(work), "--row", name, "--cells", *cells]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
            ended = "" if done.returncode == 0 else f"exit code {done.returncode}: {done.stderr[-400:]}"
        except subprocess.TimeoutExpired:
            ended = f"not finished in {LIMIT} s"
        row = json.loads(path.read_text()) if path.exists() else {"name": name, "code": code_sha256(), "cells": {}}
        for column in CELLS if ended else ():
            cell = row["cells"].setdefault(column, {"state": "failed", "note": ended})
            if cell["note"] == "the process ended here":
                cell["note"] = ended
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row, indent=1))
        marks = " ".join(f"{column} {MARKS[row['cells'][column]['state']]}" for column in CELLS)
        print(f"{name:28} {marks}  {time.monotonic() - started:.0f} s", flush=True)


def result(work: Path) -> dict[str, Any]:
    """Everything measured, as it is committed."""
    rows = [json.loads(row_path(work, name).read_text()) for name in row_names() if row_path(work, name).exists()]
    rows = [row for row in rows if set(row["cells"]) == set(CELLS)]
    for row in rows:
        row["cells"] = {column: row["cells"][column] for column in CELLS}
    versions = {p: importlib.metadata.version(p) for p in ("torch", "transformers", "onnxruntime", "tensorrt-rtx")}
    return {"versions": versions, "rows": rows}


def table(found: dict[str, Any]) -> str:
    """All rows, then the reasons of all cells that did not pass."""
    rows = found["rows"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        "# Architectures",
        "",
        f"Tiny random models by `benchmarks/architectures.py` ({versions}). ✓ passed (`best`: the operator it became), "
        "- refused with a reason, ✗ failed, · not tried because of an earlier cell. A row may hold cells of several "
        "runs; `code` in the JSON is the hash of the package at the oldest.",
        "",
        "| model | " + " | ".join(CELLS) + " |",
        "|---" * (len(CELLS) + 1) + "|",
    ]
    for row in rows:
        shown = [
            cell["note"] if column == "best" and cell["state"] == "passed" else MARKS[cell["state"]]
            for column, cell in row["cells"].items()
        ]
        lines.append(f"| {row['name']} | " + " | ".join(shown) + " |")
    lines += ["", "## Reasons", ""]
    for reason, places in sorted(_reasons(rows).items()):
        lines.append(f"* {', '.join(places)}: {reason}")
    return "\n".join(lines) + "\n"


def families(found: dict[str, Any]) -> str:
    """README's table: the architectures by how far they go."""
    groups: dict[str, list[str]] = {
        "every step, to a TensorRT-RTX engine": [],
        "every step, to ONNX Runtime": [],
        "blocks removed and repaired in PyTorch, saved as a checkpoint": [],
        "refused when it is loaded": [],
        "not yet": [],
    }
    full, graph, checkpoint, refused, open_ = groups.values()
    for row in found["rows"]:
        state = {column: cell["state"] for column, cell in row["cells"].items()}
        if "@" in row["name"]:
            continue
        if state["load"] == "refused":
            refused.append(row["name"])
        elif "failed" in state.values() or (state["ghost"], state["reload"]) != ("passed", "passed"):
            open_.append(row["name"])
        elif state["verify"] != "passed":
            checkpoint.append(row["name"])
        else:
            (full if state["tensorrt-rtx"] == "passed" else graph).append(row["name"])
    lines = ["| | |", "|---|---|"]
    lines += [f"| {kind} ({len(names)}) | {', '.join(sorted(names))} |" for kind, names in groups.items() if names]
    return "\n".join(lines)


def in_readme(text: str, families_table: str) -> str:
    """README with its table renewed."""
    before, _, rest = text.partition(MARKERS[0])
    _, _, after = rest.partition(MARKERS[1])
    return f"{before}{MARKERS[0]}\n{families_table}\n{MARKERS[1]}{after}"


def _reasons(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in rows:
        for column, cell in row["cells"].items():
            if cell["state"] in ("refused", "failed"):
                reason = " ".join(cell["note"].split())
                found.setdefault(reason, []).append(f"**{row['name']}** {column}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=["*"], help="names or patterns of rows")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS, help="others stay as they are in ROWS")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        Row(arguments.row, arguments.work).run(only=arguments.cells)
        return
    names = [name for name in row_names() if any(fnmatch.fnmatch(name, only) for only in arguments.only)]
    if arguments.write:
        found = result(arguments.work)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(table(found))
        README.write_text(in_readme(README.read_text(), families(found)))
        return
    run_rows(names, arguments.work, arguments.again, arguments.cells)


if __name__ == "__main__":
    main()
