"""SmolLM2-135M, dense / ghost / best in float, int4, int8, fp8 and NVFP4: quality, bytes, speed, TensorRT-RTX plans.

    python benchmarks/quantization.py --work RUNS [--prune 5 7] [--block 32] [--rounding gptq] [--perturb 0.02]

One run folder per depth in RUNS. Quality is that of PyTorch holding the rounded weights, on the same held-out windows
for all; speed is ONNX Runtime's on this CPU for the forms it holds, measured in interleaved rounds against dense float
and dense int4; plans are real TensorRT-RTX builds of ghost for SM120, in bytes per weight of the quantised matrices.
``--perturb S`` multiplies every weight by ``1 + S * N(0, 1)`` first: packaged weights lie on a four-bit grid,
fine-tuned ones do not. Results: ``results/quantization.json`` and ``.md`` (rows of other depths and settings are kept).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ghostexport import models, runtimes
from ghostexport.execution import Execution
from ghostexport.files import write_bytes, write_json
from ghostexport.pipeline import run
from ghostexport.recipe import BuildSection, Recipe, float_variant, parse_recipe
from ghostexport.runfolder import RunFolder

RESULTS = Path(__file__).parent / "results" / "quantization.json"
FORMS = ["int4", "int8", "fp8", "nvfp4"]
RUNNABLE = ["int4", "int8"]
BEST = "ghost-split+refit"
BENCH = {"prefill_tokens": [128], "decode_past": [128], "decode_steps": 8, "request": [64, 16], "repeats": 8}
COLUMNS = (
    "removed",
    "variant",
    "perplexity",
    "over its float",
    "KL to dense",
    "KL to its float",
    "MB",
    "decode",
    "ideal",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--source", default="smollm2")
    parser.add_argument("--prune", type=int, nargs="+", default=[7, 5])
    parser.add_argument("--forms", nargs="+", default=FORMS)
    parser.add_argument("--block", type=int, help="inputs per scale; default: the largest that fits")
    parser.add_argument("--rounding", default="nearest")
    parser.add_argument("--head", default="keep")
    parser.add_argument("--perturb", type=float, default=0.0)
    parser.add_argument("--windows", type=int, default=12, help="held-out windows of 512 tokens")
    parser.add_argument("--no-speed", dest="speed", action="store_false")
    arguments = parser.parse_args()
    execution = Execution(device="cpu", say=print)
    source = perturbed(arguments, execution) if arguments.perturb else arguments.source
    for depth in arguments.prune:
        folder = folder_of(arguments, depth)
        for stage in ("calibrate", "export"):  # the same at every depth
            folder.adopt(stage, folder_of(arguments, arguments.prune[0]))
        row: dict[str, Any] = {"removed": depth} | {"perturbed": arguments.perturb, "head": arguments.head}
        row |= {"block": arguments.block, "rounding": arguments.rounding}
        recipe = recipe_of(arguments, source, depth, RUNNABLE)
        if arguments.speed:
            run(recipe, folder, execution, goal="bench")
            row["speed"] = speed(folder)
        recipe = recipe_of(arguments, source, depth, arguments.forms)
        run(recipe, folder, execution, goal="eval")
        row |= {"recipe_sha256": recipe.sha256, "spans": json.loads(folder.plan_path.read_text())["removed"]}
        row |= {"variants": quality(folder, recipe)}
        if arguments.speed:
            row["plans"] = plans(folder, arguments.forms, execution)
        keep(row)


def folder_of(arguments: argparse.Namespace, depth: int) -> RunFolder:
    how = f"{arguments.perturb:g}-{arguments.head}-{arguments.block or 'auto'}-{arguments.rounding}"
    return RunFolder(arguments.work / f"n{depth}-{how}")


def perturbed(arguments: argparse.Namespace, execution: Execution) -> str:
    """A folder of the model with every matrix perturbed."""
    target = arguments.work / f"perturbed-{arguments.perturb:g}"
    if not target.exists():
        loaded = models.load_model(arguments.source, "float32", execution)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in loaded.model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(1 + arguments.perturb * torch.randn_like(parameter))
        models.save_model(loaded, target)
    return str(target)


def recipe_of(arguments: argparse.Namespace, source: str, depth: int, forms: list[str]) -> Recipe:
    return parse_recipe(
        {
            "model": {"source": source},
            "calibration": {"source": "demo", "sequences": 32, "length": 512, "held_out_sequences": arguments.windows},
            "select": {"prune": depth},
            "recover": {"operators": ["ghost", BEST]},
            "quantize": {"format": forms} | {key: vars(arguments)[key] for key in ("head", "block", "rounding")},
            "build": {"runtimes": ["onnxruntime"], "providers": ["cpu"]},
            "bench": BENCH,
            "eval": {"onnx": False, "generate": 0},
        }
    )


def quality(folder: RunFolder, recipe: Recipe) -> dict[str, dict[str, Any]]:
    found = json.loads(folder.model_quality_path.read_text())
    pairs = {(d["variant"], d["minus"]): d["loss"] for d in found["differences"]}
    rows = {}
    for name in recipe.variants:
        figures = found["variants"][name]
        source = float_variant(name)
        row = {key: figures[key] for key in ("perplexity", "kl", "top1")}
        if name != source:
            loss = pairs[name, source]
            row |= {"kl_float": figures["kl_float"], "over_float": math.exp(loss["difference"])}
            row["over_float_interval"] = [math.exp(edge) for edge in loss["interval"]]
        data = folder.graph_path(name).with_suffix(".quantization.json")
        report = json.loads(data.read_text()) if name != source else None
        row["weight_bytes"] = report["weight_bytes_after"] if report else None
        rows[name] = row
    for name in recipe.quantized_variants:  # a float graph may keep its weights in another's file
        report = json.loads(folder.quantization_path(name).read_text())
        rows[float_variant(name)]["weight_bytes"] = report["weight_bytes_before"]
    return rows


def speed(folder: RunFolder) -> dict[str, Any]:
    bench = json.loads(folder.bench_path("onnxruntime").read_text())
    rows = {
        f"{c['variant']} over {c['against']}, {c['workload']}": {"speedup": c["speedup"], "ideal": c["ideal"]}
        for c in bench["comparisons"]
        if c["metric"] == "seconds"
    }
    medians = {f"{m['variant']}, {m['workload']}": m["summary"]["median"] for m in bench["measurements"]}
    perplexity = json.loads(folder.engine_quality_path.read_text())["variants"]
    return {
        "comparisons": rows,
        "medians": medians,
        "engines": perplexity,
        "card": bench["card"],
        "flags": bench["flags"],
    }


def plans(folder: RunFolder, forms: list[str], execution: Execution) -> dict[str, Any]:
    """Bytes of the plans of ghost, float and in every form, and what a quantised matrix takes of them per weight."""
    shape: dict[str, Any] = {"profiles": "single", "max_batch": 1, "max_tokens": 128, "max_past": 511}
    settings = BuildSection(runtimes=("tensorrt-rtx",), compute_capability=("SM120",), **shape)
    found: dict[str, Any] = {"version": runtimes.RUNTIMES["tensorrt-rtx"].availability().version}
    for variant in ("ghost", *(f"ghost.{form}" for form in forms)):
        target = folder.path / "plans" / variant
        engine = runtimes.build_engine("tensorrt-rtx", folder.graph_path(variant), target, variant, settings, execution)
        found[variant] = {"plan_bytes": engine.plan_bytes, "seconds": engine.build_seconds}
        if variant != "ghost":
            report = json.loads(folder.quantization_path(variant).read_text())
            rounded = [row for row in report["linears"] if row["form"]]
            weights = sum(math.prod(row["shape"]) for row in rounded)
            saved = found["ghost"]["plan_bytes"] - engine.plan_bytes
            found[variant] |= {"graph_bytes_per_weight": sum(row["bytes"] for row in rounded) / weights}
            found[variant] |= {"plan_bytes_per_weight": 4 - saved / weights}
    return found


def keep(row: dict[str, Any]) -> None:
    """Puts the row among the others and writes both files."""
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    key = ("removed", "perturbed", "head", "block", "rounding")
    rows = [{"rounding": "nearest"} | r for r in rows]
    rows = [r for r in rows if [r[k] for k in key] != [row[k] for k in key]] + [row]
    rows.sort(key=lambda r: (r["perturbed"], r["head"], r["block"] or 0, r["rounding"], r["removed"]))
    packages = {name: version(name) for name in ("ghostexport", "torch", "onnxruntime", "onnx-ir", "numpy")}
    write_json(RESULTS, {"cpu": platform.processor() or platform.machine(), "versions": packages, "rows": rows})
    write_bytes(RESULTS.with_suffix(".md"), table(rows).encode())


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["# Quantised variants of SmolLM2-135M", "", __doc__ or "", f"| {' | '.join(COLUMNS)} |", "|---" * 9 + "|"]
    for row in rows:
        label = f"{row['removed']}" + (f", perturbed {row['perturbed']:g}" if row["perturbed"] else "")
        label += "" if row["head"] == "keep" else f", head {row['head']}"
        label += f", block {row['block']}" if row["block"] else ""
        label += "" if row["rounding"] == "nearest" else f", {row['rounding']}"
        for name, v in row["variants"].items():
            over = v.get("over_float")
            low, high = v.get("over_float_interval", (0, 0))
            ratio = f"{over:.3f} [{low:.3f}, {high:.3f}]" if over else ""
            size = f"{v['weight_bytes'] / 1e6:.0f}" if v["weight_bytes"] else ""
            fast = row.get("speed", {}).get("comparisons", {}).get(f"{name} over dense, decode-b1-p128", {})
            decode = "{value:.2f} [{low:.2f}, {high:.2f}]".format(**fast["speedup"]) if fast else ""
            ideal = f"{fast['ideal']:.2f}" if fast and fast["ideal"] else ""
            kl_float = f"{v['kl_float']:.3f}" if "kl_float" in v else ""
            cells = (label, name, f"{v['perplexity']:.2f}", ratio, f"{v['kl']:.3f}", kl_float, size, decode, ideal)
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| removed | plan of | MB | bytes per quantised weight: graph | plan |", "|---|---|---|---|---|"]
    for row in rows:
        for name, plan in row.get("plans", {}).items():
            if name != "version":
                each = [
                    f"{plan[k]:.3f}" if k in plan else "" for k in ("graph_bytes_per_weight", "plan_bytes_per_weight")
                ]
                lines.append(f"| {row['removed']} | {name} | {plan['plan_bytes'] / 1e6:.0f} | {each[0]} | {each[1]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
