"""A run in plain words, from the committed run of SmolLM2 and from changed copies of it."""

import json
import shutil
from pathlib import Path

import pytest

from ghostexport.files import write_json
from ghostexport.report.explanation import explain
from ghostexport.runfolder import RunFolder

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "smollm2-n7"


@pytest.fixture
def folder(tmp_path):
    for name in ("plan.json", "recipe.yaml", "engine_quality.json"):
        shutil.copy(RESULTS / name, tmp_path / name)
    bench = RunFolder(tmp_path).bench_path("onnxruntime")
    bench.parent.mkdir()
    shutil.copy(RESULTS / "onnxruntime.json", bench)
    return RunFolder(tmp_path)


def change(path, edit):
    data = json.loads(path.read_text())
    edit(data)
    write_json(path, data)


def test_what_went_what_it_cost_and_bought(folder):
    said = explain(folder.read())
    assert said[0] == "Removed: decoder blocks [12, 19) of 30 blocks of smollm2, chosen by streamline."
    # ln(74.566 / 48.201) / ln(74.566 / 29.780) = 0.4363 / 0.9178
    assert said[1] == (
        "Cost: held-out perplexity is 48.2 with ghost and 29.78 dense "
        "(74.57 with the bare cut; the repair undoes 48% of its loss)."
    )
    assert said[2] == "Cost: the next token is the one dense would choose 61% of the time."
    assert "Gain: weights of 440 MB instead of 538 MB." in said
    assert (
        "Gain: decode-b1-p512 on onnxruntime: ghost is 1.23 times as fast as dense, 95 % interval 1.18 to 1.28." in said
    )
    assert "Limit: the bytes and operations that are left allow 1.23, which is reached." in said
    assert any(line.startswith("Caution: on onnxruntime, clocks drifted") for line in said)
    advice = [line for line in said if line.startswith("Next: ")]
    assert [next(flag for flag in ("best", "--prune 6", "int4") if flag in line) for line in advice] == [
        "best",
        "--prune 6",
        "int4",
    ]


def test_what_is_not_measured_is_not_claimed(folder):
    def slower(bench):
        for c in bench["comparisons"]:
            c["speedup"] = {"value": 1.01, "low": 0.97, "high": 1.05}
            c["of_ideal"] = 0.5 if c["of_ideal"] else None

    change(folder.bench_path("onnxruntime"), slower)
    said = explain(folder.read())
    assert any("is not measurably faster (1.01 times" in line for line in said)
    assert any("of which 50% is reached: the runtime limits it" in line for line in said)
    folder.bench_path("onnxruntime").unlink()
    (folder.path / "engine_quality.json").unlink()
    said = explain(folder.read())
    assert said[1:] == [f"Next: measure what it cost: ghostexport eval {folder.path}"]
    folder.plan_path.unlink()
    assert explain(folder.read()) == [f"Removed: nothing yet. Next: ghostexport select {folder.path} --prune N"]


def test_a_repair_that_does_harm_is_called_so(folder):
    def worse(quality):
        for name in ("ghost", "linearpatch-rotate"):
            quality["variants"][name]["perplexity"] = 100.0

    change(folder.path / "engine_quality.json", worse)
    said = explain(folder.read())
    assert said[1] == "Cost: held-out perplexity is 74.57 with pruned and 29.78 dense."
    assert any("the bare cut beats every repair here" in line for line in said)


def test_show_gives_the_raw_figures(folder, capsys):
    from ghostexport.commands.screen import print_run

    print_run(folder.path, as_json=True)
    facts = json.loads(capsys.readouterr().out)
    assert facts["plan"]["removed"] == [[12, 19]] and facts["recipe"]["select"]["prune"] == 7
    assert facts["engine_quality"]["variants"]["ghost"]["perplexity"] == pytest.approx(48.2010143)
    assert set(facts["summary"]["onnxruntime"]) == {"dense", "pruned", "ghost", "linearpatch-rotate"}
