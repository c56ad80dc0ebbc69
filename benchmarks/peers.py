"""What a user would pick instead, on the same machine, interleaved in the same run.

    python benchmarks/peers.py RUN MODEL [--optimum-python VENV/bin/python] [--work DIR] [-o FILE.json]

RUN is a run folder with ONNX Runtime engines (dense, ghost), MODEL the Hugging Face folder it was made from. Peers:

* ``optimum``: the graph of optimum's exporter (from an environment of its own) on ONNX Runtime, our session settings;
* ``ort-genai``: the graph of ONNX Runtime GenAI's builder (fp32, cpu) in its own runtime;
* ``torch-eager``: transformers with ``DynamicCache`` and SDPA attention;
* ``torch-compile``: the same with ``StaticCache`` and ``torch.compile``.

A peer that cannot be had here is left out and the reason is printed and stored. Logits of every peer are compared with
``torch-eager`` on one prompt first, and a peer that differs is marked; the runtimes differ, so the result holds ratios
with intervals and no verdicts. ``peers`` in the JSON lists package, version, settings and parity of each.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ghostexport.benchmarking import bench
from ghostexport.benchmarking.engine_checks import engine_difference
from ghostexport.benchmarking.ideal import read_facts
from ghostexport.errors import GhostExportError
from ghostexport.execution import Execution
from ghostexport.files import write_json
from ghostexport.recipe import BenchSection, BuildSection
from ghostexport.report.table import speed_rows
from ghostexport.runtimes import RUNTIMES
from ghostexport.runtimes.base import EngineFile, Session
from ghostexport.runtimes.sidecar import read_sidecar

#: Largest difference of logits from torch-eager, in units of their standard deviation: fp32 on another kernel order.
TOLERANCE = 1e-3
STATIC_LENGTH = 1024
#: Shapes that torch.compile may specialise for before it falls back to eager mode without a word.
RECOMPILE_LIMIT = 64
#: Rounds thrown away: torch.compile compiles a shape again as dynamic when it meets the second size of it.
WARMUP = 3
PEERS = ("torch-eager", "torch-compile", "optimum", "ort-genai")

Peer = tuple[Callable[[], Session], EngineFile]


class Held:
    """A cache that its own library holds and grows: transformers' cache or a GenAI generator, as of ``length`` tokens.

    A call with an earlier ``Held`` rewinds the library's cache first, so that every decode step meets the same past.
    """

    def __init__(self, inner: Any, batch: int, length: int, token_bytes: int) -> None:
        self.inner, self.batch, self.length, self._token_bytes = inner, batch, length, token_bytes

    @property
    def nbytes(self) -> int:
        return self.batch * self.length * self._token_bytes

    def longer(self, tokens: int) -> Held:
        return Held(self.inner, self.batch, self.length + tokens, self._token_bytes)


class TorchSession:
    """transformers in eager mode or compiled. The start cache is filled by a forward pass outside the timing."""

    clock = "perf_counter_ns"

    def __init__(self, folder: Path, compiled: bool) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from ghostexport.models.running import cache_argument

        self._torch, self._compiled = torch, compiled
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._config = self.model.config.get_text_config()
        size = getattr(self._config, "head_dim", None) or self._config.hidden_size // self._config.num_attention_heads
        self._head = (self._config.num_key_value_heads, size)
        self._token_bytes = 2 * self._config.num_hidden_layers * self._head[0] * size * 4
        self._static: dict[int, Any] = {}
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        self._cache_argument = cache_argument(self.model)
        self._call = torch.compile(self.model.forward) if compiled else self.model.forward

    def new_cache(self, batch: int, length: int = 0) -> Held:
        from transformers import DynamicCache

        inner = self._static_cache(batch) if self._compiled else DynamicCache(config=self._config)
        cache = Held(inner, batch, 0, self._token_bytes)
        return self.timed_forward(np.zeros((batch, length), np.int64), cache)[1] if length else cache

    def forward(self, input_ids: Any, cache: Held) -> tuple[Any, Held]:
        self._rewind(cache)
        return self._logits(input_ids, cache).float().numpy(), cache.longer(input_ids.shape[1])

    def timed_forward(self, input_ids: Any, cache: Held) -> tuple[float, Held]:
        self._rewind(cache)
        start = time.perf_counter_ns()
        self._logits(input_ids, cache)
        return (time.perf_counter_ns() - start) * 1e-9, cache.longer(input_ids.shape[1])

    def close(self) -> None:
        del self.model, self._call
        self._static.clear()
        if self._compiled:
            self._torch.compiler.reset()

    def _static_cache(self, batch: int) -> Any:
        """One cache per batch size, emptied: compiled code is bound to its addresses, another one would recompile."""
        from transformers import StaticCache

        if batch not in self._static:
            self._static[batch] = StaticCache(config=self._config, max_cache_len=STATIC_LENGTH)
            cpu = self._torch.device("cpu")
            self._static[batch].early_initialization(batch, *self._head, self._torch.float32, cpu)
        self._static[batch].reset()
        return self._static[batch]

    @staticmethod
    def _rewind(cache: Held) -> None:
        excess = int(cache.inner.get_seq_length()) - cache.length
        if excess:
            cache.inner.crop(-excess)

    def _logits(self, input_ids: Any, cache: Held) -> Any:
        torch = self._torch
        total = cache.length + input_ids.shape[1]
        with torch.no_grad():
            out = self._call(
                input_ids=torch.from_numpy(np.ascontiguousarray(input_ids)),
                attention_mask=torch.ones(cache.batch, total, dtype=torch.long),
                position_ids=torch.arange(cache.length, total)[None].expand(cache.batch, -1),
                use_cache=True,
                **{self._cache_argument: cache.inner},
            )
        return out.logits


class GenaiSession:
    """ONNX Runtime GenAI's own generator loop."""

    clock = "perf_counter_ns"

    def __init__(self, folder: Path, token_bytes: int) -> None:
        import onnxruntime_genai as og

        self._og, self._model, self._token_bytes = og, og.Model(str(folder)), token_bytes
        self._max_length = genai_length(folder)

    def new_cache(self, batch: int, length: int = 0) -> Held:
        params = self._og.GeneratorParams(self._model)
        params.set_search_options(max_length=self._max_length, batch_size=batch, do_sample=False)
        cache = Held(self._og.Generator(self._model, params), batch, 0, self._token_bytes)
        return self.timed_forward(np.zeros((batch, length), np.int64), cache)[1] if length else cache

    def forward(self, input_ids: Any, cache: Held) -> tuple[Any, Held]:
        _, longer = self.timed_forward(input_ids, cache)
        # get_logits() holds one position and, after a prompt, not the last one (0.18); the output holds all
        return np.array(longer.inner.get_output("logits"), np.float32), longer

    def timed_forward(self, input_ids: Any, cache: Held) -> tuple[float, Held]:
        if cache.inner.token_count() > cache.length:
            cache.inner.rewind_to(cache.length)
        tokens = np.ascontiguousarray(input_ids, np.int32)
        start = time.perf_counter_ns()
        cache.inner.append_tokens(tokens)
        return (time.perf_counter_ns() - start) * 1e-9, cache.longer(input_ids.shape[1])

    def close(self) -> None:
        del self._model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--optimum-python", type=Path, help="interpreter of an environment with optimum-onnx")
    parser.add_argument("--work", type=Path, default=Path("peers"), help="where the peers' graphs go")
    parser.add_argument("--preset", default="edge", choices=["edge", "quick"])
    parser.add_argument("--without", nargs="*", default=[], choices=PEERS, help="peers to leave out")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "peers.json")
    arguments = parser.parse_args()
    execution = Execution(device="cpu", say=print)
    dense = read_facts(arguments.run / "onnx" / "dense.onnx", 0)
    peers, parity, missing = gather(arguments, dense.kv_bytes_per_token, execution)
    facts = dict.fromkeys(peers, dense) | {"ghost": read_facts(arguments.run / "onnx" / "ghost.onnx", 0)}
    agrees = {name: found["agrees"] for name, found in parity.items()}
    report = bench(
        {name: load for name, (load, _) in peers.items()},
        {name: engine for name, (_, engine) in peers.items()},
        facts,
        BenchSection.model_validate({"preset": arguments.preset, "warmup": WARMUP}),
        execution,
        parity=agrees,
    ).to_json()
    settings = {
        name: {"package": e.runtime, "version": e.version, "settings": dict(e.flags), "parity": parity[name]}
        for name, (_, e) in peers.items()
    }
    write_json(arguments.output, report | {"peers": settings, "missing": missing})
    show(report, parity, missing)


def gather(
    arguments: argparse.Namespace, token_bytes: int, execution: Execution
) -> tuple[dict[str, Peer], dict[str, dict[str, Any]], dict[str, str]]:
    """The peers that can be had, how each agrees with ``torch-eager``, and why the others are missing."""
    ort = RUNTIMES["onnxruntime"]
    own = {v: read_sidecar(arguments.run / "engines" / "onnxruntime" / f"{v}.json") for v in ("dense", "ghost")}
    peers: dict[str, Peer] = {v: (functools.partial(ort.load, e, execution), e) for v, e in own.items()}
    reference = last_logits(torch_peer(arguments.model, False)[0])
    # ghost is another model: its engine is held against its own graph
    worst = engine_difference(peers["ghost"][0], arguments.run / "onnx" / "ghost.onnx", 0)
    parity = {"dense": compared(peers["dense"][0], reference), "ghost": judged(worst, "its graph")}
    makers: dict[str, Callable[[], Peer]] = {
        "torch-eager": functools.partial(torch_peer, arguments.model, False),
        "torch-compile": functools.partial(torch_peer, arguments.model, True),
        "optimum": functools.partial(optimum_peer, arguments, execution),
        "ort-genai": functools.partial(genai_peer, arguments, token_bytes),
    }
    missing: dict[str, str] = {}
    for name, make in makers.items():
        if name in arguments.without:
            continue
        try:
            peer = make()
            parity[name] = compared(peer[0], reference)
            peers[name] = peer
        except (
            ImportError,
            OSError,
            subprocess.CalledProcessError,
            ValueError,
            RuntimeError,
            GhostExportError,
        ) as error:
            missing[name] = f"{type(error).__name__}: {error}"
            print(f"{name} is left out: {missing[name]}")
    for name, found in parity.items():
        text = f"parity of {name}: {found['worst']:.1e} standard deviations from {found['against']}"
        print(text if found["agrees"] else f"{text}: FAILED, tolerance {TOLERANCE:.0e}")
    return peers, parity, missing


def compared(load: Callable[[], Session], reference: Any) -> dict[str, Any]:
    """The largest difference of :func:`last_logits` from ``reference``, in its standard deviations."""
    return judged(float(np.abs(last_logits(load) - reference).max() / reference.std()), "torch-eager")


def judged(worst: float, against: str) -> dict[str, Any]:
    return {"against": against, "worst": worst, "agrees": worst < TOLERANCE}


def show(report: dict[str, Any], parity: dict[str, dict[str, Any]], missing: dict[str, str]) -> None:
    """The table, peers without parity marked, and everything that speaks against the figures below it."""
    failed = [name for name, found in parity.items() if not found["agrees"]]
    names = [f"{name} (!)" if name in failed else name for name in report["variants"]]
    for label, cells in speed_rows(report, list(report["variants"])):
        print(f"{label:40}", *(f"{cell:>17}" for cell in cells or names))
    for name in failed:
        print(
            f"(!) {name} computes something else, {parity[name]['worst']:.1e} standard deviations off: do not compare."
        )
    for name, reason in missing.items():
        print(f"left out: {name}: {reason.splitlines()[0]}")
    for flag in report["flags"]:
        print(f"caution: {flag}")


def last_logits(load: Callable[[], Session]) -> Any:
    """The last token's logits ``(2 V)`` after a prompt of 24 tokens and after one step more.

    Raises:
        ValueError: they are not finite.
    """
    prompt = np.random.default_rng(0).integers(0, 100, (1, 24), dtype=np.int64)
    session = load()
    try:
        first, cache = session.forward(prompt, session.new_cache(1))
        second, _ = session.forward(prompt[:, :1], cache)
        found = np.concatenate([first[0, -1], second[0, -1]])
    finally:
        session.close()
    if not np.isfinite(found).all():
        raise ValueError(f"{np.count_nonzero(~np.isfinite(found))} of {found.size} logits are not finite")
    return found


def torch_peer(model: Path, compiled: bool) -> Peer:
    name = "torch-compile" if compiled else "torch-eager"
    import torch
    import transformers

    flags = {"cache": f"StaticCache({STATIC_LENGTH})" if compiled else "DynamicCache", "attention": "sdpa"}
    flags |= {"mode": "torch.compile default" if compiled else "eager", "dtype": "float32"}
    flags |= {"threads": torch.get_num_threads(), "transformers": transformers.__version__}
    return functools.partial(TorchSession, model, compiled), stub(name, "torch", model / "model.safetensors", flags)


def optimum_peer(arguments: argparse.Namespace, execution: Execution) -> Peer:
    if arguments.optimum_python is None:
        raise ValueError("give --optimum-python, an interpreter with optimum-onnx installed")
    folder = (arguments.work / "optimum").absolute()
    if not (folder / "model.onnx").exists():
        command = [str(arguments.optimum_python.absolute()), "-m", "optimum.commands.optimum_cli", "export", "onnx"]
        command += ["--model", str(arguments.model.absolute()), "--task", "text-generation-with-past", str(folder)]
        subprocess.run(command, check=True)
    settings = BuildSection(providers=("cpu",))
    runtime = RUNTIMES["onnxruntime"]
    engine = runtime.build(folder / "model.onnx", folder / "engine", "optimum", settings, execution)
    return functools.partial(runtime.load, engine, execution), engine


def genai_peer(arguments: argparse.Namespace, token_bytes: int) -> Peer:
    import onnxruntime_genai  # noqa: F401 - its absence is the reason to leave it out

    folder = (arguments.work / "genai").absolute()
    if not (folder / "genai_config.json").exists():
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", str(arguments.model.absolute())]
        subprocess.run([*command, "-o", str(folder), "-p", "fp32", "-e", "cpu"], check=True)
    flags = {"precision": "fp32", "execution_provider": "cpu", "max_length": genai_length(folder)}
    flags["threads"] = "the library's default"
    return functools.partial(GenaiSession, folder, token_bytes), stub(
        "ort-genai", "onnxruntime-genai", folder / "model.onnx.data", flags
    )


def genai_length(folder: Path) -> int:
    """Tokens a generator reserves: :data:`STATIC_LENGTH`, or all that the model has positions for."""
    config = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    return min(STATIC_LENGTH, int(config["model"]["context_length"]))


def stub(variant: str, package: str, weights: Path, flags: dict[str, Any]) -> EngineFile:
    """A sidecar for what has none: who runs it, with which settings."""
    size = weights.stat().st_size
    return EngineFile(
        path=weights,
        runtime=package,
        version=importlib.metadata.version(package),
        variant=variant,
        device={"providers": ["cpu"]},
        profiles={},
        flags=flags,
        build_seconds=0.0,
        plan_bytes=size,
        weight_bytes=size,
        graph_sha256="",
        plan_sha256="",
    )


if __name__ == "__main__":
    main()
