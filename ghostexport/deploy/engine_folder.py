"""Targets ``tensorrt`` and ``tensorrt-rtx``: the run's built engine, and one file that generates text with it."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ghostexport.deploy.bundle import Bundle
from ghostexport.deploy.selftest import GREEDY, Answer
from ghostexport.errors import RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.files import sha256_file, write_bytes, write_json
from ghostexport.runtimes.base import EngineFile
from ghostexport.runtimes.gpu import find_gpu
from ghostexport.runtimes.interface import decoder_feeds
from ghostexport.runtimes.nvinfer.profiles import shape_spec
from ghostexport.runtimes.sidecar import read_sidecar
from ghostexport.serving.speaker import limits_of

CODE, FACTS = "run.py", "run.json"
#: Runtime -> its module, and the vendor's command that times a plan.
MODULES = {"tensorrt": ("tensorrt", "trtexec"), "tensorrt-rtx": ("tensorrt_rtx", "tensorrt_rtx")}


def refusal(bundle: Bundle, runtime: str) -> str | None:
    """Why the variant does not fit, or None."""
    path = bundle.folder.sidecar_path(runtime, bundle.variant)
    if not path.is_file():
        return f"it has no {runtime} engine yet"
    engine = read_sidecar(path)
    if engine.graph_sha256 != sha256_file(bundle.graph):
        return f"its {runtime} engine is of another graph"
    if engine.flags["strip_plan"]:
        return f"its {runtime} engine was built with --strip-plan and holds no weights"
    known = {*decoder_feeds(np.zeros((1, 1), np.int64), 0), *dict(bundle.interface.kv)}
    if unknown := [t.name for t in engine.inputs if t.name not in known]:
        return f"{CODE} has no {', '.join(unknown)} to give"
    room = context_of(bundle, runtime)
    return None if room >= 2 * GREEDY else f"its {runtime} engine holds {room} tokens, too few to be tested"


def context_of(bundle: Bundle, runtime: str) -> int:
    """Tokens, prompt and answer together, that the engine of a variant holds."""
    engine = read_sidecar(bundle.folder.sidecar_path(runtime, bundle.variant))
    return int(limits_of(engine, bundle.codec.positions).context or 0)


def write(bundle: Bundle, output: Path, execution: Execution, runtime: str) -> None:
    """Copies plan and sidecar; writes :data:`CODE` and what it must know."""
    engine = read_sidecar(bundle.folder.sidecar_path(runtime, bundle.variant))
    write_engine(engine, bundle.interface.kv, bundle.codec.ends, context_of(bundle, runtime), output)


def write_engine(
    engine: EngineFile, kv: Sequence[tuple[str, str]], ends: Iterable[int], context: int, output: Path
) -> None:
    """The same of any engine.

    Args:
        kv: ``(past input, present output)`` names.
        ends: tokens that end an answer.
        context: tokens it holds.
        output: an existing folder.
    """
    for path in engine.files:
        shutil.copyfile(path, output / path.name)
    code = resources.files("ghostexport.deploy").joinpath("engine_run.py.txt").read_bytes()
    write_bytes(output / CODE, code)
    write_json(output / FACTS, _facts(engine, dict(kv)) | {"context": context, "ends": sorted(ends)})


def _facts(engine: EngineFile, cache: dict[str, str]) -> dict[str, Any]:
    tensors = {t.name: t for t in (*engine.inputs, *engine.outputs)}
    own = [t for name, t in tensors.items() if name not in cache and name not in cache.values()]
    most = {role: max(engine.largest(p, role) for p in engine.profiles) for role in ("tokens", "past")}
    most |= {"batch": 1, "total": most["tokens"] + most["past"]}
    profiles = sorted(_profiles(engine).items(), key=lambda named: engine.largest(named[0], "tokens"))
    return {
        "module": MODULES[engine.runtime][0],
        "built": f"{engine.runtime} {engine.version}, on {engine.device.get('name') or 'a machine without a GPU'}",
        "host_code": engine.flags["version_compatible"],
        "plans": dict(engine.sha256),
        "profiles": [place for _, place in profiles],
        "inputs": [t.name for t in engine.inputs],
        "tensors": {t.name: [t.dtype, t.dims] for t in tensors.values()},
        "cache": cache,
        "bytes": {t.name: t.nbytes(most) for t in own},
        "cache_bytes": {past: tensors[present].nbytes(most) for past, present in cache.items()},
        "chunk": most["tokens"],
    }


def _profiles(engine: EngineFile) -> dict[str, tuple[int, int, Any]]:
    """Of each profile the number of its plan, its index there, and its shapes."""
    return {
        name: (number, index, engine.profiles[name])
        for number, plan in enumerate(engine.sha256)
        for index, name in enumerate(engine.profiles_of(plan))
    }


def use(bundle: Bundle, runtime: str) -> str:
    """How the folder is run and timed, in Markdown."""
    engine = read_sidecar(bundle.folder.sidecar_path(runtime, bundle.variant))
    module, command = MODULES[runtime]
    names, switch = list(engine.sha256), "POLYGRAPHY_USE_TENSORRT_RTX=1 " if runtime == "tensorrt-rtx" else ""
    lines = [f"{switch}polygraphy inspect model {name} --model-type engine --show layers" for name in names]
    for plan, index, shapes in _profiles(engine).values():
        best = {name: triple[1] for name, triple in shapes.items()}
        lines.append(f"{command} --loadEngine={names[plan]} --useProfile={index} --shapes={shape_spec(best)}")
    first = engine.profiles[engine.profiles_of(names[0])[0]]
    shaped = " ".join(f"'{name}:[{','.join(map(str, triple[1]))}]'" for name, triple in first.items())
    lines.append(f"{switch}polygraphy run {names[0]} --model-type engine --trt --input-shapes {shaped}")
    return (
        f"Needs {runtime} {engine.version} on the machine that the plan is for, and nothing else of ghostexport:\n\n"
        f"```console\npip install {module}=={engine.version} cuda-python tokenizers numpy\n"
        'python run.py "Once upon a time" --max-new-tokens 64 --temperature 0.7 --top-p 0.9\n```\n\n'
        f"It continues a text. The engine in NVIDIA's own tools:\n\n```console\n" + "\n".join(lines) + "\n```"
    )


def run(folder: Path, prompts: Sequence[list[int]], count: int) -> list[Answer]:
    """See :data:`selftest.Runner`: the folder's own ``run.py``, on the GPU.

    Raises:
        RuntimeUnavailableError: there is no GPU here, or no bindings of CUDA.
    """
    if isinstance(gpu := find_gpu(), str):
        raise RuntimeUnavailableError(f"The engine runs on a GPU: {gpu}.", "Copy the folder to the machine with one.")
    spec = importlib.util.spec_from_file_location("ghost_engine_run", folder / CODE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        decoder = module.Decoder(folder)
    except ImportError as error:
        raise RuntimeUnavailableError(f"{CODE} cannot be run: {error}.", "pip install cuda-python") from None
    answers: list[Answer] = []
    for ids in prompts:
        decoder.restart()
        first = decoder.read(ids)
        tokens = [int(first.argmax())]
        while len(tokens) < count:
            tokens.append(int(decoder.read(tokens[-1:]).argmax()))
        answers.append((first, tokens))
    return answers
