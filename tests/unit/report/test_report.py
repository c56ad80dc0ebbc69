"""The report, the comparison and the sweep on run folders written with synthetic sessions."""

import json
import re

import numpy as np
import pytest

from ghostexport.benchmarking.measuring import LayerProfile, trtexec_profile, write_layers
from ghostexport.errors import RunFolderError
from ghostexport.report.page import render, render_sweep
from ghostexport.report.plots import pool, scores
from ghostexport.report.runs import collect, compare
from ghostexport.report.sections import evaluation_section, ranking, score_plots
from ghostexport.report.table import sentences, summary_cells
from ghostexport.runfolder import RunFolder
from tests.unit.benchmarking.synthetic import write_evaluation, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return {n: write_run(tmp_path_factory.mktemp(f"n{n}"), removed=n) for n in (5, 7)}


def test_report_is_self_contained_and_complete(runs):
    page = render(RunFolder(runs[7]))
    assert page.count('<figure class="plot">') == page.count("<svg") >= 10
    assert not re.search(r'(src|href)="https?:', page) and "<script" not in page
    for text in ("[12, 19) of 30 blocks", "ghost.0.matmul", "roofline", "How to reproduce", "linearpatch-rotate"):
        assert text in page
    assert 'class="missing"' not in page


def test_report_shows_the_evaluation_of_the_models(tmp_path):
    page = render(RunFolder(tmp_path))
    assert "Quality of the models" not in page  # no other stage needs it
    evaluation = write_evaluation(tmp_path)
    page = render(RunFolder(tmp_path))
    tables = evaluation_section(evaluation).tables
    text = dict(tables[0][2])
    variants = list(evaluation["variants"])
    assert text["perplexity / dense"][variants.index("ghost")] == "1.831 [1.742, 1.925]"  # exp(0.605 -+ 0.05)
    assert text["perplexity / ghost"][0] == "0.546 [0.519, 0.574]"  # dense - ghost: the entry is the other way round
    assert text["top-1 = dense"][variants.index("ghost")] == "91.0% [90.0%, 92.0%]"
    tasks = dict(tables[1][2])
    assert tasks["acc minus dense"][variants.index("ghost")] == "-9.0% [-12.0%, -6.0%]"
    assert ("procrustes", ["0.4", "0.6325", "0.004"]) in tables[2][2]
    assert text["different pairs"][variants.index("ghost")] == "87.5%" and text["repeated 4-grams"][0] == "6.2%"
    assert tasks["acc retained"][variants.index("ghost")] == "86.4%"  # 0.57 / 0.66
    assert tables[3][2][0] == ("Once upon a time", [])
    assert tables[3][2][1] == ("dense", [evaluation["variants"]["dense"]["samples"][0]["text"]])
    for caption, _, rows in tables:
        assert caption in page and all(cell in page for _, cells in rows for cell in cells)


def test_scores_of_every_kind_of_criterion_are_drawn_and_ranked():
    removed = [[1, 2]]
    kinds = {
        "one score per block": {"blocks": [3.0, 1.0, 2.0], "ranking": {"removed": [1], "runners_up": [2, 0]}},
        "windows": {
            "windows": [[0, 1, 0.1], [1, 2, 0.9], [2, 3, 0.5]], "best": 0.9,
            "ranking": {"chosen": [1, 2, 0.9], "runners_up": [[2, 3, 0.5]]},
        },
        "rounds": {
            "round 1": [[0, 1, 3.0], [1, 2, 2.0]],
            "rounds": [{"removed": 1, "loss": 2.0, "runners_up": [[0, 3.0]]}],
        },
        "likeness": {"mean similarity": [0.2, 0.9, 0.5], "rls": 0.3, "ranking": {"removed": [1], "runners_up": [2]}},
        "finalists": {"windows": [[0, 1, 0.1], [1, 2, 0.2]], "perplexity": [[0, 1, 9.0], [1, 2, 8.0]], "best": 8.0},
        "steps": {
            "blocks": [[0, 1, 0.3], [1, 2, 0.1]],
            "steps": [{"removed": [[1, 2]], "perplexity": 8.0, "error": 0.1}],
        },
    }  # fmt: skip
    expected = {
        "one score per block": ("block 1", ["1", "removed"]),
        "windows": ("[1, 2)", ["0.9", "removed"]),
        "rounds": ("round 1", ["block 1 removed", "2", "next: 0 (3)"]),
        "likeness": ("block 1", ["0.9", "removed"]),
        "finalists": ("[1, 2)", ["8", "removed"]),
        "steps": ("step 1", ["[1, 2)", "perplexity 8"]),
    }
    for kind, found in kinds.items():
        drawn = score_plots({"num_blocks": 3, "removed": removed, "criterion": "c", "scores": found})
        assert list(drawn) == {"likeness": ["mean similarity"], "finalists": ["c score", "perplexity"]}.get(
            kind, ["c score"]
        )
        assert ranking(found, removed)[0] == expected[kind]


def test_scores_mark_the_cut_and_name_the_rounds():
    rounds = {f"round {i}": [(float(b), 1.0 + b + i) for b in range(12)] for i in range(1, 8)}
    for removed in ([[2, 3]], [[2, 3], [5, 7], [9, 10]]):
        drawn = scores(rounds, removed, "sleb score")
        assert drawn.count("fill: #c2700a") == len(removed)
        assert drawn.count("<!-- removed -->") == (len(removed) if len(removed) <= 2 else 0)
        shown = re.findall(r"<!-- (round \d) -->", drawn)
        assert shown == ["round 1", "round 7"] and "<!-- sleb score -->" in drawn


def test_report_of_an_empty_run_names_the_commands(tmp_path):
    page = render(RunFolder(tmp_path))
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
        render(RunFolder(tmp_path))


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
    found = LayerProfile("decode-b1-p4", {"Layers": [{"Name": "a", "LayerType": "gemm"}]}, runs)
    folder = RunFolder(tmp_path)
    layers, profile = folder.layers_path("tensorrt", "ghost"), folder.profile_path("tensorrt", "ghost")
    write_layers(layers, profile, found)
    assert (layers.name, profile.name) == ("layers_ghost.json", "profile_ghost.json")
    assert json.loads(layers.read_text())["Layers"][0]["Name"] == "a"


def test_pooling_keeps_the_largest_magnitude():
    matrix = np.zeros((10, 10))
    matrix[3, 8] = -5.0
    matrix[3, 9] = 4.0
    pooled = pool(matrix, 2)
    assert pooled.shape == (2, 2) and pooled[0, 1] == -5.0 and np.count_nonzero(pooled) == 1
