"""The command line: parses, calls one stage, prints. Errors become one message and an exit code."""

from __future__ import annotations

import inspect as python_inspect
import os
import signal
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from ghostexport import execution
from ghostexport.commands import depths, telling, using
from ghostexport.commands.arguments import resolve, spans_of
from ghostexport.commands.flags import COMPAT, FLAGS, PANELS, VERBS, colon_spans, merged
from ghostexport.errors import GhostExportError, RecipeError, RuntimeUnavailableError, explained_at

#: The exit code that Typer gives an interrupted command.
INTERRUPTED = 130

app = typer.Typer(
    name="ghostexport",
    no_args_is_help=True,
    epilog=f"Exit codes: 0 done, 1 a check failed, 2 it cannot be done as asked, {INTERRUPTED} interrupted.",
    pretty_exceptions_enable=False,
)
build = typer.Typer(help="Build engines.", no_args_is_help=True)
app.add_typer(build, name="build", rich_help_panel="Stages, in order")

HOW = "How it runs"
GRAPHS = "Graphs and engines, of any producer"


@app.callback()
def talks(
    quiet: Annotated[bool, typer.Option("--quiet", help="Results only: no progress, no remarks.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Every step, and where an error came from.")] = False,
) -> None:
    """Remove decoder blocks (decoder layers) of an LLM, repair the cut in closed form, build engines."""
    execution.talk.quiet, execution.talk.verbose = quiet, verbose


def _say(lines: Iterable[str]) -> None:
    if not execution.talk.quiet:
        typer.echo("\n".join(lines), err=True)


Target = Annotated[str, typer.Argument(help="Run folder, or a model (then with -o): Hub id, folder, .gguf, smollm2.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Run folder to create or continue.")]
RecipeFile = Annotated[
    Path | None, typer.Option("--recipe", help="Recipe file; flags override it.", rich_help_panel=HOW)
]
Device = Annotated[str, typer.Option(help="PyTorch device: auto, cpu, cuda, cuda:1.", rich_help_panel=HOW)]
Streaming = Annotated[
    bool | None,
    typer.Option(
        help="Leave the weights in their files and go through the model block by block; else where memory is short.",
        rich_help_panel=HOW,
        show_default=False,
    ),
]
Plan = Annotated[
    str | None,
    typer.Option(help="Spans to remove: [[10, 17]] half-open, or a plan.json.", rich_help_panel=PANELS["select"]),
]
TimingCache = Annotated[
    Path | None,
    typer.Option("--timing-cache", help="TensorRT: file of timings that builds extend.", rich_help_panel=HOW),
]
To = Annotated[
    str | None,
    typer.Option("--to", help="engine, or checkpoint: of folded operators, nothing exported.", rich_help_panel=HOW),
]
KVPattern = Annotated[
    list[str] | None,
    typer.Option(help="Names of KV inputs or outputs, such as cache_k_{}; {2b}, {2b+1} count tensors. Repeatable."),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        help="Device to build for: orin, orin-nano, thor, rtx30, rtx40, rtx50, cpu. Sets dtype, format, runtime."
    ),
]
Compat = Annotated[
    str | None,
    typer.Option(
        help=f"All switches as a repository has them: {', '.join(COMPAT)}.", rich_help_panel=PANELS["recover"]
    ),
]


def _stage_command(goal: str, sections: tuple[str, ...]) -> Any:
    """The verb of one stage, with a flag for every recipe key of the sections it reads."""
    flags = {flag: entry for flag, entry in FLAGS.items() if entry.section in sections}

    def command(**values: Any) -> None:
        from ghostexport.validation import require_name

        given: dict[str, dict[str, Any]] = {}
        for flag, entry in flags.items():
            given.setdefault(entry.section, {})[entry.key] = entry.read(values[flag])
        if values.get("quality") is not None and values.get("operator"):
            raise RecipeError("--quality and --operator both name the operators to fit.", "Give one of them.")
        if values.get("plan") is not None:
            given["select"]["spans"] = spans_of(values["plan"])
        if values.get("compat") is not None:
            require_name(values["compat"], COMPAT, "repository")
            given = merged(COMPAT[values["compat"]], given)
        if values.get("hardware") is not None:
            from ghostexport.hardware import find_hardware

            device = find_hardware(values["hardware"])
            device.require(values["quantize"] or ())
            _say(device.lines)
            given = merged(device.recipe, given)
        last = goal
        if values.get("to") is not None:
            ends = {"engine": goal, "checkpoint": "checkpoint"}
            last = ends[require_name(values["to"], ends, "goal")]
        how = {name: values.get(name) for name in ("device", "streaming", "timing_cache")}
        _run_to(last, values["target"], values["output"], values["recipe"], given, values["json"], **how)

    own: dict[str, tuple[Any, Any]] = {"target": (Target, ...), "output": (Output, None)}
    own |= {"plan": (Plan, None)} if "select" in sections else {}
    own |= {"hardware": (Hardware, None)} if {"quantize", "build"} <= set(sections) else {}
    own |= {"compat": (Compat, None)} if {"calibration", "select"} <= set(sections) else {}
    own |= {flag: (entry.annotation(flag), None) for flag, entry in flags.items()}
    own |= {
        "recipe": (RecipeFile, None),
        "device": (Device, "auto"),
        "streaming": (Streaming, None),
        "json": (telling.Json, False),
    }
    own |= {"timing_cache": (TimingCache, None), "to": (To, None)} if goal == "build" else {}
    command.__annotations__ = {name: annotation for name, (annotation, _) in own.items()}
    command.__signature__ = python_inspect.Signature(  # type: ignore[attr-defined]
        [
            python_inspect.Parameter(
                name,
                python_inspect.Parameter.KEYWORD_ONLY,
                default=python_inspect.Parameter.empty if default is ... else default,
                annotation=annotation,
            )
            for name, (annotation, default) in own.items()
        ]
    )
    return command


for _verb in VERBS:
    _group = build if _verb.name == "engine" else app
    _group.command(_verb.name, help=_verb.help, rich_help_panel="Stages, in order")(
        _stage_command(_verb.stage, _verb.sections)
    )

for _more in (telling, depths, using):
    app.registered_commands += _more.app.registered_commands


@app.command(rich_help_panel=GRAPHS)
def surgery(
    target: Annotated[str, typer.Argument(help="ONNX file of a decoder, or a run folder.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder to write into.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Span START:STOP, half-open; repeatable.")] = None,
    plan: Plan = None,
    operator: Annotated[Path | None, typer.Option(help="Operator file (.safetensors).")] = None,
    weights: Annotated[Path | None, typer.Option(help="Checkpoint of the model without some blocks, tuned.")] = None,
    drop: Annotated[bool, typer.Option("--drop", help="Take out the operators that the graph has.")] = False,
    read: Annotated[Path | None, typer.Option(help="Write the operators that the graph has to this file.")] = None,
    self_contained: Annotated[bool, typer.Option(help="Write a data file of its own.")] = False,
    kv_pattern: KVPattern = None,
    dry_run: Annotated[bool, typer.Option(help="Report what would be done; write nothing.")] = False,
    json: telling.Json = False,
) -> None:
    """Cut blocks out of an exported graph and splice operators in (or run the surgery stage of a run folder)."""
    if not target.endswith(".onnx"):
        _run_to("surgery", target, output, None, {}, json)
        return
    from ghostexport import api
    from ghostexport.commands import graph_screen
    from ghostexport.files import write_bytes
    from ghostexport.operators import load_operators
    from ghostexport.plan import PrunePlan
    from ghostexport.surgery import read_operators

    operators = load_operators(operator) if operator is not None else None
    spans = [*colon_spans(remove), *(spans_of(plan) or ())]
    if read is not None:
        write_bytes(read, read_operators(Path(target)).to_bytes())
    if operators is None and not spans and weights is None and not drop:
        if read is not None:
            return
        raise RecipeError("Nothing to remove.", "Give --remove 10:17, --plan '[[10, 17]]', --operator or --weights.")
    if operators is not None and spans:
        operators.require_plan(PrunePlan.from_spans(operators.plan.num_blocks, spans))
    if output is None and not dry_run:
        raise RecipeError("surgery writes a new graph.", "Name a folder for it with -o, or use --dry-run.")
    graph = Path(target)
    name = operators.name if operators is not None else "pruned" if weights is None else "tuned"
    report = api.surgery(
        graph,
        operators or spans or None,
        (output or graph.parent) / f"{graph.stem}-{name}.onnx",
        weights=weights,
        drop=drop,
        self_contained=self_contained,
        kv_pattern=kv_pattern,
        dry_run=dry_run,
    )
    graph_screen.print_surgery(report, json)


@app.command(rich_help_panel=GRAPHS)
def quantize(
    target: Annotated[str, typer.Argument(help="ONNX file of a float decoder, or a run folder.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder to write into.")] = None,
    form: Annotated[list[str] | None, typer.Option("--format", help="int4 (default), int8, fp8, mxfp8, nvfp4.")] = None,
    block: Annotated[int | None, typer.Option(help="Inputs per scale; default: what divides every weight.")] = None,
    scales: Annotated[str | None, typer.Option(help="search (default), or absmax.")] = None,
    rounding: Annotated[str | None, typer.Option(help="nearest (default), or gptq.")] = None,
    head: Annotated[str | None, typer.Option(help="Head and tied embedding: keep (default), int8, same.")] = None,
    activations: Annotated[str | None, typer.Option(help="none (default); inputs too: static, dynamic.")] = None,
    smooth: Annotated[float | None, typer.Option(help="SmoothQuant's exponent for rounded inputs.")] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="A run's calibration file: scales are weighted by what the graph sees on it.")
    ] = None,
    convert: Annotated[bool, typer.Option("--convert", help="Rewrite a graph that others quantised, exactly.")] = False,
    json: telling.Json = False,
) -> None:
    """Quantise the weights of an exported graph (or run the quantize stage of a run folder)."""
    given: dict[str, object] = {"block": block, "scales": scales, "rounding": rounding, "head": head}
    given |= {"activations": activations, "smooth": smooth}
    if not target.endswith(".onnx"):
        _run_to("quantize", target, output, None, {"quantize": {"format": form} | given}, json)
        return
    from ghostexport import api
    from ghostexport.commands import graph_screen, screen
    from ghostexport.execution import Execution
    from ghostexport.recipe import QuantizeSection

    if output is None:
        raise RecipeError("quantize writes a new graph.", "Name a folder for it with -o.")
    if convert:
        typer.echo(api.convert(target, output / f"{Path(target).stem}.onnx"))
        return
    settings = QuantizeSection.model_validate({key: value for key, value in given.items() if value is not None})
    with screen.display() as callbacks:
        for name in form or ["int4"]:
            made = output / f"{Path(target).stem}.{name}.onnx"
            report = api.quantize(
                target,
                made,
                name,
                calibration=calibration,
                settings=settings,
                execution=Execution(**callbacks),
            )
            graph_screen.print_quantization(report, json)


@app.command(rich_help_panel=GRAPHS)
def split(
    graph: Annotated[Path, typer.Argument(help="ONNX file of a decoder that takes token ids.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write into.")],
) -> None:
    """Take the token embedding out of a graph: the decoder then takes vectors, of tokens as of images and sound."""
    from ghostexport import api

    for made in api.split(graph, output):
        typer.echo(made)


@app.command(rich_help_panel=GRAPHS)
def inspect(
    graph: Annotated[Path, typer.Argument(help="ONNX file of a decoder.")],
    json: telling.Json = False,
    kv_pattern: KVPattern = None,
) -> None:
    """Show what surgery sees in a graph: producer, blocks, boundaries, KV cache, obstacles."""
    from ghostexport.commands import graph_screen
    from ghostexport.surgery import inspect_graph

    graph_screen.print_graph(inspect_graph(graph, ",".join(kv_pattern or ()) or None), as_json=json)


@app.command(rich_help_panel=GRAPHS)
def swap(
    engine: Annotated[Path, typer.Argument(help="An engine's sidecar JSON in engines/<runtime>/.")],
    operator: Annotated[Path, typer.Option(help="Operator file (.safetensors) to put in.")],
    json: telling.Json = False,
) -> None:
    """Put another operator into a built engine, without a rebuild."""
    from ghostexport.commands import screen
    from ghostexport.execution import Execution
    from ghostexport.runtimes import swap_operator

    with screen.display() as callbacks:
        swapped = swap_operator(engine, operator, execution=Execution(**callbacks))
    screen.print_run(swapped.sidecar, json)


def _run_to(
    goal: str,
    target: str,
    output: Path | None,
    recipe_file: Path | None,
    flags: dict[str, Any],
    json: bool = False,
    **how: Any,
) -> None:
    from ghostexport import distributed, pipeline
    from ghostexport.commands import screen
    from ghostexport.execution import Execution

    if goal == "build" and target.endswith(".onnx"):
        using.build_graph(Path(target), output, flags, how)
        return
    recipe, folder = resolve(target, output, recipe_file, flags)
    with distributed.joined(folder, goal) as own:
        how = how | {"device": distributed.own_device(how.get("device", "auto"))}
        if not distributed.is_first():
            pipeline.run(recipe, own, Execution(**how), goal=goal)
            return
        with screen.display() as callbacks:
            pipeline.run(recipe, own, Execution(**how, **callbacks), goal=goal)
    screen.print_run(folder.path, json)


def _complain(message: str, kind: type[GhostExportError]) -> None:
    colour = "red" if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else None
    typer.secho(f"error: {message}\nsee {explained_at(kind)}", err=True, fg=colour)


def main() -> None:
    """Entry point of the ``ghostexport`` command."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's stop cleans up as Ctrl-C does
    try:
        app()
    except GhostExportError as error:
        if execution.talk.verbose:
            traceback.print_exc()
        _complain(str(error), type(error))
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        needed = f"This needs {error.name}, which a device has not.\npip install 'ghostexport[host]'"
        _complain(needed, RuntimeUnavailableError)
        sys.exit(RuntimeUnavailableError.exit_code)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            typer.echo("interrupted; finished stages are kept, run the same command to continue", err=True)
        raise


if __name__ == "__main__":
    main()
