"""Any weights of kept blocks in the graph: found by content, replaced, equal to the PyTorch model that has them."""

import numpy as np
import onnx
import pytest
import torch
from typer.testing import CliRunner

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.cli import app
from ghostexport.errors import SurgeryError
from ghostexport.exporters import export_model
from ghostexport.models.reweighting import changed_weights
from ghostexport.models.rounding import round_weights
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.quantization.writer import quantize_graph
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.recover import recover
from ghostexport.runfolder import RunFolder
from ghostexport.surgery import operate
from ghostexport.verification import compare, verify
from tests.decoding import assert_same, onnx_logits, torch_logits
from tests.integration.test_surgery_producers import FLOAT, FOLDER, _first_of, _tokens
from tests.surgery_cases import FIXTURES, fixture_model
from tests.tiny import tiny, tiny_folder

PLAN = PrunePlan.from_spans(6, [(1, 2), (3, 5)])
WHOLE = PrunePlan(6, ())


def tuned(model, plan, seed=0):
    """The model cut, every parameter moved: as a training elsewhere leaves it."""
    cut = models.drop_blocks(model, plan)
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for module in cut.modules():
        for key, old in list(module.named_parameters(recurse=False)):
            noise = torch.randn(old.shape, generator=generator).to(old.dtype)
            new = torch.nn.Parameter(old.detach() + 0.2 * old.detach().std() * noise, requires_grad=False)
            setattr(module, key, made.setdefault(id(old), new))
    return cut


def bare(weights, plan):
    return OperatorSet("tuned", tuple(Operator(b, "none") for b in plan.boundaries), plan, weights=weights)


def nodes(path):
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "float32"),
        ("llama-tied", "float32"),
        ("llama", "float16"),
        ("llama", "bfloat16"),
        ("gpt2", "float32"),
        ("gpt-neox", "float32"),
        ("gemma3", "float32"),
        ("mixtral", "float32"),
    ],
)
def test_every_weight_of_a_tuned_model_goes_into_the_dense_graph(exported, tmp_path, name, dtype):
    case = exported(name, dtype)
    model = tuned(case.model, PLAN)
    weights = changed_weights(case.model, PLAN, model)
    report = operate(case.path, PLAN, bare(weights, PLAN), tmp_path / "tuned.onnx")
    operate(case.path, PLAN, None, tmp_path / "pruned.onnx")
    replaced = {new.removeprefix("ghost.weight.").removesuffix(".1") for new in report.weights_replaced}
    assert replaced == set(weights)  # .1: of a tied embedding the second form
    assert verify(model, tmp_path / "tuned.onnx", "tuned").passed
    assert not compare(models.drop_blocks(case.model, PLAN), tmp_path / "tuned.onnx").passed
    assert nodes(tmp_path / "tuned.onnx") == nodes(tmp_path / "pruned.onnx")


@pytest.mark.parametrize("name", FLOAT)
def test_the_graph_of_every_producer_takes_them(tmp_path, name):
    """Fused q, k and v (ORT, ORT GenAI), gains inside skip-norms, Gemm, Transpose: the graph equals the tuned model."""
    model = fixture_model(_first_of(name))
    cut, plan = tuned(model, PLAN), PLAN
    weights = changed_weights(model, plan, cut)
    assert len(weights) == len(list(cut.parameters()))
    operate(FOLDER / name / "model.onnx", plan, bare(weights, plan), tmp_path / "tuned.onnx")
    tokens = _tokens(name)
    assert_same(onnx_logits(tmp_path / "tuned.onnx", tokens), torch_logits(cut, tokens), FIXTURES[name].tolerance)


def test_quantised_and_missing_weights_are_refused(tmp_path):
    for name, lost in (("genai-llama-int4", "self_attn.q_proj"), ("edge-llm-llama", "embed_tokens")):
        model = fixture_model(name)
        weights = changed_weights(model, PLAN, tuned(model, PLAN))
        with pytest.raises(SurgeryError, match=rf"replace nothing that the graph holds: .*{lost}"):
            operate(FOLDER / name / "model.onnx", PLAN, bare(weights, PLAN), tmp_path / "no.onnx")
        assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_healed_model_is_in_the_graph_as_in_pytorch_with_the_nodes_of_ghost(exported, tmp_path, dtype):
    case = exported("llama", dtype)
    loaded = models.from_memory(case.model)
    tokens = CalibrationSet.from_tokens(np.random.default_rng(0).integers(3, 128, (16, 40)))
    section = RecoverSection(operators=("ghost", "ghost-healed"), learning_rate=1e-3)
    sets = recover(loaded, PLAN, tokens, tokens.first(4), section)
    for name, operators in sets.items():
        operate(case.path, PLAN, operators, tmp_path / f"{name}.onnx", operator_dtype=dtype)
    healed = models.patch(loaded, PLAN, sets["ghost-healed"]).model
    assert sets["ghost-healed"].weights
    assert verify(healed, tmp_path / "ghost-healed.onnx", "ghost-healed").passed
    assert sorted(nodes(tmp_path / "ghost-healed.onnx")) == sorted(nodes(tmp_path / "ghost.onnx"))


@pytest.mark.slow
def test_a_healed_model_is_quantised_like_any_other(exported, tmp_path):
    case = exported("llama")
    loaded = models.from_memory(case.model)
    tokens = CalibrationSet.from_tokens(np.random.default_rng(0).integers(3, 128, (16, 40)))
    section = RecoverSection(operators=("ghost", "ghost-healed"), learning_rate=1e-3)
    sets = recover(loaded, PLAN, tokens, tokens.first(4), section)
    counts, rounded = {}, {}
    for name, operators in sets.items():
        graph, small = tmp_path / f"{name}.onnx", tmp_path / f"{name}.int4.onnx"
        operate(case.path, PLAN, operators, graph)
        counts[name] = len(quantize_graph(graph, small, "int4").linears)
        rounded[name] = round_weights(models.patch(loaded, PLAN, operators).model, graph, small)
        assert verify(rounded[name], small, f"{name}.int4").passed
    assert counts["ghost-healed"] == counts["ghost"] > 0
    assert not compare(rounded["ghost"], tmp_path / "ghost-healed.int4.onnx").passed  # the healed weights are in it
    healed = models.patch(loaded, PLAN, sets["ghost-healed"]).model
    change = [
        (a - b).norm() / a.norm()
        for a, b in zip(healed.parameters(), rounded["ghost-healed"].parameters(), strict=True)
    ]
    assert 0 < max(change) < 0.2


@pytest.mark.slow
def test_merged_equal_norms_are_told_apart_and_only_the_changed_one_moves(exported, tmp_path):
    """All norms of all blocks hold ones, and the exporter keeps one initializer for them."""
    case = exported("llama")
    model = tiny("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1)
    export_model(model, tmp_path / "dense.onnx", exporter="transformers")
    cut = models.drop_blocks(model, PLAN)
    norm = models.find_blocks(cut)[1].post_attention_layernorm
    norm.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 64), requires_grad=False)
    weights = changed_weights(model, PLAN, cut)
    assert list(weights) == ["model.layers.2.post_attention_layernorm.weight"]
    report = operate(tmp_path / "dense.onnx", PLAN, bare(weights, PLAN), tmp_path / "cut.onnx")
    assert len(report.weights_replaced) == 1
    assert verify(cut, tmp_path / "cut.onnx", "tuned").passed
    assert (tmp_path / "cut.onnx.data").stat().st_size == 4 * 64
    with pytest.raises(SurgeryError, match="replace nothing that the graph holds"):
        operate(case.path, PLAN, bare(weights, PLAN), tmp_path / "other.onnx")
    assert not (tmp_path / "other.onnx").exists()


def test_a_tuned_model_with_all_blocks(exported, tmp_path):
    case = exported("llama")
    model = tuned(case.model, WHOLE)
    weights = changed_weights(case.model, WHOLE, model)
    operate(case.path, WHOLE, bare(weights, WHOLE), tmp_path / "tuned.onnx")
    assert verify(model, tmp_path / "tuned.onnx", "tuned").worst_relative < 1e-4


@pytest.mark.slow
def test_quality_heal_ends_at_engines_of_both_runtimes(tmp_path):
    source, text = tiny_folder(tmp_path / "model", "llama"), tmp_path / "text.txt"
    text.write_text("\n\n".join(f"document {i}: " + " ".join(map(str, range(i, i + 60))) for i in range(60)))
    run = ["build", "engine", str(source), "-o", str(tmp_path / "run"), "--plan", "[[1, 2], [3, 5]]"]
    run += ["--calibration", str(text), "--sequences", "16", "--length", "64", "--held-out", "4", "--quality", "heal"]
    run += ["--learning-rate", "1e-3", "--runtime", "onnxruntime", "--runtime", "tensorrt-rtx"]
    found = CliRunner().invoke(app, run, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    folder = RunFolder(tmp_path / "run")
    fit = folder.read_operators("ghost-healed").operators[0].fit
    assert fit["kl_after"] < fit["kl_before"] and folder.read_parity()["ghost-healed"]["passed"] is True
    assert all(folder.sidecar_path(name, "ghost-healed").exists() for name in ("onnxruntime", "tensorrt-rtx"))
    assert not list(folder.path.glob("healing-*"))
