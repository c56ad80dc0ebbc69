"""The command line: parses, calls one stage, prints. Errors become one message and an exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ghostexport.errors import GhostExportError, RecipeError

if TYPE_CHECKING:
    from ghostexport.recipe import Recipe
    from ghostexport.runfolder import RunFolder

app = typer.Typer(
    name="ghostexport",
    help="Remove decoder blocks (decoder layers) of an LLM, repair the cut in closed form, build engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
build = typer.Typer(help="Build engines.", no_args_is_help=True)
app.add_typer(build, name="build")

Target = Annotated[str, typer.Argument(help="Run folder, or a model (then with -o): Hub id, folder, .gguf, smollm2.")]
Run = Annotated[Path, typer.Argument(help="Run folder.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Run folder to create or continue.")]
Prune = Annotated[int | None, typer.Option(help="How many decoder blocks to remove.")]
Plan = Annotated[str | None, typer.Option(help="Spans to remove instead: [[10, 17]] half-open, or a plan.json.")]
Select = Annotated[str | None, typer.Option(help="Criterion that chooses the blocks.")]
OperatorNames = Annotated[list[str] | None, typer.Option("--operator", help="Recovery operator; repeatable.")]
Runtimes = Annotated[
    list[str] | None, typer.Option("--runtime", help="onnxruntime, tensorrt, tensorrt-rtx; repeatable.")
]
Dtype = Annotated[str | None, typer.Option(help="float32, float16 or bfloat16.")]
Calibration = Annotated[str | None, typer.Option(help="wikitext2, c4, ptb, demo, or a .txt/.jsonl/.parquet file.")]
Sequences = Annotated[int | None, typer.Option(help="Calibration sequences.")]
Length = Annotated[int | None, typer.Option(help="Tokens per sequence.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the calibration draw.")]
RecipeFile = Annotated[Path | None, typer.Option("--recipe", help="Recipe file; flags override it.")]
Device = Annotated[str, typer.Option(help="PyTorch device: auto, cpu, cuda, cuda:1.")]

STAGE_HELP = {
    "calibrate": "Draw the calibration and held-out sequences.",
    "select": "Choose the blocks to remove.",
    "recover": "Fit the operators.",
    "export": "Export the dense graph.",
    "verify": "Compare every graph with PyTorch.",
    "bench": "Measure quality and speed of the engines.",
}


def _stage_command(goal: str) -> Any:
    """The verb of one stage: the same flags everywhere, because each may change the recipe."""

    def command(
        target: Target,
        output: Output = None,
        prune: Prune = None,
        plan: Plan = None,
        select: Select = None,
        operator: OperatorNames = None,
        runtime: Runtimes = None,
        dtype: Dtype = None,
        calibration: Calibration = None,
        sequences: Sequences = None,
        length: Length = None,
        seed: Seed = None,
        recipe: RecipeFile = None,
        device: Device = "auto",
    ) -> None:
        flags = {
            "model": {"dtype": dtype},
            "calibration": {"source": calibration, "sequences": sequences, "length": length, "seed": seed},
            "select": {"criterion": select, "prune": prune, "spans": _spans(plan)},
            "recover": {"operators": operator},
            "build": {"runtimes": runtime},
        }
        _run_to(goal, target, output, recipe, flags, device)

    return command


for _goal, _help in STAGE_HELP.items():
    app.command(_goal, help=f"{_help} Runs the stages it needs.")(_stage_command(_goal))
build.command("engine", help="The main job: from a model to engines. Runs every missing stage.")(
    _stage_command("build")
)


@app.command()
def surgery(
    target: Annotated[str, typer.Argument(help="ONNX file of a decoder, or a run folder.")],
    output: Output = None,
    remove: Annotated[list[str] | None, typer.Option(help="Span START:STOP, half-open; repeatable.")] = None,
    plan: Plan = None,
    operator: Annotated[Path | None, typer.Option(help="Operator file (.safetensors).")] = None,
    self_contained: Annotated[bool, typer.Option(help="Write a data file of its own.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Report what would be done; write nothing.")] = False,
) -> None:
    """Cut blocks out of exported graphs and splice operators in."""
    if not target.endswith(".onnx"):
        _run_to("surgery", target, output, None, {}, "auto")
        return
    from ghostexport import show, standalone

    spans = [*_colon_spans(remove), *(_spans(plan) or ())]
    report = standalone.surgery(Path(target), output, spans, operator, self_contained=self_contained, dry_run=dry_run)
    show.print_surgery(report)


@app.command()
def inspect(
    graph: Annotated[Path, typer.Argument(help="ONNX file of a decoder.")],
    json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Show what surgery sees in a graph: producer, blocks, boundaries, KV cache, obstacles."""
    from ghostexport import show
    from ghostexport.surgery import inspect_graph

    show.print_graph(inspect_graph(graph), as_json=json)


@app.command()
def show(run: Annotated[Path, typer.Argument(help="Run folder, or an engine's sidecar JSON.")]) -> None:
    """Show the variants of a run, or one engine's sidecar."""
    from ghostexport import show as screen

    screen.print_run(run)


@app.command()
def doctor() -> None:
    """Show which runtimes and extras are usable here, and why not."""
    from ghostexport import show as screen

    screen.print_doctor()


def _run_to(
    goal: str, target: str, output: Path | None, recipe_file: Path | None, flags: dict[str, Any], device: str
) -> None:
    from ghostexport import pipeline
    from ghostexport import show as screen
    from ghostexport.recipe import Execution

    recipe, folder = resolve(target, output, recipe_file, flags)
    with screen.progress() as (progress, say):
        pipeline.run(recipe, folder, Execution(device=device, progress=progress, say=say), goal=goal)
    screen.print_run(folder.path, after=goal)


def resolve(
    target: str, output: Path | None, recipe_file: Path | None, flags: dict[str, Any]
) -> tuple[Recipe, RunFolder]:
    """The recipe and run folder that the arguments describe: flags > recipe file > run folder > defaults.

    Raises:
        RecipeError: something is missing or invalid.
        RunFolderError: the folder belongs to another model.
    """
    from ghostexport.recipe import parse_recipe, read_recipe
    from ghostexport.runfolder import RunFolder

    is_run = (Path(target) / "recipe.yaml").is_file()
    if not is_run and output is None:
        raise RecipeError(
            f"{target} is not a run folder (it has no recipe.yaml).",
            "To start from a model, name the run folder to create: -o RUN. To continue a run, give its folder.",
        )
    folder = RunFolder(output if output is not None else Path(target))
    stored = read_recipe(folder.recipe_path) if folder.recipe_path.is_file() else {}
    data = read_recipe(recipe_file) if recipe_file is not None else stored
    if not is_run:
        data = _merged(data, {"model": {"source": target}})
        folder.require_model(stored, target)
    if flags.get("select", {}).get("spans") is not None:
        data = _merged(data, {"select": {"prune": None}}, keep_none=True)
    elif flags.get("select", {}).get("prune") is not None:
        data = _merged(data, {"select": {"spans": None}}, keep_none=True)
    return parse_recipe(_merged(data, flags), str(recipe_file or "recipe")), folder


def _merged(data: dict[str, Any], changes: dict[str, Any], keep_none: bool = False) -> dict[str, Any]:
    """``data`` with the given (not None) values of ``changes`` put over it, section by section."""
    result = dict(data)
    for section, values in changes.items():
        given = {key: value for key, value in values.items() if keep_none or value is not None}
        if given:
            old = result.get(section)
            result[section] = {**old, **given} if isinstance(old, dict) else given
    return result


def _spans(plan: str | None) -> list[list[int]] | None:
    """``--plan``: JSON text, or a file holding it (a list of spans, or a plan.json)."""
    if plan is None:
        return None
    import json

    path = Path(plan)
    try:
        data = json.loads(path.read_text(encoding="utf-8") if path.is_file() else plan)
    except (ValueError, OSError) as error:
        raise RecipeError(
            f"--plan {plan!r} is neither JSON nor a readable file: {error}", "Example: --plan '[[10, 17]]'"
        ) from None
    spans = data.get("removed") if isinstance(data, dict) else data
    if not isinstance(spans, list):
        raise RecipeError(f"--plan {plan!r} holds no list of spans.", "Example: --plan '[[10, 17]]'")
    return spans


def _colon_spans(remove: list[str] | None) -> list[list[int]]:
    try:
        return [[int(part) for part in span.split(":")] for span in remove or ()]
    except ValueError:
        raise RecipeError(f"--remove {' '.join(remove or ())} is not START:STOP.", "Example: --remove 10:17") from None


def main() -> None:
    """Entry point of the ``ghostexport`` command."""
    try:
        app()
    except GhostExportError as error:
        typer.secho(f"error: {error}", err=True, fg="red" if sys.stderr.isatty() else None)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.echo("interrupted; finished stages are kept, run the same command to continue", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
