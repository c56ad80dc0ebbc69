"""What a stage needs, from configurations alone, and what is refused before it starts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ghostexport import models, pipeline
from ghostexport.cli import app
from ghostexport.errors import CapacityError, RecipeError
from ghostexport.execution import Execution
from ghostexport.models.shape import read_shape
from ghostexport.recipe import parse_recipe, read_recipe
from ghostexport.resolution import resolve_machine
from ghostexport.runfolder import RunFolder
from ghostexport.sizing.capacity import Machine, measure_machine
from ghostexport.sizing.estimate import estimate, judge
from ghostexport.sizing.needs import need_of
from tests.tiny import tiny_folder

RECIPES = Path(__file__).parents[2] / "recipes"

#: Parameters as the model cards, or the tensors on the Hub, count them, in millions.
PUBLISHED = {
    "smollm2-135m": 134.5,
    "smollm3-3b": 3075,
    "llama-3.2-1b": 1236,
    "llama-3.2-3b": 3213,
    "llama-3.1-8b": 8030,
    "qwen3-0.6b": 596,
    "qwen3-1.7b": 1721,
    "qwen3-4b": 4022,
    "qwen3-8b": 8191,
    "qwen2.5-1.5b": 1544,
    "qwen2.5-7b": 7616,
    "gemma-2-2b": 2614,
    "gemma-3-270m": 268.1,
    "gemma-3-1b": 999.9,
    "phi-3.5-mini": 3821,
    "phi-4-mini": 3836,
    "ministral-8b": 8020,
    "mistral-7b": 7248,
    "granite-3.1-2b": 2534,
    "olmo-2-1b": 1485,
    "gpt-oss-20b": 20915,
    "gemma-3-4b": 4300,
}

ROOMY = Machine(memory=10**13, total_memory=10**13, disk=10**13)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_is_estimated_offline_from_the_shapes_of_its_model(path):
    config, recipe = RECIPES / "configs" / f"{path.stem}.json", parse_recipe(read_recipe(path), path.name)
    shape = read_shape(config)
    assert shape.blocks == int(path.read_text().splitlines()[1].split()[1])
    assert shape.parameters / 1e6 == pytest.approx(PUBLISHED[path.stem], rel=4e-3)
    wide = {"model": {"source": "m", "dtype": "float32"}, "build": {"runtimes": ["onnxruntime"]}}
    recipe = parse_recipe(recipe.model_dump(mode="json") | wide)
    for stage in ("select", "recover", "export", "verify", "build"):
        need = need_of(stage, shape, recipe)
        assert need.memory >= 4 * shape.parameters and judge(need, shape, recipe, ROOMY).lacks == ""
    assert need_of("export", shape, recipe).disk == 4 * shape.parameters


def test_the_shape_is_that_of_the_model_in_memory(tmp_path):
    folder = tiny_folder(tmp_path / "model")
    loaded, shape = models.load_model(folder, "float32"), read_shape(folder)
    assert shape.parameters == sum(p.numel() for p in loaded.model.parameters())
    assert shape.in_blocks == sum(p.numel() for p in loaded.blocks.parameters())
    assert (shape.blocks, shape.hidden, shape.vocabulary) == (
        loaded.num_blocks,
        loaded.hidden_size,
        loaded.vocab_size,
    )
    assert shape.widest == loaded.config.intermediate_size


def eight_billion(**model):
    data = {"model": {"source": "m", **model}, "select": {"prune": 8}, "recover": {"quality": "best"}}
    return parse_recipe(data | {"build": {"runtimes": ["tensorrt-rtx"]}})


def test_a_stage_that_will_not_fit_names_an_option_that_makes_it_fit():
    shape, machine = read_shape(RECIPES / "configs" / "llama-3.1-8b.json"), replace(ROOMY, memory=24 * 10**9)
    recipe = eight_billion(dtype="float32")
    found = judge(need_of("select", shape, recipe), shape, recipe, machine)
    assert found.lacks == "memory" and "--dtype bfloat16" in found.way
    half = eight_billion(dtype="bfloat16")
    assert not judge(need_of("select", shape, half), shape, half, machine).lacks
    # the sums inside a block, [x_mid, h] of 4096 + 14336 numbers: two folds of (R, R + C) and a solve, float64
    inner = 4096 + 14336
    parts = need_of("recover", shape, half).parts
    assert parts["moments inside a block"] == 8 * (2 * inner * (inner + 4096) + 2 * inner**2)
    streamed = judge(need_of("recover", shape, half), shape, half, machine)  # the weights stay in their files
    assert streamed.lacks == "" and "weights" not in streamed.need.parts
    assert streamed.need.parts["moments inside a block"] == parts["moments inside a block"]
    machine = replace(ROOMY, memory=8 * 10**9)
    refused = judge(need_of("recover", shape, half), shape, half, machine)
    assert refused.lacks == "memory" and "--quality paper" in refused.way
    paper = half.model_copy(update={"recover": half.recover.model_copy(update={"operators": ("ghost",)})})
    assert not judge(need_of("recover", shape, paper), shape, paper, machine).lacks
    full = replace(ROOMY, disk=10**9)
    assert judge(need_of("export", shape, half), shape, half, full).lacks == "disk"


def test_eight_billion_parameters_are_streamed_in_a_third_of_their_size():
    shape, machine = read_shape(RECIPES / "configs" / "llama-3.1-8b.json"), replace(ROOMY, memory=6 * 10**9)
    recipe = eight_billion(dtype="bfloat16")
    recipe = recipe.model_copy(update={"recover": recipe.recover.model_copy(update={"operators": ("ghost",)})})
    select, recover = (judge(need_of(stage, shape, recipe), shape, recipe, machine) for stage in ("select", "recover"))
    assert not select.lacks and not recover.lacks and max(v.need.memory for v in (select, recover)) < 6e9
    values = 128 * 2048 * 4096 * 2  # bytes of the calibration set's residual values
    more = select.need.disk - need_of("select", shape, recipe).disk
    assert more == 10 * values - 1.5e9  # those of a run of 8 blocks, the next, and the walk's own
    other = eight_billion(dtype="float16")  # not the checkpoint's: a copy in memory
    assert judge(need_of("select", shape, other), shape, other, machine).lacks == "memory"
    assert judge(need_of("select", shape, recipe), shape, recipe, replace(machine, gpu=6 * 10**9)).lacks


def test_a_gpu_too_small_is_told_from_memory():
    shape, recipe = read_shape(RECIPES / "configs" / "llama-3.1-8b.json"), eight_billion(dtype="bfloat16")
    machine = replace(ROOMY, gpu=8 * 10**9)
    found = judge(need_of("select", shape, recipe), shape, recipe, machine)
    assert found.lacks == "GPU memory" and "--device cpu" in found.way
    assert not judge(need_of("select", shape, recipe), shape, recipe, machine, "cpu").lacks


def test_the_machine_is_this_one(tmp_path):
    machine = measure_machine(tmp_path / "not" / "there", "cpu")
    assert 0 < machine.memory <= machine.total_memory and machine.disk > 0 and machine.gpu is None


def test_the_command_says_no_with_exit_code_1(monkeypatch):
    monkeypatch.setattr("ghostexport.sizing.estimate.measure_machine", lambda *_: ROOMY)
    config = str(RECIPES / "configs" / "llama-3.1-8b.json")
    flags = ["--prune", "8", "--runtime", "onnxruntime", "--device", "cpu"]
    wide = CliRunner().invoke(app, ["estimate", config, *flags, "--memory", "999"])
    assert wide.exit_code == 0 and "39.2" in wide.output  # float32 where there is room for it
    small = CliRunner().invoke(app, ["estimate", config, *flags, "--memory", "24", "--dtype", "float32"])
    assert small.exit_code == 1 and "no: memory" in small.output and "--dtype float16" in small.output
    large = CliRunner().invoke(app, ["estimate", config, *flags, "--memory", "9999", "--json"])
    by_stage = {row["need"]["stage"]: row for row in json.loads(large.output)}
    assert [*by_stage][:4] == ["calibrate", "select", "recover", "export"] and by_stage["select"]["lacks"] == ""
    with pytest.raises(RecipeError, match="40 of 32"):
        estimate(parse_recipe({"model": {"source": "m"}, "select": {"prune": 40}}), Path(config), Path())


def test_a_stage_is_refused_before_it_starts_and_told_where_it_is_tight(tmp_path, monkeypatch):
    folder, said = RunFolder(tmp_path / "run"), []
    source = tiny_folder(tmp_path / "model")
    recipe = parse_recipe({"model": {"source": str(source), "dtype": "float32"}, "select": {"spans": [[2, 4]]}})
    shape = read_shape(source)
    need = need_of("export", shape, recipe)
    monkeypatch.setattr(
        "ghostexport.sizing.capacity.measure_machine", lambda *_: replace(ROOMY, memory=int(need.memory / 2))
    )
    with pytest.raises(CapacityError, match=r"export will not fit: it needs about 701.0 MB of memory"):
        pipeline.run(recipe, folder, Execution(device="cpu"), goal="export")
    assert not folder.graph_path("dense").exists() and "export" not in folder.manifest()["stages"]
    monkeypatch.setattr(
        "ghostexport.sizing.capacity.measure_machine", lambda *_: replace(ROOMY, memory=int(need.memory * 0.9))
    )
    pipeline._require_capacity("export", folder, recipe, Execution(device="cpu", say=said.append))
    assert len(said) == 1 and said[0].startswith("export: may not fit")


@pytest.mark.parametrize(
    ("checkpoint", "build", "memory", "expected"),
    [
        ("bfloat16", {"runtimes": ["tensorrt-rtx"]}, 10**12, "bfloat16"),
        ("float16", {"runtimes": ["tensorrt"]}, 10**12, "float16"),
        ("float32", {"runtimes": ["tensorrt-rtx"]}, 10**12, "float16"),
        ("bfloat16", {"runtimes": ["onnxruntime"]}, 10**12, "float32"),
        ("bfloat16", {"runtimes": ["onnxruntime", "tensorrt-rtx"]}, 10**12, "float32"),
        ("bfloat16", {"runtimes": ["onnxruntime"], "providers": ["cuda"]}, 10**12, "bfloat16"),
        ("bfloat16", {"runtimes": ["onnxruntime"]}, 10**8, "float16"),
        ("bfloat16", {}, 10**12, "float32"),
        ("bfloat16", {}, 10**8, "bfloat16"),
    ],
)
def test_auto_is_what_the_runtime_and_the_memory_want(checkpoint, build, memory, expected, tmp_path, monkeypatch):
    config = json.loads((RECIPES / "configs" / "smollm2-135m.json").read_text()) | {"dtype": checkpoint}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("ghostexport.sizing.capacity.measure_machine", lambda *_: replace(ROOMY, total_memory=memory))
    said = []
    recipe = parse_recipe({"model": {"source": str(tmp_path)}, "select": {"prune": 5}, "build": build})
    execution = Execution(device="cpu", say=said.append)
    assert recipe.model.dtype == "auto"
    assert resolve_machine(recipe, execution, building=False).model.dtype == expected
    assert len(said) == 1 and said[0].startswith(f"dtype: {expected} (")
