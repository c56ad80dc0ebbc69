"""SmolLM2-135M out of two exporters, the same surgery on both graphs, the same held-out text: the same perplexity.

    python benchmarks/optimum_smollm2.py --run RUN [--dense DENSE.onnx] [--optimum-python VENV/bin/python]

``RUN`` is a finished run folder of the demo (``ghostexport run``): its plan, its operators and its held-out tokens are
used, and its ``onnx/dense.onnx`` from transformers' exporter unless ``--dense`` names another. optimum exports the same
checkpoint in an environment of its own (it needs transformers < 4.58). Both graphs are cut and spliced as files; ONNX
Runtime measures dense, pruned and spliced graphs in float32 on the CPU.

Writes ``benchmarks/results/optimum_smollm2.json``; exits with an error where two perplexities differ by 1e-4 or more.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

from ghostexport import calibration
from ghostexport.files import write_json
from ghostexport.models import resolve_source
from ghostexport.operators import OperatorSet, load_operators
from ghostexport.runtimes.ort.onnxruntime import open_graph
from ghostexport.surgery import inspect_graph, operate

RESULTS = Path(__file__).parent / "results" / "optimum_smollm2.json"
LIMIT = 1e-4  # relative difference of two perplexities
WINDOW = 256
PACKAGES = ("torch", "transformers", "optimum", "optimum-onnx", "onnx")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="run folder of the demo")
    parser.add_argument("--dense", type=Path, help="transformers' graph (default: the run folder's)")
    parser.add_argument(
        "--optimum-python", type=Path, help="python with optimum-onnx (default: the tests' environment)"
    )
    parser.add_argument("--optimum-graph", type=Path, help="optimum's graph, where it was exported before")
    parser.add_argument("--tokens", type=int, default=2048, help="held-out tokens to measure on")
    arguments = parser.parse_args()
    python = arguments.optimum_python or _optimum_python()
    operators = load_operators(arguments.run / "operators" / "ghost.safetensors")
    windows = _windows(arguments.run / "calibration.safetensors", arguments.tokens)
    with tempfile.TemporaryDirectory(prefix="optimum-smollm2.") as temporary:
        graphs = {
            "transformers": arguments.dense or arguments.run / "onnx" / "dense.onnx",
            "optimum": arguments.optimum_graph or _export(python, Path(temporary)),
        }
        figures = {name: _measure(graph, operators, windows, Path(temporary)) for name, graph in graphs.items()}
    ours, theirs = (figure["perplexity"] for figure in figures.values())
    differences = {variant: abs(theirs[variant] / ours[variant] - 1) for variant in ours}
    result = {
        "model": "SmolLM2-135M",
        "removed": [[span.start, span.stop] for span in operators.plan.removed],
        "operator": {"name": operators.name, "sha256": operators.sha256},
        "text": {"windows": len(windows), "window": windows.shape[1], "predicted": _predicted(windows)},
        "graphs": figures,
        "relative_difference": differences,
        "limit": LIMIT,
        "versions": {
            "here": {name: version(name) for name in ("torch", "transformers", "onnxruntime", "onnx-ir")},
            "optimum": _versions(python),
        },
    }
    write_json(RESULTS, result)
    print(json.dumps({"perplexity": [ours, theirs], "relative_difference": differences}, indent=1))
    if not max(differences.values()) < LIMIT:
        sys.exit("the two exporters' graphs differ")


def _optimum_python() -> Path:
    """The environment that ``tests/integration/test_optimum_venv.py`` makes."""
    found = sorted(platformdirs.user_cache_path("ghostexport").glob("optimum-*/bin/python"))
    if not found:
        sys.exit("no environment with optimum: give --optimum-python, or run tests/integration/test_optimum_venv.py")
    return found[-1]


def _versions(python: Path) -> dict[str, str]:
    script = (
        f"import json; from importlib.metadata import version; print(json.dumps({{n: version(n) for n in {PACKAGES}}}))"
    )
    answer = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout
    versions: dict[str, str] = json.loads(answer)
    return versions


def _export(python: Path, folder: Path) -> Path:
    """optimum's own command on the checkpoint, in float32."""
    command = [python, "-m", "optimum.exporters.onnx", "--model", resolve_source("smollm2"), "--dtype", "fp32"]
    subprocess.run([*command, "--task", "text-generation-with-past", folder / "onnx"], check=True)
    return folder / "onnx" / "model.onnx"


def _windows(path: Path, tokens: int) -> Any:
    """Held-out ids ``[N, 256]`` int64 without padding, about ``tokens`` of them."""
    _, held_out = calibration.load(path)
    whole = held_out.tokens[held_out.attention_mask.all(axis=1)]
    width = min(WINDOW, whole.shape[1])
    cut = whole[:, : whole.shape[1] // width * width].reshape(-1, width)
    return cut[: max(1, tokens // width)]


def _predicted(windows: Any) -> int:
    return len(windows) * (windows.shape[1] - 1)


def _measure(dense: Path, operators: OperatorSet, windows: Any, temporary: Path) -> dict[str, Any]:
    """Perplexity of the graph as exported, cut, and cut and spliced."""
    report = inspect_graph(dense)
    perplexity = {"dense": _perplexity(dense, windows)}
    for variant, repair in (("pruned", None), ("ghost", operators)):
        with tempfile.TemporaryDirectory(dir=temporary) as folder:
            graph = Path(folder) / f"{variant}.onnx"
            operate(dense, operators.plan, repair, graph)
            perplexity[variant] = _perplexity(graph, windows)
    return {"producer": report.producer, "blocks": report.num_blocks, "perplexity": perplexity}


def _perplexity(graph: Path, windows: Any) -> float:
    """``exp`` of the mean negative log-likelihood of the next token, each window by itself."""
    session = open_graph(graph)
    loss = 0.0
    for ids in windows:
        logits = session.forward(ids[None], session.new_cache(1))[0][0, :-1]
        shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
        chosen = shifted[np.arange(len(ids) - 1), ids[1:]]
        loss += float((np.log(np.exp(shifted).sum(-1)) - chosen).sum())
    return math.exp(loss / _predicted(windows))


if __name__ == "__main__":
    main()
