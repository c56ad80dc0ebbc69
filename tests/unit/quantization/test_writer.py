"""Quantised graphs on ONNX Runtime against the float graph that holds the rounded weights."""

import json

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper

from ghostexport.errors import BuildError, RecipeError, SurgeryError
from ghostexport.execution import Execution
from ghostexport.float32_twin import for_cpu
from ghostexport.operators import Operator, OperatorSet, WeightFold
from ghostexport.plan import PrunePlan
from ghostexport.quantization.forms import FORMS
from ghostexport.quantization.inputs import measure_inputs
from ghostexport.quantization.linears import find_linears
from ghostexport.quantization.reader import rounded_weights
from ghostexport.quantization.scales import dequantize, quantize
from ghostexport.quantization.targets import Settings, refusal
from ghostexport.quantization.writer import quantize_graph
from ghostexport.recipe import BuildSection
from ghostexport.runtimes import RUNTIMES
from ghostexport.runtimes.ort.onnxruntime import open_graph
from ghostexport.surgery import operate
from tests.decoding import onnx_logits

PLAN = PrunePlan.from_spans(6, [(2, 4)])


@pytest.fixture(scope="module")
def ghost(exported, tmp_path_factory):
    """A tiny tied decoder, cut and repaired."""
    rng = np.random.default_rng(0)
    delta = (0.1 * rng.standard_normal((64, 64))).astype(np.float32)
    operators = OperatorSet("ghost", (Operator(PLAN.boundaries[0], "ghost", delta=delta),), PLAN)
    path = tmp_path_factory.mktemp("quantization") / "ghost.onnx"
    # with 128 tokens the exporter folds the transposed head into a weight of its own
    operate(exported("llama-tied", vocab_size=264).path, PLAN, operators, path)
    return path


IDS = np.random.default_rng(1).integers(0, 128, (2, 9))


def logits(graph):
    """As ONNX Runtime runs it: its fused four-bit kernels round the inputs of a product to eight bits."""
    session = open_graph(graph, exact=False)
    return session.forward(IDS, session.new_cache(2))[0]


def exact_logits(graph):
    """By the operators as they stand in the graph, nothing fused."""
    return onnx_logits(graph, [IDS], fused=False)[0]


def rounded_twin(graph, form, block, folder, head):
    """The float graph with every linear's weight replaced by what its rounded numbers stand for."""
    model = onnx.load(graph)
    linears = {x.name: x for x in find_linears(ir.from_proto(model)) if x.products and (head == "same" or not x.head)}
    for initializer in model.graph.initializer:
        if initializer.name in linears:
            stored = numpy_helper.to_array(initializer)
            W = stored if linears[initializer.name].inputs_axis == 0 else stored.T
            again = dequantize(*quantize(W, FORMS[form], block, np.dtype(np.float32), search=False))
            again = again if linears[initializer.name].inputs_axis == 0 else again.T
            initializer.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(again), initializer.name))
    path = folder / "twin.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(("form", "block"), [("int4", 32), ("int8", 32), ("int8", None)])
@pytest.mark.parametrize("head", ["keep", "same"])
def test_the_graph_computes_with_exactly_the_rounded_weights(ghost, form, block, head, tmp_path, monkeypatch):
    if block is None:
        monkeypatch.setitem(FORMS, form, FORMS[form].__class__(form, ir.DataType.INT8, 127, -127, (None,), 21))
    report = quantize_graph(ghost, tmp_path / "q.onnx", form, Settings(scales="absmax", head=head))
    assert {row.block for row in report.linears if row.form} == {block}
    expected = exact_logits(rounded_twin(ghost, form, block, tmp_path, head))
    found = exact_logits(tmp_path / "q.onnx")
    assert np.abs(expected - found).max() < 1e-4 * expected.std()
    assert np.abs(exact_logits(ghost) - found).max() > 1e-2 * expected.std()
    assert np.abs(logits(tmp_path / "q.onnx") - found).max() < 0.2 * expected.std()


def test_operator_and_norms_keep_their_bytes_and_names(ghost, tmp_path):
    quantize_graph(ghost, tmp_path / "q.onnx", "int4", Settings(head="same"))
    before = {i.name: numpy_helper.to_array(i) for i in onnx.load(ghost).graph.initializer}
    after = {i.name: i for i in onnx.load(tmp_path / "q.onnx").graph.initializer}
    kept = before.keys() & after.keys()
    assert "ghost.0.delta" in kept and all(before[n].ndim != 2 or n.startswith("ghost.") for n in kept)
    for name in kept:
        assert np.array_equal(before[name], numpy_helper.to_array(after[name]))


def test_weights_that_an_operator_set_changed_are_quantised_and_its_operator_is_not(ghost):
    model = ir.load(ghost)
    weight = next(x.weight for x in find_linears(model) if x.shape == (64, 96))
    weight.name = "ghost.fold.3.mlp.weight"
    names = {x.name for x in find_linears(model)}
    assert "ghost.fold.3.mlp.weight" in names and not any(name.startswith("ghost.0.") for name in names)


def test_one_table_serves_a_tied_embedding_and_head(ghost, tmp_path):
    quantize_graph(ghost, tmp_path / "q.onnx", "int4", Settings(head="same"))
    graph = onnx.load(tmp_path / "q.onnx").graph
    gather = next(n for n in graph.node if n.op_type == "Gather" and n.input[0].endswith(".dequantize.value"))
    readers = {n.op_type for n in graph.node if gather.input[0] in n.input}
    assert readers == {"Gather", "Transpose"}
    unpack = next(n for n in graph.node if gather.input[0] in n.output)
    attributes = {a.name: a.i for a in unpack.attribute}
    assert attributes["axis"] == 1 and attributes["block_size"] == 32
    onnx.checker.check_model(str(tmp_path / "q.onnx"))


def test_the_report_counts_the_bytes_of_the_form(ghost, tmp_path):
    report = quantize_graph(ghost, tmp_path / "q.onnx", "int4")
    assert json.loads((tmp_path / "q.quantization.json").read_text()) == json.loads(json.dumps(report.to_json()))
    weights = sum(a * b for row in report.linears if row.form for a, b in [row.shape])
    held = sum(row.bytes for row in report.linears if row.form)
    assert held == weights / 2 + weights / 32 * 4  # four bits and a float32 scale per 32
    assert report.weight_bytes_before - report.weight_bytes_after == 4 * weights - held
    assert (report.opset_before, report.opset_after) == (20, 21)


@pytest.mark.parametrize("head", ["keep", "same"])
def test_mxfp8_is_eight_bits_and_powers_of_two_by_definition(ghost, head, tmp_path):
    report = quantize_graph(ghost, tmp_path / "q.onnx", "mxfp8", Settings(scales="absmax", head=head))
    weights = sum(a * b for row in report.linears if row.form for a, b in [row.shape])
    assert sum(row.bytes for row in report.linears if row.form) == weights * (1 + 1 / 32)
    model = onnx.load(tmp_path / "q.onnx")
    stored = {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}
    float_weights = {i.name: numpy_helper.to_array(i) for i in onnx.load(ghost).graph.initializer}
    nodes = [n for n in model.graph.node if n.op_type == "TRT_MXFP8DequantizeLinear"]
    rounded = dict(rounded_weights(tmp_path / "q.onnx"))
    assert len(nodes) == len(rounded) == sum(row.form is not None for row in report.linears)
    for node in nodes:
        q, scale = (stored[name] for name in node.input)
        attributes = {a.name: a.i for a in node.attribute}
        said = node.domain, attributes["block_size"], attributes["output_dtype"]
        assert said == ("trt", 32, onnx.TensorProto.FLOAT)
        spread = np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=attributes["axis"])
        name = node.input[0].removesuffix(".q")
        assert np.array_equal(rounded[name], (q.astype(np.float64) * spread).astype(np.float32))
        miss = np.abs(rounded[name] - float_weights[name]) / spread
        assert miss.max() <= 16 and miss.max() > 0  # half a step of E4M3 between 256 and 448
    (tmp_path / "twin").mkdir()
    twin, note = for_cpu(tmp_path / "q.onnx", "float32", tmp_path / "twin")
    expected = exact_logits(rounded_twin(ghost, "mxfp8", 32, tmp_path, head))
    assert np.abs(expected - exact_logits(twin)).max() < 1e-4 * expected.std() and "unpacked" in note


def test_equal_input_gives_equal_bytes(ghost, tmp_path):
    for name in ("a", "b"):
        quantize_graph(ghost, tmp_path / name / "q.onnx", "int4")
    for file in ("q.onnx", "q.onnx.data"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_measured_inputs_are_those_of_the_pytorch_model(exported, tmp_path):
    made = exported("llama-tied")
    tokens = np.random.default_rng(2).integers(0, 128, (3, 12))
    found = measure_inputs(made.path, tokens)
    sums, largest = {}, {}

    def watch(module, inputs):
        x = inputs[0].double().flatten(0, -2)
        sums[module] = sums.get(module, 0) + x.square().sum(0)
        largest[module] = torch.maximum(largest.get(module, torch.zeros(1)), x.abs().amax(0))

    linears = [m for m in made.model.modules() if isinstance(m, torch.nn.Linear)]
    hooks = [m.register_forward_pre_hook(watch) for m in linears]
    with torch.no_grad():
        made.model(torch.from_numpy(tokens))
    for hook in hooks:
        hook.remove()
    stored = {i.name: numpy_helper.to_array(i) for i in onnx.load(made.path).graph.initializer}
    assert len(found) == len(linears)
    for name, seen in found.items():
        same = [m for m in linears if any(np.array_equal(m.weight.detach(), w) for w in (stored[name], stored[name].T))]
        assert np.allclose(seen.squares, sums[same[0]].numpy(), rtol=1e-4)
        assert np.allclose(seen.largest, largest[same[0]].numpy(), rtol=1e-4)


def test_what_cannot_be_is_refused_and_nothing_is_written(ghost, tmp_path):
    quantize_graph(ghost, tmp_path / "q.onnx", "int4")
    there = set(tmp_path.iterdir())
    with pytest.raises(SurgeryError, match="quantised already"):
        quantize_graph(tmp_path / "q.onnx", tmp_path / "r.onnx", "int4")
    with pytest.raises(SurgeryError, match=r"Blocks of 128 do not fit: .* has 64 inputs"):
        quantize_graph(ghost, tmp_path / "r.onnx", "int4", Settings(block=128))
    with pytest.raises(RecipeError, match=r"Unknown format 'int5'.*\n.*Valid: int8, int4"):
        quantize_graph(ghost, tmp_path / "r.onnx", "int5")
    assert set(tmp_path.iterdir()) == there


def test_a_form_no_kernel_holds_is_refused_before_the_build(ghost, tmp_path):
    quantize_graph(ghost, tmp_path / "q.onnx", "fp8")
    settings = BuildSection(runtimes=("onnxruntime",))
    with pytest.raises(BuildError, match=r"weights are in fp8.*onnxruntime has no kernels for fp8"):
        RUNTIMES["onnxruntime"].build(tmp_path / "q.onnx", tmp_path / "e", "ghost", settings, Execution())
    assert not list(tmp_path.glob("e*"))


def test_a_quantised_engine_runs_as_its_graph(ghost, tmp_path):
    quantize_graph(ghost, tmp_path / "q.onnx", "int4")
    settings = BuildSection(runtimes=("onnxruntime",))
    engine = RUNTIMES["onnxruntime"].build(tmp_path / "q.onnx", tmp_path / "e" / "q", "ghost", settings, Execution())
    session = RUNTIMES["onnxruntime"].load(engine, Execution())
    out, _ = session.forward(IDS, session.new_cache(2))
    assert np.abs(out - logits(tmp_path / "q.onnx")).max() < 2e-3 * out.std()


@pytest.mark.parametrize("form", ["int4", "int8", "fp8"])
def test_a_fold_into_a_quantised_graph_gives_what_quantising_the_folded_graph_gives(exported, form, tmp_path):
    dense = exported("llama-tied", vocab_size=264).path
    new = (0.05 * np.random.default_rng(4).standard_normal((96, 64))).astype(np.float32)
    operator = Operator(PLAN.boundaries[0], "fold", folds=(WeightFold(1, "mlp_output", new),))
    operators = OperatorSet("fold", (operator,), PLAN)
    operate(dense, PLAN, operators, tmp_path / "folded.onnx")
    quantize_graph(tmp_path / "folded.onnx", tmp_path / "folded-first.onnx", form)
    quantize_graph(dense, tmp_path / "q.onnx", form)
    operate(tmp_path / "q.onnx", PLAN, operators, tmp_path / "quantised-first.onnx")
    first, second = (ir.load(tmp_path / f"{name}-first.onnx").graph.initializers for name in ("folded", "quantised"))
    assert {"ghost.fold.1.mlp_output.weight.q", "ghost.fold.1.mlp_output.weight.scale"} <= first.keys() & second.keys()
    for name in first:
        if name.endswith((".q", ".scale")):
            assert first[name].const_value.tobytes() == second[name].const_value.tobytes(), name
    expected = exact_logits(tmp_path / "folded-first.onnx")
    assert np.abs(expected - exact_logits(tmp_path / "quantised-first.onnx")).max() < 1e-5 * expected.std()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["SM86", "SM89", "SM120"])
@pytest.mark.parametrize("form", FORMS)
def test_tensorrt_rtx_builds_what_the_table_says_and_nothing_else(
    ghost, form, target, build_rtx, tmp_path, monkeypatch
):
    quantize_graph(ghost, tmp_path / "q.onnx", form, Settings(head="same"))
    if refusal(form, "tensorrt-rtx", (target,)) is None:
        assert build_rtx(tmp_path / "q.onnx", target).plan_bytes > 0
        return
    with pytest.raises(BuildError, match=rf"needs SM.* and {target} is older"):
        build_rtx(tmp_path / "q.onnx", target)
    monkeypatch.setattr("ghostexport.runtimes.nvinfer.builder.refuse_forms", lambda *_: None)
    with pytest.raises(BuildError, match="HW-specific datatypes"):
        build_rtx(tmp_path / "q.onnx", target)


@pytest.mark.parametrize("form", ["nvfp4", "mxfp8"])
def test_a_bfloat16_graph_in_a_form_without_kernels_has_a_twin_that_the_cpu_runs(exported, form, tmp_path):
    quantize_graph(exported("llama-tied", "bfloat16", vocab_size=264).path, tmp_path / "q.onnx", form)
    (tmp_path / "twin").mkdir()
    twin, note = for_cpu(tmp_path / "q.onnx", "bfloat16", tmp_path / "twin")
    stored = {i.name: numpy_helper.to_array(i) for i in onnx.load(twin).graph.initializer}
    rounded = dict(rounded_weights(tmp_path / "q.onnx"))
    for name, weight in rounded.items():
        assert np.array_equal(stored[f"{name}.dequantize.value.float"], weight.astype(ml_dtypes.bfloat16))
    assert rounded and logits(twin).dtype == np.float32 and "unpacked" in note and "bfloat16 rounding" in note
