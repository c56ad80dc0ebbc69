"""The table of a run, from files alone."""

from pathlib import Path

import numpy as np

from ghostexport.commands.graph_screen import print_graph
from ghostexport.commands.screen import ProgressLines, variant_rows
from ghostexport.files import write_bytes, write_json
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import parse_recipe
from ghostexport.runfolder import RunFolder
from ghostexport.surgery import inspect_graph, operate

FIXTURES = Path(__file__).parents[1] / "fixtures"
RECIPE = parse_recipe({"model": {"source": "x"}, "recover": {"operators": ["ghost"]}})
PLAN = PrunePlan.from_spans(6, [(2, 4)])


def row(folder):
    return next(row for row in variant_rows(folder.read(), RECIPE.variants) if row["variant"] == "ghost")


def write_figures(folder, name, perplexity):
    write_json(folder.path / name, {"variants": {"ghost": {"perplexity": perplexity, "kl": 0.25, "top1": 0.5}}})


def test_both_errors_of_an_operator(tmp_path):
    folder = RunFolder(tmp_path)
    fit = {"nmse_held_out": 0.133, "relative_error_held_out": 3.1}
    operator = Operator(PLAN.boundaries[0], "ghost", delta=np.eye(4, dtype=np.float32), fit=fit)
    write_bytes(folder.operators_path("ghost"), OperatorSet("ghost", (operator,), PLAN).to_bytes())
    assert row(folder)["NMSE held-out"] == "0.133" and row(folder)["relative error held-out"] == "3.100"


def test_perplexity_of_the_engines_or_else_of_the_models(tmp_path):
    folder = RunFolder(tmp_path)
    write_figures(folder, "model_quality.json", 34.5)
    assert row(folder)["perplexity"] == "34.50" and row(folder)["KL to dense"] == "0.250"
    write_figures(folder, "engine_quality.json", 34.625)
    assert row(folder)["perplexity"] == "34.62"


def test_figures_of_an_earlier_plan_are_not_shown(tmp_path):
    folder = RunFolder(tmp_path)
    write_json(folder.plan_path, PLAN.to_json())
    write_figures(folder, "model_quality.json", 34.5)
    folder.record("eval", "sections", [folder.plan_path], [tmp_path / "model_quality.json"], {}, 1.0)
    assert row(folder)["perplexity"] == "34.50"
    write_json(folder.plan_path, PrunePlan.from_spans(6, [(1, 4)]).to_json())
    assert not variant_rows(folder.read(), RECIPE.variants)


def test_without_a_terminal_a_long_step_says_every_tenth_where_it_is(monkeypatch):
    clock, lines = [0.0], []
    monkeypatch.setattr("ghostexport.commands.screen.time.monotonic", lambda: clock[0])
    update = ProgressLines(lines.append).update
    for done in range(51):  # two seconds each
        update("recover · KL 0.3", done, 50)
        clock[0] += 2
    assert len(lines) == 10
    assert lines[0] == "recover · KL 0.3: 5 of 50 (10 %), about 1:30 left"
    assert lines[8] == "recover · KL 0.3: 45 of 50 (90 %), about 0:10 left" and lines[9].endswith("(100 %), done")
    for done in range(51):  # a short one
        update("surgery", done, 50)
        clock[0] += 0.05
    update("load the model", 0, None)
    clock[0] += 100
    update("load the model", 1, 1)
    assert len(lines) == 10
    for done in range(3):  # the same step again, for another variant
        update("recover", done, 2)
        clock[0] += 30
    assert lines[10:] == ["recover: 1 of 2 (50 %), about 0:30 left", "recover: 2 of 2 (100 %), done"]


def test_a_graph_in_words(tmp_path, capsys):
    graph = FIXTURES / "transformers-gemma3" / "model.onnx"
    operate(graph, PrunePlan.from_spans(6, [(1, 3)]), None, tmp_path / "pruned.onnx")
    print_graph(inspect_graph(tmp_path / "pruned.onnx"), as_json=False)
    text = capsys.readouterr().out
    assert "4 of 6 blocks on a residual stream of 32 channels, float32" in text
    assert "cut 0: blocks [1, 3) gone, nothing in their place" in text
    assert "block 1 (dense 3, KV 1): " in text
    print_graph(inspect_graph(FIXTURES / "genai-llama-int4" / "model.onnx"), as_json=False)
    assert "31 MatMulNBits" in capsys.readouterr().out
