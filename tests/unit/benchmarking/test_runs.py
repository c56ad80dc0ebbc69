"""The report, the comparison and the sweep on run folders written with synthetic sessions."""

import json
import re

import numpy as np
import pytest

from ghostexport.benchmarking.compare import compare
from ghostexport.benchmarking.layers import trtexec_profile, write_layers
from ghostexport.benchmarking.plots import pool
from ghostexport.benchmarking.report import render, render_sweep
from ghostexport.benchmarking.sweep import collect
from ghostexport.benchmarking.table import sentences, summary_cells
from ghostexport.errors import RunFolderError
from tests.unit.benchmarking.synthetic import write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return {n: write_run(tmp_path_factory.mktemp(f"n{n}"), removed=n) for n in (5, 7)}


def test_report_is_self_contained_and_complete(runs):
    page = render(runs[7])
    assert page.count('<figure class="plot">') == page.count("<svg") >= 10
    assert not re.search(r'(src|href)="https?:', page) and "<script" not in page
    for text in ("[12, 19) of 30 blocks", "ghost.0.matmul", "roofline", "How to reproduce", "linearpatch-rotate"):
        assert text in page
    assert 'class="missing"' not in page


def test_report_of_an_empty_run_names_the_commands(tmp_path):
    page = render(tmp_path)
    for verb in ("bench", "select", "recover", "build engine"):
        assert f"ghostexport {verb}" in page
    assert "<svg" not in page


def test_sentences_state_ideal_and_marginal_cost(runs):
    bench = json.loads((runs[7] / "bench/onnxruntime.json").read_text())
    said = "\n".join(sentences(bench))
    assert re.search(
        r"ghost against dense, decode-b1-p512: 1\.\d+ \[1\.\d+, 1\.\d+\] times as fast; ideal 1\.\d+", said
    )
    assert "operator ghost costs" in said and "linearpatch-rotate against ghost" in said
    assert set(summary_cells(bench)["ghost"]) == {"decode ms", "prefill ms", "speed-up"}


def test_result_of_another_schema_is_refused(tmp_path):
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "onnxruntime.json").write_text('{"schema": "ghostexport.bench/0"}')
    with pytest.raises(RunFolderError, match="schema"):
        render(tmp_path)


def test_compare_two_depths(runs):
    found = compare(runs[5], runs[7])
    assert any(d.startswith("cut") for d in found.differs) and found.withheld == ()
    lines = {(line.workload, line.metric, line.variant): line for line in found.lines}
    deeper = lines["decode-b1-p128", "seconds", "pruned"]
    assert deeper.speedup.value == pytest.approx(25 / 23, rel=0.03) and deeper.verdict == "faster"
    same = lines["decode-b1-p128", "seconds", "dense"]
    assert 1.0 in same.speedup and same.verdict == "same"
    assert len(found.rows()) > len(found.lines)
    json.dumps(found.to_json(), allow_nan=False)


def test_compare_withholds_the_verdict(runs, tmp_path):
    changed = json.loads((runs[7] / "bench/onnxruntime.json").read_text())
    changed["variants"]["ghost"]["engine"]["flags"] = {"threads": 1}
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/onnxruntime.json").write_text(json.dumps(changed))
    found = compare(runs[7], tmp_path)
    assert found.withheld == ("runtime settings of ghost differ: threads",)
    assert {line.verdict for line in found.lines} == {"none"}


def test_sweep_orders_depths_and_draws_curves(runs):
    sweep = collect([runs[7], runs[5]])
    assert [n for n, _ in sweep.table()] == [5, 7]
    assert {p.variant for p in sweep.points} == {"pruned", "ghost", "linearpatch-rotate"}
    page = render_sweep(sweep)
    assert page.count("<svg") == 3
    json.dumps(sweep.to_json(), allow_nan=False)


def test_sweep_without_figures_names_the_command(tmp_path):
    with pytest.raises(RunFolderError, match="ghostexport bench"):
        collect([tmp_path])


def test_profile_in_trtexec_layout(tmp_path):
    runs = [{"a": 1.0, "b": 3.0}, {"a": 2.0, "b": 2.0}, {"a": 3.0, "b": 1.0}]
    count, a, b = trtexec_profile(runs)
    assert count == {"count": 3}
    assert a == {"name": "a", "timeMs": 6.0, "averageMs": 2.0, "medianMs": 2.0, "percentage": 50.0} and b["name"] == "b"
    layers, profile = write_layers(tmp_path, "ghost", [{"Name": "a", "LayerType": "gemm"}], runs)
    assert (layers.name, profile.name) == ("layers_ghost.json", "profile_ghost.json")
    assert json.loads(layers.read_text())["Layers"][0]["Name"] == "a"


def test_pooling_keeps_the_largest_magnitude():
    matrix = np.zeros((10, 10))
    matrix[3, 8] = -5.0
    matrix[3, 9] = 4.0
    pooled = pool(matrix, 2)
    assert pooled.shape == (2, 2) and pooled[0, 1] == -5.0 and np.count_nonzero(pooled) == 1
