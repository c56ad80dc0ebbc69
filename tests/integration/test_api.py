"""The notebook's functions: the same artefacts as the pipeline, the same errors, lists and paths of any kind."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

import ghostexport as gx
from ghostexport.errors import ExportError, ParityError, RecipeError, RecoveryError, RunFolderError
from ghostexport.recovery.registry import OPERATORS
from tests.tiny import tiny_folder

CALIBRATION = {"sequences": 8, "length": 64, "held_out_sequences": 4}
BENCH = {"prefill_tokens": [8], "decode_past": [8], "request": [8, 2], "repeats": 2, "warmup": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("api") / "tiny")


@pytest.fixture(scope="module")
def made(folder):
    """Everything up to the operators, made once."""
    model = gx.load(folder, device="cpu")
    tokens = gx.calibrate(model, "demo", **CALIBRATION)
    plan = gx.select(model, tokens, prune=2)
    return model, tokens, plan, gx.recover(model, plan, tokens, ["ghost", "ghost-zero+refit", "ghost-split+refit"])


@pytest.mark.slow
def test_the_functions_make_what_the_pipeline_makes(folder, made, tmp_path):
    model, tokens, plan, operators = made
    sections = {
        "model": {"source": str(folder)},
        "calibration": {"source": "demo", **CALIBRATION},
        "select": {"prune": 2},
        "recover": {"operators": list(operators)},
        "build": {"runtimes": ["onnxruntime"]},
    }
    run = gx.RunFolder(tmp_path / "run")
    gx.run(gx.parse_recipe(sections), run, gx.Execution(device="cpu"), goal="build")

    assert plan.to_json() == json.loads(run.plan_path.read_text())
    for name, made_here in operators.items():
        assert made_here.to_bytes() == run.operators_path(name).read_bytes()
    (tmp_path / "out").mkdir()
    for file in run.graph_path("dense").parent.glob("dense.onnx*"):
        shutil.copy(file, tmp_path / "out")
    dense = tmp_path / "out" / "dense.onnx"
    name = "ghost-split+refit"
    graph = gx.surgery(dense, operators[name], str(tmp_path / "out" / f"{name}.onnx"))
    assert graph.path.read_bytes() == run.graph_path(name).read_bytes()
    bare = gx.surgery(str(dense), [[span.start, span.stop] for span in plan.removed], tmp_path / "out/pruned.onnx")
    assert bare.path.read_bytes() == run.graph_path("pruned").read_bytes()
    from_file = gx.surgery(dense, run.operators_path(name), tmp_path / "out" / "again.onnx")
    assert from_file.boundaries == graph.boundaries

    small = gx.apply(model, plan, operators[name])
    assert gx.verify(small, graph).passed and gx.verify(small.model, str(graph.path)).passed
    engine = gx.build(graph, runtime="onnxruntime")
    assert engine.path.read_bytes() == run.engine_path("onnxruntime", name).with_name(f"{name}.onnx").read_bytes()
    stamp = engine.path.stat().st_mtime_ns
    assert gx.build(graph.path, runtime="onnxruntime") == engine and engine.path.stat().st_mtime_ns == stamp  # kept

    report = gx.bench([dense, engine.sidecar], tokens=tokens, **BENCH)
    assert list(report.engines) == ["dense", name] and report.parity == {"dense": True, name: True}
    measured = report.to_json()["quality"]["variants"][name]
    assert measured["perplexity"] == pytest.approx(gx.evaluate(small, tokens).perplexity, rel=1e-4)


def test_a_variant_is_measured_against_the_dense_model_it_was_made_of(made):
    model, tokens, plan, operators = made
    small = gx.apply(model, plan, operators["ghost"])
    found = gx.evaluate({"dense": model, "pruned": gx.apply(model, plan), "ghost": small}, tokens)
    assert found["dense"].mean_kl == pytest.approx(0, abs=1e-12) and found["dense"].top1_agreement == 1
    assert found["ghost"] == gx.evaluate(small, tokens)
    assert found["pruned"].mean_kl > 0
    assert gx.evaluate(model, tokens).mean_kl is None  # nothing to compare with
    logits = small(torch.from_numpy(tokens.held_out.tokens)).logits[:, :-1].double().log_softmax(-1)
    losses = -logits.gather(2, torch.from_numpy(tokens.held_out.tokens)[:, 1:, None])
    assert found["ghost"].perplexity == pytest.approx(float(losses.mean().exp()), rel=1e-6)
    assert gx.evaluate(small, tokens.held_out, windows=1) == gx.evaluate(small, tokens, windows=1)


def test_a_small_model_generates_as_one_of_transformers(made, tmp_path):
    model, _, plan, operators = made
    for change in (None, operators["ghost"], operators["ghost-zero+refit"]):
        small = gx.apply(model, plan, change)
        assert small.config.num_hidden_layers == 4 and model.config.num_hidden_layers == 6
        asked = model.tokenizer(["some words", "other words!"], return_tensors="pt", padding=True, padding_side="left")
        asked = {key: value for key, value in asked.items() if key != "token_type_ids"}
        cached = small.generate(**asked, max_new_tokens=6, do_sample=False)
        assert torch.equal(cached, small.generate(**asked, max_new_tokens=6, do_sample=False, use_cache=False))
        beams = small.generate(**asked, max_new_tokens=3, num_beams=2, return_dict_in_generate=True)
        assert beams.sequences.shape[0] == 2
        streamer = transformers.TextStreamer(small.tokenizer)
        small.generate(asked["input_ids"][:1], max_new_tokens=2, streamer=streamer)


def test_a_folded_variant_is_saved_as_a_plain_checkpoint_and_another_comes_back_whole(made, tmp_path):
    model, tokens, plan, operators = made
    ids = torch.from_numpy(tokens.held_out.tokens[:1])
    folded = gx.apply(model, plan, operators["ghost-zero+refit"])
    gx.save(folded, str(tmp_path / "folded"))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folded")
    torch.testing.assert_close(plain(ids).logits, folded(ids).logits)
    patched = gx.apply(model, plan, operators["ghost-split+refit"])
    assert {path.name for path in gx.save(patched, tmp_path / "patched")} >= {"ghostexport.safetensors"}
    torch.testing.assert_close(gx.load(str(tmp_path / "patched"))(ids).logits, patched(ids).logits)
    with pytest.raises(RecipeError, match="cut already"):
        gx.apply(gx.load(tmp_path / "patched"), [[0, 1]])


def test_what_is_wrong_is_refused_as_on_the_command_line(made, folder, tmp_path):
    model, tokens, plan, operators = made
    refused = [
        (RecipeError, "does not exist", lambda: gx.load("./nowhere")),
        (RecipeError, "ModelSection: dtype", lambda: gx.load(folder, dtype="float23")),
        (RecipeError, "Did you mean 'sequences'", lambda: gx.calibrate(model, "demo", sequenses=3)),
        (RecipeError, "either a number of blocks or a plan", lambda: gx.select(model, tokens)),
        (RecipeError, "Did you mean 'streamline'", lambda: gx.select(model, tokens, prune=1, criterion="streamlin")),
        (RecipeError, "Did you mean 'ghost'", lambda: gx.recover(model, plan, tokens, "gost")),
        (RecipeError, "Did you mean 'ridge'", lambda: gx.recover(model, plan, tokens, "ghost", rigde=1.0)),
        (RecoveryError, "rank", lambda: gx.recover(model, plan, tokens, "ghost", rank=1000)),
        (RecipeError, "were fitted for", lambda: gx.apply(model, [[0, 1]], operators["ghost"])),
        (RunFolderError, "does not exist", lambda: gx.apply(model, plan, "nowhere.safetensors")),
        (RecipeError, "ExportSection: opset", lambda: gx.export(model, tmp_path / "x.onnx", opset=3)),
        (RecipeError, "Did you mean 'onnxruntime'", lambda: gx.build(tmp_path / "x.onnx", runtime="onnxruntme")),
        (RecipeError, "Did you mean 'max_batch'", lambda: gx.build("x.onnx", runtime="onnxruntime", max_bach=1)),
        (RecipeError, "Did you mean 'repeats'", lambda: gx.bench(["x.onnx"], repeat=2)),
        (RecipeError, "of one runtime", lambda: gx.bench([])),
    ]
    for error, says, call in refused:
        with pytest.raises(error, match=says):
            call()
    assert issubclass(ParityError, gx.GhostExportError) and issubclass(ExportError, gx.GhostExportError)


@pytest.mark.slow
def test_outside_a_run_folder_too_an_operator_that_overflows_float16_is_a_float32_island(made, folder, tmp_path):
    operators = made[3]
    half = gx.load(folder, dtype="float16", device="cpu")
    (fitted,) = operators["ghost"].operators
    large = replace(fitted, fit={**fitted.fit, "largest_x": 4e4})
    graph = gx.surgery(
        gx.export(half, tmp_path / "dense.onnx"), replace(operators["ghost"], operators=(large,)), tmp_path / "g.onnx"
    )
    assert graph.boundaries[0].nodes_added[0] == "ghost.0.cast_in"


def test_tokens_at_hand_take_the_place_of_drawn_ones(made):
    model, tokens, plan, _ = made
    own = gx.Tokens(gx.CalibrationSet.from_tokens(tokens.calibration.tokens.tolist()), tokens.held_out)
    assert gx.select(model, own, prune=2) == gx.select(model, own.calibration, prune=2) == plan
    again = gx.recover(model, plan, own, "ghost")
    np.testing.assert_array_equal(again.operators[0].delta, made[3]["ghost"].operators[0].delta)


@pytest.mark.parametrize(
    ("sections", "goal", "says"),
    [
        (
            {"recover": {"operators": ["ghost", "ghost-zero"]}},
            "checkpoint",
            r"ghost adds a node.*\n.*ghost-zero\+",
        ),
        ({"select": {"spans": [[4, 9]]}}, "recover", "6 decoder blocks"),
        ({"build": {"runtimes": ["onnxruntime"], "profiles": "split"}}, "build", "build.profiles"),
        ({"build": {"runtimes": ["tensorrt"]}}, "build", "tensorrt cannot build engines here"),
    ],
)
def test_what_a_later_stage_would_refuse_is_refused_before_calibration(folder, tmp_path, sections, goal, says):
    recipe = gx.parse_recipe({"model": {"source": str(folder)}, "select": {"prune": 2}} | sections)
    run = gx.RunFolder(tmp_path / "run")
    with pytest.raises(gx.GhostExportError, match=says):
        gx.run(recipe, run, gx.Execution(device="cpu"), goal=goal)
    assert not run.calibration_path.exists() and run.manifest()["stages"] == {}


def test_the_goal_checkpoint_writes_ordinary_checkpoints_and_exports_nothing(folder, tmp_path):
    sections = {"source": str(folder)}, {"source": "demo", **CALIBRATION}, {"operators": ["ghost-zero+refit", "none"]}
    recipe = gx.parse_recipe(
        dict(zip(("model", "calibration", "recover"), sections, strict=True)) | {"select": {"prune": 2}}
    )
    run = gx.RunFolder(tmp_path / "run")
    gx.run(recipe, run, gx.Execution(device="cpu"), goal="checkpoint")
    for name in recipe.recover.operators:
        plain = transformers.AutoModelForCausalLM.from_pretrained(run.checkpoints_path / name)
        assert plain.config.num_hidden_layers == 4
    assert not run.graph_path("dense").exists()


def test_the_table_says_which_kinds_only_change_kept_weights(made):
    model, tokens, plan, _ = made
    closed = [name for name, kind in OPERATORS.items() if kind.train is None]
    found = gx.recover(model, plan, tokens, closed)
    assert {name: not operators.adds_nodes for name, operators in found.items()} == {
        name: OPERATORS[name].folded for name in closed
    }
