"""The best repair, folds and every quantised format on every target that says it holds them; the others refuse."""

import pytest

from ghostexport.deploy import TARGETS, deploy
from ghostexport.errors import RecipeError
from ghostexport.execution import Execution
from ghostexport.recipe import BuildSection
from ghostexport.runtimes import RUNTIMES

CPU = Execution(device="cpu")
FORMATS = ("int8", "int4", "fp8", "mxfp8", "nvfp4")
#: Target -> what it holds beside float weights.
HELD = {
    "checkpoint": (),
    "transformers": (),
    "vllm": (),
    "gguf": (),
    "edge-llm": (),
    "genai": ("int8", "int4"),
    "triton": ("int8", "int4"),
    "openvino": ("int8", "int4"),
    "tensorrt": FORMATS,
    "tensorrt-rtx": FORMATS,
}
SLOW = pytest.mark.slow
RUN_HERE = {"transformers": "transformers", "genai": "onnxruntime_genai", "openvino": "openvino"}


@pytest.fixture(scope="module")
def run(tiny_model, exported_run, text_file, tmp_path_factory):
    """What ``--quality best`` fits a model of plain blocks, in all formats, verified."""
    from ghostexport.cli import resolve
    from ghostexport.pipeline import run as run_pipeline

    given = {
        "calibration": {"source": str(text_file), "sequences": 24, "length": 64},
        "select": {"prune": 2},
        "recover": {"operators": ["ghost-split+refit"]},
        "quantize": {"format": list(FORMATS)},
    }
    recipe, folder = resolve(str(tiny_model), tmp_path_factory.mktemp("formats") / "run", None, given)
    folder.adopt("export", exported_run)
    run_pipeline(recipe, folder, goal="verify")
    return folder


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_says_what_it_holds(target):
    assert set(TARGETS[target].forms) == set(HELD[target])


@pytest.mark.parametrize("target", TARGETS)
def test_what_a_target_does_not_hold_is_refused_by_its_format(target, run, tmp_path):
    for form in set(FORMATS) - set(HELD[target]):
        with pytest.raises(RecipeError, match=f"it holds float.* weights, not {form}"):
            deploy(run.path, target, tmp_path / "out", f"ghost-split+refit.{form}", CPU)


@pytest.mark.parametrize("target", ["transformers", "genai", pytest.param("openvino", marks=SLOW)])
def test_the_best_repair_answers_as_verified(target, run, tmp_path):
    pytest.importorskip(RUN_HERE[target])
    assert "passed" in deploy(run.path, target, tmp_path / "out", "ghost-split+refit", CPU)


@pytest.mark.slow
@pytest.mark.parametrize("target", RUN_HERE)
def test_refitted_folds_answer_as_verified(target, built_run, tmp_path):
    pytest.importorskip(RUN_HERE[target])
    assert "passed" in deploy(built_run.path, target, tmp_path / "out", "ghost-zero+refit", CPU)


@pytest.mark.parametrize("form", ["int4", pytest.param("int8", marks=SLOW)])
@pytest.mark.parametrize("target", ["genai", "openvino"])
def test_a_quantised_variant_answers_as_verified(target, form, run, tmp_path):
    pytest.importorskip(RUN_HERE[target])
    assert "passed" in deploy(run.path, target, tmp_path / "out", f"ghost-split+refit.{form}", CPU)


@pytest.mark.parametrize("form", [*[pytest.param(form, marks=SLOW) for form in FORMATS[:-1]], FORMATS[-1]])
def test_an_engine_of_every_format_is_deployed(form, run, tmp_path):
    pytest.importorskip("tensorrt_rtx")
    variant = f"ghost-split+refit.{form}"
    target = run.engine_path("tensorrt-rtx", variant)
    settings = BuildSection(max_batch=1, compute_capability=("SM120",))
    RUNTIMES["tensorrt-rtx"].build(run.graph_path(variant), target, variant, settings, CPU)
    told = deploy(run.path, "tensorrt-rtx", tmp_path / "out", variant, CPU)
    assert "passed" in told or "runs on a GPU" in told
    assert (tmp_path / "out" / f"{variant}.engine").is_file()
