"""Cost of cutting an ONNX decoder with external data: this project beside other ONNX libraries.

    python benchmarks/surgery.py            768 MiB of weights: four tools side by side
    python benchmarks/surgery.py --large    also an 8B-shaped graph over a sparse 16 GB data file (this tool only)

Task: remove blocks 8 to 15 of 24, drop their weights, save a graph that ONNX Runtime could load. Each tool runs in a
process of its own; peak RSS is counted above that process's RSS after its imports. ``extract_model`` can only cut out
a prefix, not remove a middle: it extracts the first 16 blocks, which moves the same amount of weights.
The other tools get the boundary values by name; only this tool has to find them.
"""

from __future__ import annotations

import functools
import json
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

BLOCKS, START, STOP = 24, 8, 16
RESULTS = Path(__file__).parent / "results" / "surgery.json"


def ours(source: Path, output: Path, self_contained: bool = False) -> dict[str, Any]:
    from ghostexport.operators import Operator, OperatorSet
    from ghostexport.plan import PrunePlan
    from ghostexport.surgery import operate

    start = yield_imports()
    width = int(source.with_name("width").read_text())
    blocks = int(source.with_name("blocks").read_text())
    plan = PrunePlan.from_spans(blocks, [(START, STOP)])
    delta = np.zeros((width, width), np.float32)
    operators = OperatorSet("ghost", (Operator(plan.boundaries[0], "ghost", delta=delta),), plan)
    # In the source's folder weights are referred to, as in a run folder; the other tools write all of them.
    output = output if self_contained else source.with_name("ghost.onnx")
    report = operate(source, plan, operators, output, self_contained=self_contained)
    return measured(start) | {"bytes_written": report.bytes_written}


def graphsurgeon(source: Path, output: Path) -> dict[str, Any]:
    import onnx
    import onnx_graphsurgeon as gs

    start = yield_imports()
    graph = gs.import_onnx(onnx.load(source, load_external_data=False))
    tensors = graph.tensors()
    before, after = tensors[f"h_{START - 1}"], tensors[f"h_{STOP - 1}"]
    for node in list(after.outputs):
        node.inputs = [before if t is after else t for t in node.inputs]
    gone = [f".{k}." for k in range(START, STOP)]
    graph.outputs = [t for t in graph.outputs if not any(g in t.name for g in gone)]
    graph.inputs = [t for t in graph.inputs if not any(g in t.name for g in gone)]
    graph.cleanup().toposort()
    model = gs.export_onnx(graph)
    onnx.external_data_helper.load_external_data_for_model(model, str(source.parent))
    onnx.save(model, output, save_as_external_data=True, location=output.name + ".data")
    return measured(start) | {"bytes_written": written(output)}


def plain_onnx(source: Path, output: Path) -> dict[str, Any]:
    import onnx

    start = yield_imports()
    model = onnx.load(source)
    graph = model.graph
    before, after = f"h_{START - 1}", f"h_{STOP - 1}"
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name == after:
                node.input[i] = before
    gone = [f".{k}." for k in range(START, STOP)]
    for field in (graph.input, graph.output):
        kept = [v for v in field if not any(g in v.name for g in gone)]
        del field[:]
        field.extend(kept)
    needed = {v.name for v in graph.output}
    live = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            live.append(node)
    live.reverse()
    copies = [type(n).FromString(n.SerializeToString()) for n in live]
    del graph.node[:]
    graph.node.extend(copies)
    for i in reversed(range(len(graph.initializer))):
        if graph.initializer[i].name not in needed:
            del graph.initializer[i]
    onnx.save(model, output, save_as_external_data=True, location=output.name + ".data")
    return measured(start) | {"bytes_written": written(output)}


def extract_model(source: Path, output: Path) -> dict[str, Any]:
    import onnx.utils

    start = yield_imports()
    kept = BLOCKS - (STOP - START)
    past = [f"past_key_values.{k}.{role}" for k in range(kept) for role in ("key", "value")]
    onnx.utils.extract_model(str(source), str(output), ["input_ids", *past], [f"h_{kept - 1}"], check_model=False)
    return measured(start) | {"bytes_written": written(output)}


TOOLS = {
    "ghostexport": ours,
    "ghostexport --self-contained": functools.partial(ours, self_contained=True),
    "onnx-graphsurgeon": graphsurgeon,
    "onnx": plain_onnx,
    "onnx.utils.extract_model": extract_model,
}


def yield_imports() -> tuple[float, int]:
    return time.perf_counter(), peak()


def measured(start: tuple[float, int]) -> dict[str, Any]:
    return {
        "seconds": round(time.perf_counter() - start[0], 3),
        "peak_mib_above_imports": round((peak() - start[1]) / 1024, 1),
    }


def peak() -> int:
    """Peak resident memory of this process in KiB. Not ``ru_maxrss``: a child inherits that from its parent."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0])


def written(output: Path) -> int:
    return sum(path.stat().st_size for path in output.parent.iterdir())


def main(large: bool) -> None:
    from decoder_graph import decoder

    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {platform.system()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("onnx", "onnx-ir", "onnx-graphsurgeon")},
        "runs": 3,
        "task": f"blocks {START}..{STOP - 1} of {BLOCKS} removed; best of the runs",
    }
    with tempfile.TemporaryDirectory() as folder:
        source = decoder(Path(folder), BLOCKS, 896, 2944, 2048, sparse=False)
        record(source, 896, BLOCKS)
        size = (Path(folder) / "dense.onnx.data").stat().st_size
        results["dense"] = {"data_mib": round(size / 2**20), "tools": {}}
        for tool in TOOLS:
            results["dense"]["tools"][tool] = best([run(tool, source) for _ in range(results["runs"])])
            print(tool, results["dense"]["tools"][tool], flush=True)
    if large:
        with tempfile.TemporaryDirectory() as folder:
            source = decoder(Path(folder), 32, 4096, 22016, 128256, sparse=True)
            record(source, 4096, 32)
            size = (Path(folder) / "dense.onnx.data").stat().st_size
            results["8b_shaped"] = {
                "data_gib": round(size / 2**30, 1),
                "ghostexport": best([run("ghostexport", source)]),
            }
            print(results["8b_shaped"], flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def record(source: Path, width: int, blocks: int) -> None:
    source.with_name("width").write_text(str(width))
    source.with_name("blocks").write_text(str(blocks))


def run(tool: str, source: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        command = [sys.executable, __file__, tool, str(source), str(Path(folder) / "out.onnx")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return {"error": done.stderr.strip().splitlines()[-1][:300]}
        return dict(json.loads(done.stdout.splitlines()[-1]))


def best(runs: list[dict[str, Any]]) -> dict[str, Any]:
    good = [run for run in runs if "seconds" in run]
    return min(good, key=lambda run: run["seconds"]) if good else runs[0]


if __name__ == "__main__":
    if len(sys.argv) > 3:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        print(json.dumps(TOOLS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))))
    else:
        main("--large" in sys.argv)
