"""What every stage takes on a model of real shape and random weights: wall, memory, disk, as multiples of the weights.

    python benchmarks/scale.py qwen2.5-0.5b --work FOLDER [--dtype float16] [--output results/scale.json]
    python benchmarks/scale.py llama-3.1-8b --work FOLDER --dtype bfloat16 --streaming --stages calibrate select

The model is one random block, repeated. ``evaluate`` is a pass of every variant over the held-out windows in PyTorch.

Every stage is a process of its own on one run folder. Memory: the largest anonymous memory of the process (what it
takes for itself; mapped files apart), every 20 ms, less that of importing the libraries. Disk: bytes read, of files
that are dropped from the page cache before each stage, bytes written, and bytes that the run folder keeps.
Floors beside it: one read of the weights, and one forward pass over the calibration tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[1] / "recipes" / "configs"
OUTPUT = Path(__file__).parent / "results" / "scale.json"

#: Shapes without a recipe of their own.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
}

#: Fewer blocks, for a busy machine: the embedding weighs more in it.
SHAPES["qwen2.5-0.5b-8-blocks"] = SHAPES["qwen2.5-0.5b"] | {"num_hidden_layers": 8}

STAGES = ("calibrate", "select", "recover", "export", "surgery", "verify", "build")


def main() -> None:
    arguments = parse()
    model = make_model(arguments)
    run = arguments.work / re.sub(r"[^a-z0-9.]+", "-", f"run-{name_of(arguments)}")
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    removed = ["--prune", str(arguments.prune)] if arguments.spans is None else ["--plan", arguments.spans]
    flags = [*removed, "--calibration", "demo", "--dtype", arguments.dtype]
    flags += ["--sequences", str(arguments.sequences), "--length", str(arguments.length), "--held-out", "2"]
    streaming = "--streaming" if arguments.streaming else "--no-streaming"
    rows = {"libraries": measure([sys.executable, "-c", IMPORTS], [])}
    seconds = 0.0 if arguments.streaming else forward_seconds(model, arguments)
    for stage in arguments.stages or STAGES:
        verb = ["build", "engine"] if stage == "build" else [stage]
        given = [str(model), "-o", str(run), *flags] if stage == STAGES[0] else [str(run)]
        given += [] if stage == "surgery" else ["--device", "cpu", streaming]
        files = [path for root in (model, run) for path in root.rglob("*") if path.is_file()]
        before = size(run)
        command = [sys.executable, "-m", "ghostexport.cli", *verb, *given, *extra(stage, arguments)]
        if stage == "evaluate":
            command = [sys.executable, "-c", EVALUATE, str(model), str(run), arguments.dtype, streaming]
        rows[stage] = measure(command, files)
        rows[stage]["kept"] = size(run) - before
        write(arguments, weights, seconds, rows)
        print(stage, rows[stage], flush=True)


def write(arguments: argparse.Namespace, weights: int, seconds: float, rows: dict[str, dict[str, float]]) -> None:
    """Puts what is measured so far beside the results of other shapes."""
    known = json.loads(arguments.output.read_text(encoding="utf-8")) if arguments.output.exists() else {}
    before = known.get(name_of(arguments), {}).get("stages", {})
    known[name_of(arguments)] = {
        "weights_bytes": weights,
        "tokens": arguments.sequences * arguments.length,
        "forward_seconds": round(seconds, 1) or None,
        "stages": before | {name: multiples(row, weights, rows["libraries"]) for name, row in rows.items()},
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
    }
    arguments.output.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    arguments.output.with_suffix(".md").write_text(table(known), encoding="utf-8")


IMPORTS = "import torch, transformers, onnxruntime, onnx_ir, ghostexport.pipeline, ghostexport.verification"


EVALUATE = """
import sys, ghostexport as gx
from ghostexport import calibration
from ghostexport.execution import Execution
from ghostexport.runfolder import RunFolder
model, run, dtype, streaming = sys.argv[1:]
execution, folder = Execution("cpu", streaming=streaming == "--streaming"), RunFolder(run)
dense = gx.load(model, dtype=dtype, execution=execution)
plan, variants = folder.read_plan(), {"dense": dense}
for path in sorted(folder.operators_path("ghost").parent.glob("*.safetensors")):
    variants[path.stem] = gx.apply(dense, plan, folder.read_operators(path.stem))
print(gx.evaluate(variants, calibration.load(folder.calibration_path)))
"""


def name_of(arguments: argparse.Namespace) -> str:
    """What a row of results is called."""
    blocks = f" {arguments.blocks} blocks" if arguments.blocks else ""
    spans = f" {arguments.spans}" if arguments.spans else ""
    return f"{arguments.shape}{blocks} {arguments.dtype}{' streamed' if arguments.streaming else ''}{spans}"


def extra(stage: str, arguments: argparse.Namespace) -> list[str]:
    """Flags of one stage."""
    operators = [flag for name in arguments.operator for flag in ("--operator", name)]
    return {"recover": operators, "build": ["--runtime", "onnxruntime"]}.get(stage, [])


def make_model(arguments: argparse.Namespace) -> Path:
    """A model folder of random weights, a file per block, all of one block's values; the tokenizer is SmolLM2's."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from ghostexport import models

    shape, dtype = arguments.shape, getattr(torch, arguments.dtype)
    folder: Path = arguments.work / f"{shape}-{arguments.blocks or 'all'}-{arguments.dtype}"
    if (folder / "config.json").exists():
        return folder
    values = SHAPES.get(shape) or json.loads((CONFIGS / f"{shape}.json").read_text(encoding="utf-8"))
    blocks = arguments.blocks or values["num_hidden_layers"]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**values | {"num_hidden_layers": 1})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms that are all ones would be merged by exporters
                parameter.add_(0.1 * torch.randn(parameter.shape).to(parameter.dtype))
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not is_tied(name, config)}
    parts = {"around": {name: tensor for name, tensor in tensors.items() if ".layers.0." not in name}}
    for block in range(blocks):
        own = {n.replace(".layers.0.", f".layers.{block}."): t for n, t in tensors.items() if ".layers.0." in n}
        parts[str(block)] = own
    folder.mkdir(parents=True, exist_ok=True)
    for part, held in parts.items():
        save_file(held, folder / f"model-{part}.safetensors", {"format": "pt"})
    index = {name: f"model-{part}.safetensors" for part, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    models.load_tokenizer(models.resolve_source("smollm2")).save_pretrained(folder)
    transformers.AutoConfig.for_model(**values | {"num_hidden_layers": blocks, "dtype": dtype}).save_pretrained(folder)
    return folder


def is_tied(name: str, config: Any) -> bool:
    """Whether a tensor is stored under another name."""
    return bool(config.tie_word_embeddings) and name == "lm_head.weight"


def measure(command: list[str], files: list[Path]) -> dict[str, float]:
    """Runs a command to its end and looks at it from outside."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak, io = 0, {"read_bytes": 0, "write_bytes": 0}
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
            found = re.search(r"RssAnon:\s+(\d+) kB", status)
            peak = max(peak, int(found[1]) * 1024 if found else 0)
            lines = Path(f"/proc/{process.pid}/io").read_text(encoding="utf-8").splitlines()
            io = {key: int(value) for key, _, value in (line.partition(": ") for line in lines)}
        except (OSError, ValueError):
            break
        time.sleep(0.02)
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\n{errors.decode()}")
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "memory": peak, "read": io["read_bytes"], "written": io["write_bytes"], "kept": 0}


def forward_seconds(model: Path, arguments: argparse.Namespace) -> float:
    """The floor: one forward pass of the blocks over the calibration tokens, in the model's dtype."""
    import torch

    from ghostexport import models
    from ghostexport.execution import Execution

    loaded = models.load_model(model, arguments.dtype, Execution(device="cpu"))
    ids = torch.randint(0, 1000, (1, arguments.length))
    with torch.no_grad():
        loaded.model.model(ids)
        begun = time.perf_counter()
        loaded.model.model(ids)
    return (time.perf_counter() - begun) * arguments.sequences


def multiples(row: dict[str, float], weights: int, libraries: dict[str, float]) -> dict[str, float]:
    """Seconds, and everything else over the bytes of the weights."""
    own = {"seconds": round(row["seconds"], 1), "memory_bytes": row["memory"]}
    ratios = {key: round(row[key] / weights, 3) for key in ("read", "written", "kept")}
    return own | {"memory": round((row["memory"] - libraries["memory"]) / weights, 3)} | ratios


def table(results: dict[str, Any]) -> str:
    """Markdown, a row per stage."""
    lines = []
    for name, result in results.items():
        lines += [
            f"{name}: weights {result['weights_bytes'] / 1e9:.2f} GB, {result['tokens']} calibration tokens, one pass "
            f"of the blocks over them {result['forward_seconds'] or '-'} s; all else over the weights' bytes",
            "",
            "| stage | seconds | memory of its own | read | written | kept |",
            "|---|---|---|---|---|---|",
        ]
        for stage, row in result["stages"].items():
            cells = " | ".join(f"{row[key]:.2f}" for key in ("memory", "read", "written", "kept"))
            lines.append(f"| {stage} | {row['seconds']:.0f} | {cells} |")
        lines.append("")
    return "\n".join(lines)


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help=f"{', '.join(SHAPES)}, or a file of recipes/configs without .json")
    parser.add_argument("--work", type=Path, required=True, help="folder for the model and the run")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--prune", type=int, default=2)
    parser.add_argument("--operator", action="append", default=None)
    parser.add_argument("--stages", nargs="*", default=None)
    parser.add_argument("--blocks", type=int, default=None, help="instead of the shape's own")
    parser.add_argument("--spans", default=None, help="removed without looking: [[20, 25]]")
    parser.add_argument("--streaming", action="store_true", help="block by block from the files")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    arguments.operator = arguments.operator or ["ghost", "linearpatch-rotate"]
    arguments.work.mkdir(parents=True, exist_ok=True)
    return arguments


if __name__ == "__main__":
    main()
