"""The commands that run several depths of one model, with the same text and one export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ghostexport.commands import telling
from ghostexport.commands.arguments import resolve

if TYPE_CHECKING:
    from ghostexport.execution import Execution
    from ghostexport.runfolder import RunFolder

app = typer.Typer()

Model = Annotated[str, typer.Argument(help="Model: Hub id, folder, .gguf, smollm2.")]
Output = Annotated[Path, typer.Option("-o", "--output", help="Folder for the runs, one below it per depth.")]
RecipeFile = Annotated[Path | None, typer.Option("--recipe", help="Recipe file.")]
Device = Annotated[str, typer.Option(help="PyTorch device: auto, cpu, cuda, cuda:1.")]

#: Depths that are tried where none is named, as shares of the model's blocks.
SHARES = (1 / 8, 1 / 4, 3 / 8)

#: Of ``fit``: what quality needs, and no more.
EVALUATED = {"onnx": False, "generate": 0}


@app.command(rich_help_panel=telling.RESULTS)
def sweep(
    model: Model,
    output: Output,
    prune: Annotated[list[int], typer.Option(help="How many blocks to remove; repeatable.")],
    recipe: RecipeFile = None,
    device: Device = "auto",
    json: telling.Json = False,
) -> None:
    """Benchmark several depths (everything else from the recipe): quality and speed over removed blocks."""
    from ghostexport.commands import screen
    from ghostexport.execution import Execution
    from ghostexport.files import write_bytes, write_json
    from ghostexport.report.page import render_sweep
    from ghostexport.report.runs import collect

    with screen.display() as callbacks:
        execution = Execution(device=device, **callbacks)
        found = collect([run.path for run in run_depths(model, output, prune, recipe, {}, "bench", execution)])
    screen.print_sweep(found, json)
    write_json(output / "sweep.json", found.to_json())
    write_bytes(output / "sweep.html", render_sweep(found).encode())


@app.command(rich_help_panel=telling.RESULTS)
def fit(
    model: Model,
    output: Output,
    memory: Annotated[str | None, typer.Option(help="Most memory of weights and KV cache: 4GB.")] = None,
    decode: Annotated[str | None, typer.Option(help="Least speed of one sequence: 40tok/s.")] = None,
    keep: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of the dense model's quality to keep: 0.95.")
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="Device: orin, orin-nano, thor, rtx30, rtx40, rtx50, cpu. Sets dtype and format.")
    ] = "cpu",
    bandwidth: Annotated[float | None, typer.Option(help="GB/s of the device, where it is another than usual.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens in the KV cache.")] = 1024,
    prune: Annotated[list[int] | None, typer.Option(help="Depth to try; repeatable. Default: three.")] = None,
    quality: Annotated[
        list[str] | None, typer.Option(help="Repair: paper, best, heal; repeatable. Default: the recipe's, or best.")
    ] = None,
    sibling: Annotated[str | None, typer.Option(help="The next smaller model, to compare with, dense.")] = None,
    recipe: RecipeFile = None,
    device: Device = "auto",
    json: telling.Json = False,
) -> None:
    """Choose depth, format and repair for a device: what fits its memory and speed, and keeps most of the model."""
    from ghostexport.benchmarking.budget import Budget, amount, candidates, choose, comparable
    from ghostexport.commands import screen
    from ghostexport.execution import Execution
    from ghostexport.files import write_bytes, write_json
    from ghostexport.first_recipe import count_blocks
    from ghostexport.hardware import find_hardware
    from ghostexport.recipe import QUALITIES
    from ghostexport.report.page import render_fit
    from ghostexport.validation import require_name

    target = find_hardware(hardware)
    budget = Budget(target.bytes_per_second(bandwidth), context, amount(memory), amount(decode), keep)
    names = quality or ([] if recipe else ["best"])
    levels = [QUALITIES[require_name(name, QUALITIES, "quality")][0] for name in names]
    flags: dict[str, Any] = target.recipe | {"recover": {"operators": levels or None}, "eval": EVALUATED}
    counts = prune or sorted({max(1, round(share * count_blocks(model))) for share in SHARES})
    with screen.display() as callbacks:
        execution = Execution(device=device, **callbacks)
        execution.say(f"bandwidth: {budget.bandwidth / 1e9:.0f} GB/s, {target.whose_bandwidth(bandwidth)}")
        runs = run_depths(model, output, counts, recipe, flags, "eval", execution)
        found = [candidate for run in runs for candidate in candidates(run, budget)]
        if sibling is not None:
            flags["recover"] = {"operators": ["none"]}
            (other,) = run_depths(sibling, output / "sibling", [1], recipe, flags, "eval", execution)
            if comparable(runs[0], other, execution):
                dense = runs[0].read().model_quality["variants"]["dense"]
                found += [c for c in candidates(other, budget, dense) if c.removed == 0]
    choice = choose(budget, found)
    write_json(output / "fit.json", choice.to_json())
    write_bytes(output / "fit.html", render_fit(choice, target.title).encode())
    screen.print_fit(choice, target.title, json)
    choice.require_chosen()


def run_depths(
    model: str,
    output: Path,
    counts: list[int],
    recipe: Path | None,
    flags: dict[str, Any],
    goal: str,
    execution: Execution,
) -> list[RunFolder]:
    """Runs every depth to ``goal`` in a folder of its own; text and export of the first serve the others.

    Raises:
        GhostExportError: as the stages.
    """
    from ghostexport import pipeline
    from ghostexport.files import write_bytes

    runs: list[RunFolder] = []
    for count in sorted(set(counts)):
        resolved, run = resolve(model, output / f"prune-{count}", recipe, flags | {"select": {"prune": count}})
        write_bytes(run.recipe_path, resolved.to_yaml().encode())
        for stage in ("calibrate", "export") if runs else ():
            run.adopt(stage, runs[0])
        pipeline.run(resolved, run, execution, goal=goal)
        runs.append(run)
    return runs
