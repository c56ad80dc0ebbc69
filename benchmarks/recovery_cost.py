"""What recovery costs beside a plain forward pass over the same tokens: seconds, and memory against sequence count.

    python benchmarks/recovery_cost.py [MODEL] [--sequences 32] [--length 512] [--prune 7] [--output results/...json]

Both passes read the calibration and the held-out windows with the same batches. Memory is the process's peak beyond the
loaded model, measured in a fresh process per sequence count. The last line printed is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from ghostexport import calibration, models
from ghostexport.execution import Execution
from ghostexport.recipe import CalibrationSection, RecoverSection, SelectSection
from ghostexport.recovery.recover import recover
from ghostexport.selection.choosing import select


def main() -> None:
    arguments = parse()
    if arguments.measure_memory:
        print(peak_bytes(arguments, arguments.measure_memory))
        return
    loaded, drawn, held_out = prepare(arguments, arguments.sequences)
    plan = select(loaded, drawn, SelectSection(prune=arguments.prune))
    section = RecoverSection()
    forward, recovery = [], []
    for _ in range(arguments.repeats):  # alternating, so that a busy machine slows both
        forward.append(seconds(lambda: plain_forward(loaded, drawn, held_out)))
        recovery.append(seconds(lambda: recover(loaded, plan, drawn, held_out, section, Execution())))
    counts = [arguments.sequences, 4 * arguments.sequences]
    result = {
        "model": arguments.model,
        "plan": plan.to_json()["removed"],
        "operators": list(section.operators),
        "tokens": drawn.num_tokens + held_out.num_tokens,
        "forward_seconds": forward,
        "recover_seconds": recovery,
        "ratio": statistics.median(recovery) / statistics.median(forward),
        "peak_bytes_beyond_model": {count: child_peak(count) for count in counts},
        "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--prune", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--measure-memory", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def prepare(arguments: argparse.Namespace, sequences: int) -> tuple[models.LoadedModel, Any, Any]:
    loaded = models.load_model(arguments.model, "float32", Execution(device="cpu"))
    section = CalibrationSection(
        source="demo", sequences=sequences, length=arguments.length, held_out_sequences=max(1, sequences // 4)
    )
    return loaded, *calibration.draw(section, loaded.tokenizer)


def plain_forward(loaded: models.LoadedModel, *sets: calibration.CalibrationSet) -> None:
    with torch.no_grad():
        for tokens in sets:
            for batch in tokens.batches():
                loaded.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)


def seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def child_peak(count: int) -> int:
    command = [sys.executable, __file__, *sys.argv[1:], "--measure-memory", str(count)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak_bytes(arguments: argparse.Namespace, sequences: int) -> int:
    """Peak resident bytes of recovery beyond what was resident before it."""
    loaded, drawn, held_out = prepare(arguments, sequences)
    plan = select(loaded, drawn, SelectSection(spans=((12, 12 + arguments.prune),)))
    first = drawn.tokens[:1].copy()
    loaded.model(input_ids=torch.from_numpy(first))  # allocator and kernels warmed up
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak counter
    before = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    recover(loaded, plan, drawn, held_out, RecoverSection(), Execution())
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024
    return max(0, peak - before)


if __name__ == "__main__":
    main()
