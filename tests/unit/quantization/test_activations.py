"""Rounded inputs: the graph's own nodes against NumPy, the PyTorch twin against the graph."""

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from ghostexport.errors import BuildError, RecipeError
from ghostexport.float32_twin import for_cpu
from ghostexport.models.rounding import round_weights
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.quantization.dynamic import round_blocks
from ghostexport.quantization.forms import FORMS
from ghostexport.quantization.inputs import Inputs, measure_inputs
from ghostexport.quantization.reader import rounded_inputs, rounded_weights
from ghostexport.quantization.targets import Settings, refusal
from ghostexport.quantization.writer import quantize_graph
from ghostexport.recipe import parse_recipe
from ghostexport.runtimes.ort.onnxruntime import open_graph
from ghostexport.surgery import operate
from ghostexport.verification import compare

RECIPE = {"model": {"source": "m"}, "select": {"prune": 1}}
TOKENS = np.random.default_rng(2).integers(0, 128, (4, 24))


@pytest.fixture(scope="module")
def dense(exported):
    return exported("llama-tied", vocab_size=264)


@pytest.fixture(scope="module")
def seen(dense):
    return measure_inputs(dense.path, TOKENS)


def logits(graph, ids=TOKENS[:2]):
    session = open_graph(graph)
    return session.forward(ids, session.new_cache(len(ids)))[0]


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("smooth", [None, 0.5])
def test_the_pytorch_twin_rounds_what_the_graph_rounds(dense, seen, form, smooth, tmp_path):
    settings = Settings(activations="static", smooth=smooth, keep="none")
    report = quantize_graph(dense.path, tmp_path / "q.onnx", form, settings, inputs=seen)
    body = [row for row in report.linears if row.form]
    assert len(body) == 7 * 6 and all(row.activations and row.block is None for row in body)
    twin = round_weights(dense.model, dense.path, tmp_path / "q.onnx")
    parity = compare(twin, tmp_path / "q.onnx")
    assert parity.passed and "rounded at other places" in parity.note
    # rounding is far from nothing, and the twin follows it closely
    rounded, plain = logits(tmp_path / "q.onnx"), logits(dense.path)
    with torch.no_grad():
        followed = twin(torch.from_numpy(TOKENS[:2])).logits.numpy()
    assert np.abs(rounded - followed).mean() < 0.1 * np.abs(rounded - plain).mean()


def test_a_scale_maps_the_largest_input_to_the_end_of_the_grid(dense, seen, tmp_path):
    quantize_graph(dense.path, tmp_path / "q.onnx", "int8", Settings(activations="static", keep="none"), inputs=seen)
    for name, how in rounded_inputs(tmp_path / "q.onnx").items():
        assert how.inverse is None and how.scale == pytest.approx(seen[name].largest.max() / 127, rel=1e-6)


def test_smoothing_moves_the_large_inputs_into_the_weight_and_changes_no_product(dense, seen, tmp_path):
    settings = Settings(activations="static", smooth=0.5, keep="none", scales="absmax")
    quantize_graph(dense.path, tmp_path / "q.onnx", "int8", settings, inputs=seen)
    stored = {i.name: numpy_helper.to_array(i) for i in onnx.load(dense.path).graph.initializer}
    weights = dict(rounded_weights(tmp_path / "q.onnx"))
    inputs = rounded_inputs(tmp_path / "q.onnx")
    assert inputs.keys() == weights.keys()
    for name, how in inputs.items():
        together = how.inverse[:, None] * weights[name]  # what x is multiplied by in all
        assert np.abs(together - stored[name]).max() < 0.02 * np.abs(stored[name]).max()
        smoothed = seen[name].largest * how.inverse
        assert how.scale == pytest.approx(smoothed.max() / 127, rel=1e-5)
        assert smoothed.max() / np.median(smoothed) <= seen[name].largest.max() / np.median(seen[name].largest)


def test_an_input_with_massive_values_stays_as_it_is_and_the_report_says_so(dense, seen, tmp_path):
    massive = next(name for name in seen if seen[name].largest.shape == (96,))
    changed = dict(seen)
    changed[massive] = Inputs(seen[massive].squares, seen[massive].largest * 1000)
    settings = Settings(activations="static")
    report = quantize_graph(dense.path, tmp_path / "q.onnx", "int8", settings, inputs=changed)
    assert {row.weight for row in report.linears if row.form and not row.activations} == {massive}
    row = next(row for row in report.linears if row.weight == massive)
    assert "not rounded" in row.reason and massive not in rounded_inputs(tmp_path / "q.onnx")


def test_an_int8_operator_is_rounded_per_channel_and_no_other(dense, tmp_path):
    plan = PrunePlan.from_spans(6, [(2, 4)])
    delta = (0.1 * np.random.default_rng(0).standard_normal((64, 64))).astype(np.float32)
    ghost = tmp_path / "ghost.onnx"
    operate(dense.path, plan, OperatorSet("ghost", (Operator(plan.boundaries[0], "ghost", delta=delta),), plan), ghost)
    settings = Settings(operator="int8", scales="absmax")
    report = quantize_graph(ghost, tmp_path / "q.onnx", "int4", settings)
    (row,) = [row for row in report.linears if row.weight.startswith("ghost.")]
    assert (row.form, row.block, row.bytes) == ("int8", None, 64 * 64 + 64 * 4)
    found = dict(rounded_weights(tmp_path / "q.onnx"))["ghost.0.delta"]
    assert np.abs(found - delta).max() <= np.abs(delta).max(axis=0).max() / 127 / 2 * 1.001
    assert not np.array_equal(found, delta)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["SM86", "SM89", "SM120"])
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_tensorrt_rtx_builds_rounded_inputs(exported, form, target, build_rtx, tmp_path):
    dense = exported("llama-tied", "float16", vocab_size=264)
    seen = measure_inputs(dense.path, TOKENS)
    settings = Settings(activations="static", smooth=0.5 if form == "int8" else None)
    quantize_graph(dense.path, tmp_path / "q.onnx", form, settings, inputs=seen)
    if refusal(form, "tensorrt-rtx", (target,)) is None:
        assert build_rtx(tmp_path / "q.onnx", target).plan_bytes > 0
    else:
        with pytest.raises(BuildError, match=rf"needs SM.* and {target} is older"):
            build_rtx(tmp_path / "q.onnx", target)


def test_what_no_kernel_multiplies_is_refused(dense, tmp_path):
    with pytest.raises(RecipeError, match=r"int4 weights with eight-bit inputs"):
        quantize_graph(dense.path, tmp_path / "q.onnx", "int4", Settings(activations="static"))
    with pytest.raises(RecipeError, match=r"calibration text"):
        quantize_graph(dense.path, tmp_path / "q.onnx", "int8", Settings(activations="static"))
    with pytest.raises(RecipeError, match=r"int4 weights with eight-bit inputs"):
        parse_recipe(
            {
                "model": {"source": "m"},
                "select": {"prune": 1},
                "quantize": {"format": ["int4"], "activations": "static"},
            }
        )
    with pytest.raises(RecipeError, match=r"Unknown way to treat activations 'sttic'.*\n.*static"):
        parse_recipe(RECIPE | {"quantize": {"activations": "sttic"}})
    assert not list(tmp_path.iterdir())


BLOCKS = {"mxfp8": 32, "nvfp4": 16}


@pytest.fixture(scope="module")
def wide(exported):
    """Inputs of 64 and 96 channels: blocks of 32 divide both."""
    made = exported("llama-tied", vocab_size=264)
    return made, measure_inputs(made.path, TOKENS)


@pytest.mark.parametrize("smooth", [None, 0.5])
@pytest.mark.parametrize("form", BLOCKS)
def test_scales_found_at_run_time_are_the_twins_and_the_functions(wide, form, smooth, tmp_path):
    """PyTorch, rounding by NumPy, against ONNX Runtime, computing functions that are written in ONNX."""
    made, seen = wide
    settings = Settings(activations="dynamic", smooth=smooth, keep="none")
    report = quantize_graph(made.path, tmp_path / "q.onnx", form, settings, inputs=seen)
    body = [row for row in report.linears if row.form]
    assert len(body) == 7 * 6 and all(row.activations and row.block == BLOCKS[form] for row in body)
    twin = round_weights(made.model, made.path, tmp_path / "q.onnx")
    parity = compare(twin, tmp_path / "q.onnx")
    assert parity.passed and "rounded at other places" in parity.note and "unpacked" in parity.note
    (tmp_path / "twin").mkdir()
    rounded, plain = logits(for_cpu(tmp_path / "q.onnx", "float32", tmp_path / "twin")[0]), logits(made.path)
    with torch.no_grad():
        followed = twin(torch.from_numpy(TOKENS[:2])).logits.numpy()
    assert np.abs(rounded - followed).mean() < 0.1 * np.abs(rounded - plain).mean()


@pytest.mark.parametrize("form", BLOCKS)
def test_blocks_of_inputs_are_rounded_to_the_nearest_value_by_definition(form):
    size, grid = BLOCKS[form], {"mxfp8": 448, "nvfp4": 6}[form]
    x = (np.random.default_rng(0).standard_normal((3, 5, 96)) * 10).astype(np.float32)
    x[0, 0, :size] = 0
    unit = float(np.abs(x).max()) / (6 * 448) if form == "nvfp4" else 1.0
    found = round_blocks(x, FORMS[form], unit)
    blocks = x.reshape(-1, size).astype(np.float64)
    largest = np.abs(blocks).max(1, keepdims=True) / grid
    if form == "mxfp8":
        scale = np.exp2(np.ceil(np.log2(np.where(largest == 0, 1, largest))))
        bits = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    else:
        scale = (largest / unit).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * np.float32(unit)
        bits = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    values = bits.astype(np.float64)
    values = values[np.isfinite(values)]
    nearest = np.abs(blocks[:, :, None] - values * scale[:, :, None]).min(2)
    assert np.allclose(np.abs(blocks - found.reshape(-1, size)), nearest, atol=1e-5)
    assert not found[0, 0, :size].any()


@pytest.mark.slow
@pytest.mark.parametrize(("form", "target"), [("mxfp8", "SM89"), ("mxfp8", "SM120"), ("nvfp4", "SM120")])
def test_tensorrt_rtx_builds_inputs_whose_scales_it_finds(exported, form, target, build_rtx, tmp_path):
    made = exported("llama-tied", "float16", vocab_size=264)
    settings = Settings(activations="dynamic", smooth=0.5)
    quantize_graph(made.path, tmp_path / "q.onnx", form, settings, inputs=measure_inputs(made.path, TOKENS))
    assert build_rtx(tmp_path / "q.onnx", target).plan_bytes > 0


def test_forms_without_such_kernels_are_refused(dense, tmp_path):
    with pytest.raises(RecipeError, match=r"int4 weights .* no kernels.*\n.*mxfp8 and nvfp4"):
        quantize_graph(dense.path, tmp_path / "q.onnx", "int4", Settings(activations="dynamic"))
    with pytest.raises(RecipeError, match=r"nvfp4 weights with eight-bit inputs"):
        quantize_graph(dense.path, tmp_path / "q.onnx", "nvfp4", Settings(activations="static"))
    assert not list(tmp_path.iterdir())
