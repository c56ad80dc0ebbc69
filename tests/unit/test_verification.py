import copy
import json
import shutil
import tempfile

import numpy as np
import pytest
import torch

from ghostexport.errors import ParityError
from ghostexport.models import find_blocks
from ghostexport.models.widening import widened
from ghostexport.runtimes.ort.onnxruntime import open_graph
from ghostexport.tolerances import TOLERANCES
from ghostexport.verification import FARTHEST, LONG, SHORT, compare, refer, remove_leftovers, verify
from tests.tiny import tiny

# float32 round-off of both sides; a tenth of the tolerance
ROUND_OFF = TOLERANCES["float32"].relative / 10


@pytest.fixture(scope="module")
def llama(exported):
    return exported("llama")


def damaged(model, change):
    """A copy of the model with one weight changed."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        change(other.model)
    return other


def test_equal_models_pass_with_round_off_only(llama):
    report = verify(llama.model, llama.path)
    assert report.passed
    assert report.worst_relative < ROUND_OFF
    assert report.first_divergence is None
    assert report.note == ""


def test_every_output_of_four_feeds_is_compared(llama):
    report = compare(llama.model, llama.path)
    names = [name for block in range(6) for name in (f"cache.layers.{block}.keys", f"cache.layers.{block}.values")]
    feeds = (f"prefill {SHORT}", f"decode {SHORT}+1", f"prefill {LONG}", f"decode {LONG}+1")
    assert [(row.feed, row.output) for row in report.outputs] == [(f, n) for f in feeds for n in [*names, "logits"]]
    assert [row.kl is not None for row in report.outputs] == [row.output == "logits" for row in report.outputs]


def test_a_window_that_the_short_feeds_do_not_leave_is_left(exported):
    case = exported("gemma3", sliding_window=70, num_hidden_layers=2)
    report = verify(case.model, case.path)
    far = (f"prefill {70 + LONG}", f"decode {70 + LONG}+1")
    assert list(dict.fromkeys(row.feed for row in report.outputs))[4:] == list(far)
    assert report.worst_relative < ROUND_OFF
    other = tiny("gemma3", sliding_window=69, num_hidden_layers=2)  # the same weights
    assert compare(other, case.path).first_divergence.feed == f"prefill {69 + LONG}"
    farthest = tiny("gemma3", sliding_window=FARTHEST + 1, num_hidden_layers=2)
    assert f"The window of {FARTHEST + 1} tokens was not left" in compare(farthest, case.path).note


def test_the_first_difference_in_depth_is_named(llama):
    # a wrong MLP output of block 3 is first seen by the keys of block 4
    model = damaged(llama.model, lambda m: m.layers[3].mlp.down_proj.weight.mul_(1.05))
    report = compare(model, llama.path)
    assert report.first_divergence.output == "cache.layers.4.keys"
    with pytest.raises(
        ParityError, match=r"cache\.layers\.4\.keys at prefill 7: max error / std = .* \(tolerance 0"
    ) as e:
        verify(model, llama.path, "ghost")
    assert "enters block 4" in str(e.value)
    assert "ghost (dense.onnx)" in str(e.value)
    assert e.value.exit_code == 1


def test_one_weight_of_a_thousandth_more_is_caught(llama):
    def change(m):
        m.norm.weight[5] *= 1.01

    model = damaged(llama.model, change)
    report = compare(model, llama.path)
    assert not report.passed
    assert report.first_divergence.output == "logits"


def test_a_difference_that_only_a_cache_shows_is_caught(llama):
    # rotation by one position more changes neither prefill logits nor values, only the stored keys' phase
    model = copy.deepcopy(llama.model)
    model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"position_ids": kwargs["position_ids"] + 1}), with_kwargs=True
    )
    report = compare(model, llama.path)
    assert report.first_divergence.output == "cache.layers.0.keys"
    logits = [row for row in report.outputs if row.output == "logits"]
    assert all(row.passed for row in logits)


def test_figures_are_those_of_an_independent_computation(llama):
    tokens = np.random.default_rng(3).integers(0, 128, (2, LONG + 1))
    model = damaged(llama.model, lambda m: m.norm.weight.mul_(1.1))
    report = compare(model, llama.path, tokens=tokens)
    row = next(row for row in report.outputs if (row.feed, row.output) == (f"prefill {LONG}", "logits"))
    inputs = torch.from_numpy(tokens[:, :LONG])
    with torch.no_grad():
        p, q = (m(inputs).logits.double() for m in (model, llama.model))
    assert row.relative == pytest.approx(((p - q).abs().max() / p.std(correction=0)).item(), rel=1e-3)
    kl = (
        torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none")
        .sum(-1)
        .mean()
    )
    assert row.kl == pytest.approx(kl.item(), rel=1e-3)
    assert row.top1 == 1.0  # a scaled norm scales logits


def test_non_finite_numbers_are_an_error_not_a_figure(llama):
    model = damaged(llama.model, lambda m: m.norm.weight.fill_(float("nan")))
    with pytest.raises(ParityError, match="not finite"):
        compare(model, llama.path)


def test_the_report_is_json(llama):
    data = json.loads(json.dumps(compare(llama.model, llama.path, "dense").to_json(), allow_nan=False))
    assert data["passed"] is True
    assert data["reference"] == "PyTorch LlamaForCausalLM, float32"
    assert data["candidate"] == "dense (dense.onnx) on ONNX Runtime, CPU"
    assert data["tolerance"]["relative"] == TOLERANCES["float32"].relative
    assert data["worst_relative"] == max(row["relative"] for row in data["outputs"])


def test_a_graph_run_accepts_any_batch_and_an_empty_cache(llama):
    session = open_graph(llama.path)
    ids = np.random.default_rng(0).integers(0, 128, (3, 5))
    outputs, _ = session.outputs(ids, session.new_cache(3))
    assert outputs["logits"].shape == (3, 5, 128)
    assert outputs["cache.layers.5.values"].shape == (3, 2, 5, 16)


def test_half_precision_is_compared_as_it_is(exported):
    case = exported("llama", dtype="float16", num_hidden_layers=2)
    report = verify(case.model, case.path)
    assert (report.dtype, report.computed_in, report.note) == ("float16", "float16", "")
    assert report.worst_relative > ROUND_OFF  # two kinds of float16 arithmetic do differ


def test_bfloat16_is_compared_through_its_float32_twin_and_says_so(exported):
    case = exported("llama", dtype="bfloat16", num_hidden_layers=2)
    report = verify(case.model, case.path)
    assert (report.dtype, report.computed_in) == ("bfloat16", "float32")
    assert "bfloat16 rounding was not checked" in report.note
    assert report.worst_relative < ROUND_OFF
    assert next(case.model.parameters()).dtype == torch.bfloat16  # the caller's model is untouched
    model = damaged(case.model, lambda m: m.layers[0].mlp.down_proj.weight.mul_(1.05))
    assert not compare(model, case.path).passed


def test_a_bfloat16_graph_rounds_the_scalars_of_a_model(exported):
    """Granite multiplies what a block adds by 0.22; the nearest bfloat16 is 0.2197265625."""
    case = exported("granite", dtype="bfloat16", num_hidden_layers=2)
    report = verify(case.model, case.path)
    assert ROUND_OFF < report.worst_relative < 1e-2
    assert max(output.kl for output in report.outputs if output.kl is not None) < 2e-6
    model = damaged(case.model, lambda m: m.layers[0].mlp.down_proj.weight.mul_(1.05))
    assert not compare(model, case.path).passed


def test_what_a_killed_comparison_left_is_removed_and_nothing_else(exported, tmp_path, monkeypatch):
    case = exported("llama", dtype="bfloat16", num_hidden_layers=2)
    graph = case.path
    for file in (graph, graph.with_name(f"{graph.name}.data")):
        shutil.copy2(file, tmp_path / file.name)
    kept = {file.name for file in tmp_path.iterdir()}
    with monkeypatch.context() as patch:  # as SIGKILL: the temporary folder is never cleaned up
        patch.setattr(tempfile.TemporaryDirectory, "__exit__", lambda *_: None)
        patch.setattr(tempfile.TemporaryDirectory, "_cleanup", lambda *_, **__: None)
        compare(case.model, tmp_path / graph.name)
    (left,) = {file.name for file in tmp_path.iterdir()} - kept
    assert any((tmp_path / left).iterdir())
    remove_leftovers(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == kept


@pytest.mark.parametrize("name", ["llama-tied", "gemma3", "qwen3-moe", "gpt2"])
def test_widening_a_block_at_a_time_is_widening_the_model(name):
    model = tiny(name).bfloat16()
    stored = {key: (tensor.data_ptr(), tensor.clone()) for key, tensor in model.state_dict().items()}
    ids = torch.arange(2 * 20).reshape(2, 20) % 128
    whole = copy.deepcopy(model).float()
    seen = []
    block = find_blocks(model)[2]
    block.register_forward_pre_hook(
        lambda *_: seen.append([next(b.parameters()).dtype for b in find_blocks(model)].count(torch.float32))
    )
    with torch.no_grad(), widened(model):
        assert torch.equal(model(ids).logits, whole(ids).logits)
    assert seen == [1]  # the block that runs, and no other
    assert all(t.dtype == stored[key][1].dtype for key, t in model.state_dict().items())
    for key, tensor in model.state_dict().items():
        assert tensor.data_ptr() == stored[key][0] and torch.equal(tensor, stored[key][1])


def test_a_failing_pass_leaves_the_model_as_it_was():
    model = tiny("llama").bfloat16()
    with pytest.raises(IndexError), widened(model):
        model(torch.full((1, 3), 10**6))
    handle = find_blocks(model)[3].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), widened(model):
        model(torch.arange(3)[None])
    handle.remove()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_reference_outlives_its_model(llama):
    reference = refer(llama.model, llama.path)
    report = reference.verify(llama.path, "ghost")
    assert report.passed and report.to_json() == verify(llama.model, llama.path, "ghost").to_json()
    other = damaged(llama.model, lambda m: m.layers[3].mlp.down_proj.weight.mul_(1.05))
    assert refer(other, llama.path).compare(llama.path).first_divergence.output == "cache.layers.4.keys"
