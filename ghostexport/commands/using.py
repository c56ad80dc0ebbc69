"""The commands on what a run made: talking to it and carrying it away. ``cli.py`` adds them to the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ghostexport.errors import RecipeError

if TYPE_CHECKING:
    from ghostexport.execution import Execution
    from ghostexport.serving.speaker import Request

app = typer.Typer()

Run = Annotated[Path, typer.Argument(help="Run folder.")]
Variant = Annotated[str | None, typer.Option(help="dense, pruned, ghost, ...; default: the first repaired one.")]
Runtime = Annotated[str | None, typer.Option(help="onnxruntime, tensorrt, tensorrt-rtx; default: the best that runs.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens of one answer.")]
Temperature = Annotated[float, typer.Option(help="0: always the most likely token.")]
TopP = Annotated[float, typer.Option(help="Draw from the most likely tokens that reach this probability.")]
TopK = Annotated[int, typer.Option(help="Draw from the k most likely tokens; 0: from all.")]
Penalty = Annotated[float, typer.Option("--repetition-penalty", help="Above 1: tokens seen before are less likely.")]
Seed = Annotated[int, typer.Option(help="Of the draws.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends an answer; repeatable.")]


@app.command()
def generate(
    run: Run,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    variant: Variant = None,
    runtime: Runtime = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
) -> None:
    """Continue a text with a variant of a run."""
    from ghostexport.commands import screen
    from ghostexport.serving.speaker import open_speaker

    request = _request(max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed, stop)
    with _saying() as execution:
        speaker = open_speaker(run, variant, runtime, execution)
    screen.print_pieces(speaker.continue_text(prompt, request))


@app.command()
def chat(
    run: Run,
    variant: Variant = None,
    runtime: Runtime = None,
    side_by_side: Annotated[
        tuple[str, str] | None, typer.Option(help="Two variants that both answer: dense ghost.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = 0,
    stop: Stop = None,
) -> None:
    """Converse with a variant of a run, or with two at once; an empty line or Ctrl-D ends it."""
    from ghostexport.commands import screen
    from ghostexport.serving.speaker import open_speaker

    if variant is not None and side_by_side is not None:
        raise RecipeError("--variant and --side-by-side both name variants.", "Give one of them.")
    request = _request(max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed, stop)
    with _saying() as execution:
        speakers = [open_speaker(run, name, runtime, execution) for name in side_by_side or (variant,)]
    start = [{"role": "system", "content": system}] if system else []
    told: list[list[dict[str, Any]]] = [list(start) for _ in speakers]
    while line := _line():
        for messages in told:
            messages.append({"role": "user", "content": line})
        answers = [speaker.reply(messages, request) for speaker, messages in zip(speakers, told, strict=True)]
        texts = [screen.print_pieces(answers[0])] if len(answers) == 1 else [answer.text() for answer in answers]
        if len(answers) > 1:
            screen.print_beside([speaker.name for speaker in speakers], texts)
        for messages, text in zip(told, texts, strict=True):
            messages.append({"role": "assistant", "content": text})


@app.command()
def serve(
    run: Run,
    variant: Variant = None,
    runtime: Runtime = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port.")] = 8000,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait or run; one more is turned away.")] = 8,
    allow_remote: Annotated[bool, typer.Option(help="Listen beyond this machine, without a password.")] = False,
) -> None:
    """Serve a variant of a run to OpenAI clients: /v1/chat/completions, /v1/completions, /v1/models."""
    from ghostexport.serving.server import make_app, require_local
    from ghostexport.serving.speaker import open_speaker

    require_local(host, allow_remote)
    with _saying() as execution:
        server = make_app(open_speaker(run, variant, runtime, execution), queue)
    import uvicorn

    uvicorn.run(server, host=host, port=port)


@app.command()
def pack(
    run: Run,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Archive to write; default: RUN.zip.")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="Variant to pack; repeatable; default: all.")] = None,
) -> None:
    """Write variants of a run into one file for a device; there: ghostexport build engine FILE."""
    from ghostexport.packing import pack

    typer.echo(pack(run, output, variant or ()))


@app.command()
def deploy(
    run: Run,
    target: Annotated[str, typer.Option(help="transformers, vllm, genai, gguf, tensorrt-rtx, edge-llm, ...")],
    output: Annotated[Path, typer.Option("-o", "--output", help="New folder to write.")],
    variant: Variant = None,
    exported: Annotated[Path | None, typer.Option(help="Edge-LLM's own export of the whole model, to be cut.")] = None,
) -> None:
    """Write a variant of a run as the folder that a runtime expects, and test it where the runtime is installed."""
    from ghostexport.deploy import deploy

    with _saying() as execution:
        said = deploy(run, target, output, variant, execution, exported)
    typer.echo(f"{output}\n{said}")


@app.command()
def selftest(folder: Annotated[Path, typer.Argument(help="Folder that deploy wrote.")]) -> None:
    """Compare a deployed folder's answers, on its runtime, with those of the verified graph."""
    from ghostexport.deploy import selftest

    typer.echo(selftest(folder))


def build_graph(graph: Path, output: Path | None, flags: dict[str, Any], how: dict[str, Any]) -> None:
    """Builds engines of any decoder graph, an operator file spliced in first where one is named."""
    from ghostexport import api
    from ghostexport.commands import screen
    from ghostexport.execution import Execution

    given = {key: value for key, value in flags["build"].items() if value is not None}
    runtimes, files = given.pop("runtimes", None) or (None,), flags["recover"]["operators"] or ()
    built = []
    with screen.display() as callbacks:
        execution = Execution(**how, **callbacks)
        for file in files:
            made = (output or graph.parent) / f"{graph.stem}-{Path(file).stem}.onnx"
            graph = Path(api.surgery(graph, Path(file), made).path or made)
        for name in runtimes:
            target = None if output is None or name is None else output / name / graph.stem
            built.append(api.build(graph, target, runtime=name, execution=execution, **given))
    for engine in built:
        screen.print_run(engine.sidecar)


def _line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


@contextlib.contextmanager
def _saying() -> Iterator[Execution]:
    """An execution whose lines appear on the screen."""
    from ghostexport.commands import screen
    from ghostexport.execution import Execution

    with screen.display() as callbacks:
        yield Execution(**callbacks)


def _request(
    tokens: int, temperature: float, top_p: float, top_k: int, penalty: float, seed: int, stop: list[str] | None
) -> Request:
    from ghostexport.serving.generation import Sampling
    from ghostexport.serving.speaker import Request

    return Request(tokens, tuple(stop or ()), Sampling(temperature, top_k, top_p, penalty, seed))
