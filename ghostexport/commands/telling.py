"""The commands that run no stage: they begin a recipe, or tell what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()
RESULTS = "Results"

Run = Annotated[Path, typer.Argument(help="Run folder.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


@app.command()
def init(
    model: Annotated[str, typer.Argument(help="Model: Hub id, folder, .gguf, smollm2.")],
    hardware: Annotated[str, typer.Option(help="Device: orin, orin-nano, thor, rtx30, rtx40, rtx50, cpu.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Recipe file to write.")] = Path("ghostexport.yaml"),
    prune: Annotated[int | None, typer.Option(help="How many blocks to remove; default: a sixth.")] = None,
) -> None:
    """Write a recipe for a model on a device, with the reason for every choice."""
    from ghostexport.first_recipe import write_first_recipe

    write_first_recipe(output, model, hardware, prune)
    typer.echo(f"{output}\nghostexport build engine {model} -o RUN --recipe {output}")


@app.command()
def estimate(
    model: Annotated[str, typer.Argument(help="Model: Hub id, folder, .gguf, smollm2; or a config.json alone.")],
    prune: Annotated[int | None, typer.Option(help="How many decoder blocks to remove.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Recipe file; flags override it.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, float16 or bfloat16.")] = None,
    runtime: Annotated[list[str] | None, typer.Option(help="onnxruntime, tensorrt, tensorrt-rtx; repeatable.")] = None,
    quality: Annotated[str | None, typer.Option(help="paper, best, or heal.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the run would be.")] = Path(),
    memory: Annotated[float | None, typer.Option(help="GB of free memory; default: what is free here.")] = None,
    device: Annotated[str, typer.Option(help="PyTorch device: auto, cpu, cuda, split.")] = "auto",
    json: Json = False,
) -> None:
    """Say what every stage needs of memory, disk and time, before a weight is read; exit code 1: it will not fit."""
    from ghostexport.commands import screen
    from ghostexport.commands.flags import merged
    from ghostexport.execution import Execution
    from ghostexport.recipe import parse_recipe, read_recipe
    from ghostexport.resolution import config_of, resolve_machine
    from ghostexport.sizing.estimate import estimate as judge_all

    given = {
        "model": {"source": model, "dtype": dtype},
        "select": {"prune": prune},
        "build": {"runtimes": runtime},
        "recover": {"quality": quality},
    }
    data = merged(read_recipe(recipe) if recipe is not None else {}, given)
    free = None if memory is None else int(memory * 1e9)
    resolved = resolve_machine(parse_recipe(data, str(recipe or "recipe")), Execution(device=device), True, free)
    verdicts = judge_all(resolved, config_of(resolved), output, free, device)
    screen.print_estimate(verdicts, json)
    if any(verdict.lacks for verdict in verdicts):
        raise typer.Exit(1)


@app.command()
def doctor(json: Json = False) -> None:
    """Show which runtimes and extras are usable here, and why not."""
    from ghostexport.commands import screen

    screen.print_doctor(json)


@app.command(rich_help_panel=RESULTS)
def show(
    run: Annotated[Path, typer.Argument(help="Run folder, or an engine's sidecar JSON.")], json: Json = False
) -> None:
    """Show the variants of a run, or one engine's sidecar."""
    from ghostexport.commands import screen

    screen.print_run(run, json)


@app.command(rich_help_panel=RESULTS)
def explain(run: Run, json: Json = False) -> None:
    """Say in plain words what a run removed, cost and bought, what limits it and what to try next."""
    from ghostexport.commands import screen

    screen.print_explanation(run, json)


@app.command(rich_help_panel=RESULTS)
def compare(first: Run, second: Run, json: Json = False) -> None:
    """Put the benchmarks of two runs (two devices, two depths) side by side."""
    from ghostexport.commands import screen

    screen.print_comparison(first, second, json)


@app.command(rich_help_panel=RESULTS)
def report(run: Run) -> None:
    """Write RUN/report.html from what the finished stages left."""
    from ghostexport.report.page import write_report
    from ghostexport.runfolder import RunFolder

    typer.echo(write_report(RunFolder(run)))
