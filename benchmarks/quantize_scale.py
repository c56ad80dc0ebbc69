"""Memory, time and bytes of quantising a graph of a large model's shape, beside copying it and onnxruntime's quantiser.

    python benchmarks/quantize_scale.py --work FOLDER [--blocks 32] [--scales search absmax] [--no-onnxruntime]

The graph has the linears of Llama-3.1-8B (hidden size 4096, MLP 14336, vocabulary 128256) in float16, a chain of
products; its data file is one block of random numbers that every block refers to, so that the disk need not hold 16 GB,
while every weight is read, rounded and written as if it were its own. Every row is a process of its own: the peak of
its resident memory (pages of the mapped file included) beyond what it has after its imports, wall time, bytes read and
written. Results: ``results/quantize_scale.json``.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ghostexport.files import write_json

RESULTS = Path(__file__).parent / "results" / "quantize_scale.json"
HIDDEN, MLP, KV, VOCABULARY = 4096, 14336, 1024, 128256
LINEARS = {
    "q": (HIDDEN, HIDDEN), "k": (HIDDEN, KV), "v": (HIDDEN, KV), "o": (HIDDEN, HIDDEN),
    "gate": (HIDDEN, MLP), "up": (HIDDEN, MLP), "down": (MLP, HIDDEN),
}  # fmt: skip


def make(folder: Path, blocks: int) -> Path:
    """The graph; products that do not feed the next one feed an output."""
    folder.mkdir(parents=True, exist_ok=True)
    data, offsets, end = folder / "model.onnx.data", {}, 0
    rng = np.random.default_rng(0)
    with data.open("wb") as file:
        for name, shape in {**LINEARS, "head": (HIDDEN, VOCABULARY)}.items():
            offsets[name] = end
            for rows in range(0, shape[0], 512):
                part = (0.02 * rng.standard_normal((min(512, shape[0] - rows), shape[1]))).astype(np.float16)
                file.write(part.tobytes())
                end += part.nbytes

    def weight(name: str, kind: str, shape: tuple[int, int]) -> ir.Value:
        tensor = ir.ExternalTensor(
            data.name, offsets[kind], 2 * shape[0] * shape[1], ir.DataType.FLOAT16,
            shape=ir.Shape(shape), name=name, base_dir=folder,
        )  # fmt: skip
        kind_of = ir.TensorType(ir.DataType.FLOAT16)
        return ir.Value(name=name, shape=ir.Shape(shape), type=kind_of, const_value=tensor)

    x = ir.Value(name="x", shape=ir.Shape(["tokens", HIDDEN]), type=ir.TensorType(ir.DataType.FLOAT16))
    nodes, weights, outputs, stream = [], [], [], x
    for block in range(blocks):
        products: dict[str, ir.Value] = {}
        for name, shape in LINEARS.items():
            source = products["q"] if name == "o" else products["gate"] if name == "down" else stream
            weights.append(weight(f"block{block}.{name}", name, shape))
            nodes.append(ir.node("MatMul", [source, weights[-1]], name=f"block{block}.{name}.product"))
            products[name] = nodes[-1].outputs[0]
            products[name].name = f"block{block}.{name}.value"
        outputs += [products[name] for name in ("k", "v", "up", "o")]
        stream = products["down"]
    weights.append(weight("head", "head", (HIDDEN, VOCABULARY)))
    nodes.append(ir.node("MatMul", [stream, weights[-1]], name="head.product"))
    outputs.append(nodes[-1].outputs[0])
    outputs[-1].name = "logits"
    for value in outputs:
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT16), ir.Shape(["tokens", None])
    graph = ir.Graph([x], outputs, nodes=nodes, initializers=weights, opset_imports={"": 21}, name="shape")
    ir.save(ir.Model(graph, ir_version=10), folder / "model.onnx")
    return folder / "model.onnx"


def work(what: str, graph: Path, output: Path) -> None:
    """One row, in this process."""
    if what == "copy":
        import onnx_ir.external_data as _  # noqa: F401 - the same imports as the others
    elif what == "onnxruntime":
        import onnx
        from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer
    else:
        from ghostexport.quantization.targets import Settings
        from ghostexport.quantization.writer import quantize_graph
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start, read = time.perf_counter(), _io()
    if what == "copy":  # one read and one write of every weight
        model = ir.load(graph)
        with output.open("wb") as file:
            for value in model.graph.initializers.values():
                assert value.const_value is not None
                file.write(value.const_value.tobytes())
    elif what == "onnxruntime":
        how = DefaultWeightOnlyQuantConfig(block_size=128, is_symmetric=True)
        quantizer = MatMulNBitsQuantizer(onnx.load(graph), algo_config=how)
        quantizer.process()
        quantizer.model.save_model_to_file(str(output), use_external_data_format=True)
    else:
        quantize_graph(graph, output, "int4", Settings(scales=what))
    seconds, after = time.perf_counter() - start, _io()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    row = {"seconds": seconds, "peak_bytes": peak} | {key: after[key] - read[key] for key in read}
    print(json.dumps(row))


def _io() -> dict[str, int]:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines())
    return {"read_bytes": int(lines["rchar"]), "written_bytes": int(lines["wchar"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--scales", nargs="+", default=["search", "absmax"])
    parser.add_argument("--no-onnxruntime", dest="onnxruntime", action="store_false")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        work(arguments.row[0], Path(arguments.row[1]), Path(arguments.row[2]))
        return
    graph = make(arguments.work / "graph", arguments.blocks)
    weights = arguments.blocks * sum(a * b for a, b in LINEARS.values()) + HIDDEN * VOCABULARY
    result: dict[str, Any] = {
        "cpu": platform.processor() or platform.machine(),
        "versions": {name: version(name) for name in ("ghostexport", "onnx-ir", "onnxruntime", "numpy")},
        "blocks": arguments.blocks,
        "weight_bytes": 2 * weights,
        "largest_tensor_bytes": 2 * HIDDEN * VOCABULARY,
        "rows": {},
    }
    for what in ("copy", *arguments.scales, *(["onnxruntime"] if arguments.onnxruntime else [])):
        target = arguments.work / what
        target.mkdir(exist_ok=True)
        command = [sys.executable, __file__, "--work", str(arguments.work), "--row", what]
        done = subprocess.run([*command, str(graph), str(target / "out.onnx")], capture_output=True, text=True)
        failed = {"failed": done.stderr.strip().splitlines()[-1:] or f"ended with {done.returncode}"}
        result["rows"][what] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else failed
        print(what, result["rows"][what], flush=True)
        shutil.rmtree(target)
        write_json(RESULTS, result)
    shutil.rmtree(arguments.work / "graph")


if __name__ == "__main__":
    main()
