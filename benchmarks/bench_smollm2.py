"""SmolLM2-135M, n = 5, 7, 11: dense / pruned / linearpatch-rotate / ghost on ONNX Runtime, fp32, this CPU.

    python benchmarks/bench_smollm2.py --work RUNS [--prune 5 7 11] [--source smollm2] [--sequences 32] [--length 512]
    python benchmarks/bench_smollm2.py --work RUNS --prune 7 --name smollm2-kinds --operators ghost ghost-weighted ...
    python benchmarks/bench_smollm2.py --work RUNS --pages        # today's pages of the committed figures

Runs the pipeline once per depth into ``RUNS/n<depth>`` (finished stages are kept), then writes per depth the
bench JSON, ``engine_quality.json``, the recipe and the report into ``benchmarks/results/NAME-n<depth>/``, and the sweep
over depths into ``benchmarks/results/NAME-sweep.json`` and ``.html``. Run it on a quiet machine: the report flags other
load.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from ghostexport.execution import Execution
from ghostexport.files import write_bytes, write_json
from ghostexport.pipeline import run
from ghostexport.recipe import parse_recipe, read_recipe
from ghostexport.report.page import render_sweep, write_report
from ghostexport.report.runs import Sweep, collect
from ghostexport.report.table import sentences
from ghostexport.runfolder import RunFolder

RESULTS = Path(__file__).parent / "results"
BENCH = {"prefill_tokens": [64, 256], "decode_past": [128, 512], "decode_steps": 8, "request": [64, 16]}
MEASURED = ("bench/onnxruntime.json", "engine_quality.json")
BENCH |= {"repeats": 10, "warmup": 1, "eval_tokens": 4096}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where the run folders go (1.5 GB per depth)")
    parser.add_argument("--prune", type=int, nargs="+", default=[5, 7, 11])
    parser.add_argument("--source", default="smollm2", help="model: smollm2, or a local folder of it")
    parser.add_argument("--name", default="smollm2", help="of the results")
    parser.add_argument("--operators", nargs="+", default=["ghost", "linearpatch-rotate"])
    parser.add_argument("--calibration", default="demo")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=BENCH["repeats"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--pages", action="store_true", help="measure nothing: today's template, committed figures")
    arguments = parser.parse_args()
    if arguments.pages:
        render_pages(arguments.results, arguments.work)
        return
    folders = []
    for depth in arguments.prune:
        folder = RunFolder(arguments.work / f"n{depth}")
        calibration = {k: getattr(arguments, k) for k in ("sequences", "length")} | {"source": arguments.calibration}
        recipe = parse_recipe(
            {
                "model": {"source": arguments.source},
                "calibration": calibration,
                "select": {"prune": depth},
                "recover": {"operators": arguments.operators},
                "build": {"runtimes": ["onnxruntime"], "providers": ["cpu"]},
                "bench": BENCH | {"repeats": arguments.repeats},
            }
        )
        write_bytes(folder.recipe_path, recipe.to_yaml().encode())
        for stage in ("calibrate", "export"):  # the same at every depth
            folder.adopt(stage, RunFolder(arguments.work / f"n{arguments.prune[0]}"))
        run(recipe, folder, Execution(device="cpu", say=print), goal="bench")
        folders.append(folder.path)
        publish(folder.path, arguments.results / f"{arguments.name}-n{depth}")
    if len(folders) == 1:
        return
    sweep = write_sweep(folders, arguments.results / f"{arguments.name}-sweep")
    for depth, cells in sweep.table():
        print(f"n = {depth}: " + ", ".join(f"{v} {c}" for v, c in zip(sweep.variants, cells, strict=True)))


def write_sweep(folders: list[Path], target: Path) -> Sweep:
    """Writes the figures over the depths, and their page."""
    sweep = collect(folders)
    write_json(target.with_suffix(".json"), sweep.to_json())
    write_bytes(target.with_suffix(".html"), render_sweep(sweep).encode())
    return sweep


def render_pages(results: Path, work: Path) -> None:
    """Makes the committed runs again up to their engines, and their pages with the committed figures."""
    kept = sorted((path.parent for path in results.glob("smollm2-*/recipe.yaml")), key=lambda path: len(path.name))
    folders = [RunFolder(work / path.name) for path in kept]
    for folder, path in zip(folders, kept, strict=True):
        for stage in ("calibrate", "export"):  # the same for all
            folder.adopt(stage, folders[0])
        run(parse_recipe(read_recipe(path / "recipe.yaml")), folder, Execution(device="cpu", say=print), goal="build")
        plan, committed = folder.read_plan(), json.loads((path / "plan.json").read_text(encoding="utf-8"))
        assert plan.to_json()["removed"] == committed["removed"], f"{path.name}: another plan"
        for name in MEASURED:
            (folder.path / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path / Path(name).name, folder.path / name)
        write_report(folder)
        shutil.copyfile(folder.path / "report.html", path / "report.html")
    depths = [folder.path for folder in folders if folder.path.name.startswith("smollm2-n")]
    write_sweep(depths, results / "smollm2-sweep")


def publish(run_folder: Path, target: Path) -> None:
    """Copies what belongs into the repository: figures and recipe, not weights."""
    target.mkdir(parents=True, exist_ok=True)
    for name in (*MEASURED, "recipe.yaml", "plan.json", "report.html"):
        shutil.copyfile(run_folder / name, target / Path(name).name)
    for sentence in sentences(json.loads((target / "onnxruntime.json").read_text(encoding="utf-8"))):
        print(sentence)


if __name__ == "__main__":
    main()
