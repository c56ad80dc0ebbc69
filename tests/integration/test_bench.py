"""The bench stage on real engines of a tiny model, with ONNX Runtime."""

import json

import pytest

from ghostexport.runfolder import BENCH_SCHEMA

pytestmark = pytest.mark.slow
VARIANTS = ("dense", "pruned", "ghost", "linearpatch-rotate")


@pytest.fixture(scope="module")
def benched(tiny_model, exported_run, text_file, tmp_path_factory):
    from ghostexport.cli import resolve
    from ghostexport.pipeline import run as run_pipeline

    flags = {
        "calibration": {"source": str(text_file), "sequences": 24, "length": 64},
        "select": {"prune": 2},
        "build": {"runtimes": ["onnxruntime"]},
        "bench": {"preset": "quick", "prefill_tokens": [16], "decode_past": [8], "request": [4, 3], "eval_tokens": 200},
    }
    recipe, folder = resolve(str(tiny_model), tmp_path_factory.mktemp("runs") / "run", None, flags)
    folder.adopt("export", exported_run)
    run_pipeline(recipe, folder, goal="bench")
    return folder.path


def test_speed_is_measured_with_its_conditions(benched):
    data = json.loads((benched / "bench" / "onnxruntime.json").read_text())
    assert data["schema"] == BENCH_SCHEMA and data["clock"] == "perf_counter_ns"
    measured = {(m["workload"], m["variant"]) for m in data["measurements"]}
    workloads = {"prefill-b1-t16", "decode-b1-p8", "request-b1-t4-g3"}
    assert measured == {(w, v) for w in workloads for v in VARIANTS}
    assert all(s > 0 for m in data["measurements"] for r in m["rounds"] for s in r)
    assert {c["verdict"] for c in data["comparisons"]} <= {"faster", "slower", "same"}  # parity was checked: a verdict
    facts = {v: data["variants"][v]["facts"] for v in VARIANTS}
    assert (facts["dense"]["blocks"], facts["ghost"]["blocks"]) == (6, 4)
    assert facts["ghost"]["parameters"] - facts["pruned"]["parameters"] == 64 * 64
    assert facts["pruned"]["kv_bytes_per_token"] * 6 == facts["dense"]["kv_bytes_per_token"] * 4
    ideal = {c["variant"]: c["ideal"] for c in data["comparisons"] if c["against"] == "dense" and c["metric"] == "itl"}
    assert 1 < ideal["ghost"] < ideal["pruned"] < 1.5


def test_quality_is_that_of_the_engines(benched):
    quality = json.loads((benched / "engine_quality.json").read_text())
    assert quality["tokens"] == 200 and set(quality["variants"]) == set(VARIANTS)
    assert quality["variants"]["dense"]["kl"] == pytest.approx(0, abs=1e-6)
    assert quality["variants"]["dense"]["top1"] == 1
    assert quality["variants"]["ghost"]["kl"] < quality["variants"]["pruned"]["kl"]


def test_report_has_no_gap(benched):
    page = (benched / "report.html").read_text()
    assert 'class="missing"' not in page and page.count("<svg") >= 9
