"""What a user would pick instead, on the same machine, interleaved in the same run.

    python benchmarks/peers.py RUN MODEL [--optimum-python VENV/bin/python] [--work DIR] [-o FILE.json]

RUN is a run folder with ONNX Runtime engines (dense, ghost), MODEL the Hugging Face folder it was made from. Peers:

* ``optimum``: the graph of optimum's exporter (from an environment of its own) on ONNX Runtime, our session settings;
* ``ort-genai``: the graph of ONNX Runtime GenAI's builder (fp32, cpu) in its own runtime;
* ``torch-eager``: transformers with ``DynamicCache`` and SDPA attention;
* ``torch-compile``: the same with ``StaticCache`` and ``torch.compile``.

A peer that cannot be had here is left out and the reason is printed and stored. Logits of every peer are compared with
``torch-eager`` on one prompt first; the runtimes differ, so the result holds ratios with intervals and no verdicts.
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
from ghostexport.benchmarking.facts import read_facts
from ghostexport.benchmarking.table import speed_rows
from ghostexport.recipe import BenchSection, BuildSection, Execution
from ghostexport.runfolder import write_json
from ghostexport.runtimes import RUNTIMES
from ghostexport.runtimes.base import EngineFile, Session
from ghostexport.runtimes.sidecar import read_sidecar

#: Largest difference of logits from torch-eager, in units of their standard deviation: fp32 on another kernel order.
TOLERANCE = 1e-3
STATIC_LENGTH = 1024

Peer = tuple[Callable[[], Session], EngineFile]


class Held:
    """A cache that its own library holds: transformers' cache or a GenAI generator."""

    def __init__(self, inner: Any, batch: int, length: int, token_bytes: int) -> None:
        self.inner, self.batch, self.length, self._token_bytes = inner, batch, length, token_bytes

    @property
    def nbytes(self) -> int:
        return self.batch * self.length * self._token_bytes


class TorchSession:
    """transformers in eager mode or compiled. The start cache is filled by a forward pass outside the timing."""

    clock = "perf_counter_ns"

    def __init__(self, folder: Path, compiled: bool) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch, self._compiled = torch, compiled
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = self.model.config.get_text_config()
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * size * 4
        self._call = torch.compile(self.model.forward) if compiled else self.model.forward

    def new_cache(self, batch: int, length: int = 0) -> Held:
        from transformers import DynamicCache, StaticCache

        config = self.model.config
        inner = (
            StaticCache(config=config, max_cache_len=STATIC_LENGTH) if self._compiled else DynamicCache(config=config)
        )
        cache = Held(inner, batch, 0, self._token_bytes)
        return self._run(np.zeros((batch, length), np.int64), cache)[1] if length else cache

    def forward(self, input_ids: Any, cache: Held) -> tuple[Any, Held]:
        logits, longer = self._run(input_ids, cache)
        return logits.float().numpy(), longer

    def timed_forward(self, input_ids: Any, cache: Held) -> tuple[float, Held]:
        start = time.perf_counter_ns()
        _, longer = self._run(input_ids, cache)
        return (time.perf_counter_ns() - start) * 1e-9, longer

    def close(self) -> None:
        del self.model, self._call
        self._torch.compiler.reset()

    def _run(self, input_ids: Any, cache: Held) -> tuple[Any, Held]:
        torch = self._torch
        total = cache.length + input_ids.shape[1]
        with torch.no_grad():
            out = self._call(
                input_ids=torch.from_numpy(np.ascontiguousarray(input_ids)),
                attention_mask=torch.ones(cache.batch, total, dtype=torch.long),
                position_ids=torch.arange(cache.length, total)[None].expand(cache.batch, -1),
                past_key_values=cache.inner,
                use_cache=True,
            )
        return out.logits, Held(cache.inner, cache.batch, total, self._token_bytes)


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
        start = time.perf_counter_ns()
        cache.inner.append_tokens(np.ascontiguousarray(input_ids, np.int32))
        elapsed = (time.perf_counter_ns() - start) * 1e-9
        return elapsed, Held(cache.inner, cache.batch, cache.length + input_ids.shape[1], self._token_bytes)

    def close(self) -> None:
        del self._model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--optimum-python", type=Path, help="interpreter of an environment with optimum-onnx")
    parser.add_argument("--work", type=Path, default=Path("peers"), help="where the peers' graphs go")
    parser.add_argument("--preset", default="edge", choices=["edge", "quick"])
    parser.add_argument("--without", nargs="*", default=[], help="peers to leave out")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "results" / "peers.json")
    arguments = parser.parse_args()
    execution = Execution(device="cpu", say=print)
    own = {v: read_sidecar(arguments.run / "engines" / "onnxruntime" / f"{v}.json") for v in ("dense", "ghost")}
    ort = RUNTIMES["onnxruntime"]
    peers: dict[str, Peer] = {v: (functools.partial(ort.load, e, execution), e) for v, e in own.items()}
    dense = read_facts(arguments.run / "onnx" / "dense.onnx", 0)
    makers: dict[str, Callable[[], Peer]] = {
        "torch-eager": functools.partial(torch_peer, arguments.model, False),
        "torch-compile": functools.partial(torch_peer, arguments.model, True),
        "optimum": functools.partial(optimum_peer, arguments, execution),
        "ort-genai": functools.partial(genai_peer, arguments, dense.kv_bytes_per_token),
    }
    missing: dict[str, str] = {}
    for name, make in makers.items():
        if name in arguments.without:
            continue
        try:
            peers[name] = make()
        except (ImportError, OSError, subprocess.CalledProcessError, ValueError) as error:
            missing[name] = f"{type(error).__name__}: {error}"
            print(f"{name} is left out: {missing[name]}")
    parity = {name: agreement(load, peers["torch-eager"][0]) for name, (load, _) in peers.items() if name != "ghost"}
    print("largest difference from torch-eager, in standard deviations:", parity)
    facts = dict.fromkeys(peers, dense)
    facts["ghost"] = read_facts(arguments.run / "onnx" / "ghost.onnx", 0)
    report = bench(
        {name: load for name, (load, _) in peers.items()},
        {name: engine for name, (_, engine) in peers.items()},
        facts,
        BenchSection.model_validate({"preset": arguments.preset}),
        execution,
        parity={name: worst < TOLERANCE for name, worst in parity.items()} | {"ghost": True},
    ).to_json()
    report |= {"missing": missing, "parity_worst": parity}
    write_json(arguments.output, report)
    for label, cells in speed_rows(report, list(peers)):
        print(f"{label:40}", *(f"{cell:>16}" for cell in cells or peers))


def agreement(load: Callable[[], Session], reference: Callable[[], Session]) -> float:
    """Largest difference of the last token's logits over their standard deviation, on 24 tokens and one step more."""
    prompt = np.random.default_rng(0).integers(0, 100, (1, 24), dtype=np.int64)
    rows = []
    for open_session in (reference, load):
        session = open_session()
        first, cache = session.forward(prompt, session.new_cache(1))
        second, _ = session.forward(prompt[:, :1], cache)
        rows.append(np.concatenate([first[0, -1], second[0, -1]]))
        session.close()
    return float(np.abs(rows[0] - rows[1]).max() / rows[0].std())


def torch_peer(model: Path, compiled: bool) -> Peer:
    name = "torch-compile" if compiled else "torch-eager"
    flags = {"cache": f"StaticCache({STATIC_LENGTH})" if compiled else "DynamicCache", "attention": "sdpa"}
    flags["mode"] = "torch.compile default" if compiled else "eager"
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
