"""What ``--profiles joint | split | single`` costs: plan bytes and build seconds of one graph with TensorRT-RTX.

    python benchmarks/profiles.py RUN/onnx/dense.onnx [--max-tokens 512] [--max-past 1023]

Builds each layout once, in a folder removed afterwards, and writes ``benchmarks/results/profiles.json``. Runs on
the CPU: bytes and build time are real, latency needs a GPU and is not measured here.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from pathlib import Path

from ghostexport.execution import Execution
from ghostexport.files import write_json
from ghostexport.recipe import BuildSection
from ghostexport.runtimes import RUNTIMES

RESULTS = Path(__file__).parent / "results" / "profiles.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("graph", type=Path)
    parser.add_argument("--max-batch", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--max-past", type=int, default=1023)
    arguments = parser.parse_args()
    limits = {name: getattr(arguments, name) for name in ("max_batch", "max_tokens", "max_past")}
    runtime = RUNTIMES["tensorrt-rtx"]
    rows = []
    for layout in ("single", "joint", "split"):
        with tempfile.TemporaryDirectory() as folder:
            settings = BuildSection(profiles=layout, **limits)
            engine = runtime.build(arguments.graph, Path(folder) / "dense", "dense", settings, Execution(say=print))
        rows.append(
            {
                "profiles": layout,
                "plan_bytes": engine.plan_bytes,
                "weight_bytes": engine.weight_bytes,
                "build_seconds": engine.build_seconds,
            }
        )
        print(f"{layout:7} {engine.plan_bytes / 1e6:8.1f} MB {engine.build_seconds:8.1f} s", flush=True)
    machine = {"cpu": platform.processor() or platform.machine(), "system": platform.system()}
    found = {"runtime": runtime.name, "version": engine.version, "graph_sha256": engine.graph_sha256}
    write_json(RESULTS, {"machine": machine, **found, "limits": limits, "results": rows})


if __name__ == "__main__":
    main()
