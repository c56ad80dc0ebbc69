"""The benchmark of GPU sessions, driven with sessions on the strict fake vendor module: what a first run would find.

Host memory stands in for device memory and the host's clock for CUDA events; that a GPU is measured in the end is not
shown here.
"""

import json
import time

import onnx
import pytest

from ghostexport.benchmarking import bench, machine
from ghostexport.benchmarking.bench_run import write_bench
from ghostexport.benchmarking.engine_checks import engine_agrees
from ghostexport.benchmarking.ideal import read_facts
from ghostexport.benchmarking.measuring import EXECUTIONS
from ghostexport.execution import Execution
from ghostexport.recipe import BenchSection
from ghostexport.runfolder import RunFolder
from ghostexport.runtimes.gpu import Gpu
from ghostexport.runtimes.nvinfer import builder
from tests.runtime_graphs import BLOCKS, dense_graph, variant_graph
from tests.unit.benchmarking.synthetic import CEILINGS
from tests.unit.runtimes.fake_vendor import HostDevice
from tests.unit.runtimes.test_nvinfer import build, flavour
from tests.unit.runtimes.vendor_listing import is_rtx

SECTION = BenchSection(prefill_tokens=(8,), decode_past=(4,), decode_steps=4, request=(4, 3), repeats=3, warmup=1)
GPU_STATE = ["1980", "54", "Not Active"]
GPU_CARD = ["Ada", "540.4", "8.9", "1300", "60", "7620"]


class TimingDevice(HostDevice):
    """Times a call with the host's clock, as events would the GPU."""

    def timed(self, work):
        started = time.perf_counter_ns()
        work()
        return (time.perf_counter_ns() - started) * 1e-9


@pytest.mark.parametrize("release", ["tensorrt-10.3.0", "tensorrt-11.4.0.106", "tensorrt_rtx-1.7.1.116"])
def test_variants_are_measured_through_the_gpu_session(release, tmp_path, monkeypatch):
    runtime, _ = flavour(release, monkeypatch, Gpu("Ada", "8.9", "13.0", 8 << 30))
    monkeypatch.setattr(builder, "Cuda", TimingDevice)
    monkeypatch.setattr(machine, "_nvidia_smi", lambda query: GPU_STATE if "clocks.sm" in query else GPU_CARD)
    graphs = {"dense": dense_graph(), "ghost": variant_graph("ghost")}
    engines = {v: build(runtime, graph, tmp_path) for v, graph in graphs.items()}
    opened = []

    def load(engine):
        opened.append(runtime.load(engine, Execution()))
        return opened[-1]

    loaders = {v: lambda engine=engine: load(engine) for v, engine in engines.items()}
    facts = {v: read_facts(graph, BLOCKS - (v != "dense"), 4) for v, graph in graphs.items()}
    lines = []
    report = bench(
        loaders,
        engines,
        facts,
        SECTION,
        Execution(say=lines.append),
        parity=dict.fromkeys(graphs, True),
        ceilings=CEILINGS,
    )
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))

    assert data["clock"] == "cuda-events" and data["runtime"] == runtime.name
    assert data["card"]["device"] == "cuda" and data["card"]["gpu"]["name"] == "Ada"
    assert lines[0].startswith("device: Ada,")
    assert {m["workload"] for m in data["measurements"]} == {"prefill-b1-t8", "decode-b1-p4", "request-b1-t4-g3"}
    for measured in data["measurements"]:
        assert len(measured["rounds"]) == 3 and all(s > 0 for r in measured["rounds"] for s in r)
        # the host is busy for most of the call here, as on a host-bound GPU; how much is the machine's affair
        timed = measured["metric"] == "seconds"
        assert timed or not any("host-bound" in flag for flag in measured["flags"])
        assert (measured.get("enqueue_median", 0) > 0) == timed
    assert all(s["gpu_mhz"] == 1980 and s["gpu_celsius"] == 54 for s in data["conditions"]["snapshots"])
    assert all(c["verdict"] != "none" for c in data["comparisons"])
    assert all(data["variants"][v]["engine"]["build_peak_bytes"] >= 0 for v in engines)
    assert {data["variants"][v]["profiled"] for v in engines} == {"decode-b1-p4"}
    check_layers(write_bench(RunFolder(tmp_path), runtime.name, report), runtime.name, graphs)
    # the two sessions measured made 1 + 3 decode visits, every timed step of them a replay (RTX replays inside)
    kept = opened[-2:]
    replays = [s.graph_replays for s in kept]
    assert replays == [0, 0] if is_rtx(release) else min(replays) >= 4 * SECTION.decode_steps


def check_layers(written, runtime, graphs):
    """The files are in trtexec's layout, with the layers and times that the fake's inspector and profiler report."""
    assert [str(p.relative_to(written[0].parent)) for p in written] == [
        f"{runtime}.json",
        *(f"{runtime}/{kind}_{v}.json" for v in graphs for kind in ("layers", "profile")),
    ]
    for (_, graph), layers, profile in zip(graphs.items(), written[1::2], written[2::2], strict=True):
        nodes = [(n.name, n.op_type) for n in onnx.load(graph, load_external_data=False).graph.node]
        found = json.loads(layers.read_text())
        assert [(x["Name"], x["LayerType"]) for x in found["Layers"]] == nodes and "input_ids" in found["Bindings"]
        count, *times = json.loads(profile.read_text())
        assert count == {"count": EXECUTIONS} and [t["name"] for t in times] == [name for name, _ in nodes]
        assert [t["medianMs"] for t in times] == [number / 8 for number in range(1, len(nodes) + 1)]
        assert sum(t["percentage"] for t in times) == pytest.approx(100)


def test_parity_of_an_engine_is_checked_against_its_graph(tmp_path, monkeypatch):
    runtime, _ = flavour("tensorrt-10.3.0", monkeypatch)
    monkeypatch.setattr(builder, "Cuda", TimingDevice)
    engine = build(runtime, dense_graph(), tmp_path, max_tokens=16)  # the comparison prefills 12
    for graph, expected in ((dense_graph(), True), (variant_graph("pruned"), False)):
        agrees, sentence = engine_agrees(
            lambda: runtime.load(engine, Execution()), graph, "tensorrt", "float32", seed=0
        )
        assert agrees is expected and "logits differ from the graph's by" in sentence
