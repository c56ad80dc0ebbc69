"""What more operators cost: seconds of recovery for six against one, of select and recover with one shared pass against
one each, and peak memory for 32 against 256 sequences.

    python benchmarks/operators_cost.py [MODEL] [--sequences 32] [--length 512] [--prune 7] [--output results/...json]

Asking for six operators must cost less than 1.3 times asking for one, and memory must not follow the number of
sequences. The shared pass goes through a file, as between the stages of a run folder. Runs alternate, so that a busy
machine slows both; memory is the process's peak beyond the loaded model, in a fresh process per count. The last line
printed is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from ghostexport import calibration, models
from ghostexport.execution import Execution
from ghostexport.recipe import CalibrationSection, RecoverSection, SelectSection
from ghostexport.recovery import gathered_file
from ghostexport.recovery.recover import recover, shareable
from ghostexport.selection.choosing import select, select_and_gather

ONE = ("ghost",)
SIX = ("ghost", "ghost-affine", "ghost-weighted", "linearpatch-diag", "linearpatch-rotate", "prune-and-comp")
COUNTS = (32, 256)


def main() -> None:
    arguments = parse()
    if arguments.measure_memory:
        print(peak_bytes(arguments, arguments.measure_memory))
        return
    loaded, drawn, held_out = prepare(arguments, arguments.sequences)
    plan = select(loaded, drawn, SelectSection(spans=((12, 12 + arguments.prune),)))
    seconds: dict[str, list[float]] = {"one": [], "six": []}
    for _ in range(arguments.repeats):
        for name, operators in (("one", ONE), ("six", SIX)):
            started = time.perf_counter()
            recover(loaded, plan, drawn, held_out, RecoverSection(operators=operators), Execution())
            seconds[name].append(time.perf_counter() - started)
    result = {
        "model": arguments.model,
        "plan": plan.to_json()["removed"],
        "operators": {"one": ONE, "six": SIX},
        "tokens": drawn.num_tokens + held_out.num_tokens,
        "seconds": seconds,
        "ratio": statistics.median(seconds["six"]) / statistics.median(seconds["one"]),
        "select_and_recover": both_stages(arguments, loaded, drawn, held_out),
        "peak_bytes_beyond_model": {count: child_peak(count) for count in COUNTS} if arguments.memory else None,
        "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def both_stages(arguments: argparse.Namespace, loaded: models.LoadedModel, drawn: Any, held_out: Any) -> dict[str, Any]:
    """Seconds of select and recover together, six operators, with a pass each and with a shared one, in turn."""
    section, six = SelectSection(prune=arguments.prune), RecoverSection(operators=SIX)
    seconds: dict[str, list[float]] = {"apart": [], "shared": []}
    same, size = [], 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "statistics.safetensors"
        for _ in range(arguments.repeats):
            started = time.perf_counter()
            plan = select(loaded, drawn, section)
            apart = recover(loaded, plan, drawn, held_out, six)
            seconds["apart"].append(time.perf_counter() - started)
            started = time.perf_counter()
            plan, gathered = select_and_gather(loaded, drawn, section, six, Execution())
            if gathered is None:
                raise SystemExit("The guess of select was wrong on this model: there is no shared pass to measure.")
            size = gathered_file.save(path, loaded, drawn, gathered).stat().st_size
            request = shareable(six, len(plan.removed))
            given = gathered_file.load(path, loaded, drawn, plan, request)
            shared = recover(loaded, plan, drawn, held_out, six, gathered=given)
            seconds["shared"].append(time.perf_counter() - started)
            same.append(all(shared[name].sha256 == apart[name].sha256 for name in SIX))
    return {
        "criterion": section.criterion,
        "plan": plan.to_json()["removed"],
        "seconds": seconds,
        "ratio": statistics.median(seconds["shared"]) / statistics.median(seconds["apart"]),
        "equal_bytes": all(same),
        "statistics_bytes": size,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--prune", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--measure-memory", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def prepare(arguments: argparse.Namespace, sequences: int) -> tuple[models.LoadedModel, Any, Any]:
    loaded = models.load_model(arguments.model, "float32", Execution(device="cpu"))
    section = CalibrationSection(source="demo", sequences=sequences, length=arguments.length, held_out_sequences=8)
    return loaded, *calibration.draw(section, loaded.tokenizer)


def child_peak(count: int) -> int:
    command = [sys.executable, __file__, *sys.argv[1:], "--measure-memory", str(count)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak_bytes(arguments: argparse.Namespace, sequences: int) -> int:
    """Peak resident bytes of recovering six operators beyond what was resident before."""
    loaded, drawn, held_out = prepare(arguments, sequences)
    plan = select(loaded, drawn, SelectSection(spans=((12, 12 + arguments.prune),)))
    loaded.model(input_ids=torch.from_numpy(drawn.tokens[:1].copy()))  # allocator and kernels warmed up
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak counter
    before = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    recover(loaded, plan, drawn, held_out, RecoverSection(operators=SIX), Execution())
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024
    return max(0, peak - before)


if __name__ == "__main__":
    main()
