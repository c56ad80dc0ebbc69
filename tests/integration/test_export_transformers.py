"""Exports of tiny models through transformers equal PyTorch, on every family and at every kind of step."""

import getpass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import ghostexport
from ghostexport.execution import Execution
from ghostexport.exporters import export_model
from ghostexport.runtimes.ort.onnxruntime import open_graph
from ghostexport.verification import verify
from tests.tiny import tiny

OWN_EXPORTS = True

FAMILIES = [
    ("llama", {}),
    ("qwen3", {}),
    ("gemma3", {}),
    ("gpt2", {"n_layer": 2}),
    ("gpt-neox", {"num_hidden_layers": 2}),
    ("mistral", {"num_hidden_layers": 2}),
    ("llama4", {"num_hidden_layers": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "overrides"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_the_graph_equals_the_model_at_prefill_and_decode(exported, name, overrides):
    case = exported(name, **overrides)
    assert verify(case.model, case.path).worst_relative < 1e-4
    onnx.checker.check_model(str(case.path))


@pytest.mark.slow
def test_names_and_shapes_are_canonical(exported):
    graph = ir.load(exported("llama").path).graph
    shapes = {value.name: [str(dim) for dim in value.shape] for value in (*graph.inputs, *graph.outputs)}
    blocks = range(6)
    past = {f"past_key_values.layers.{b}.{k}": ["batch", "2", "past", "16"] for b in blocks for k in ("keys", "values")}
    present = {
        f"cache.layers.{b}.{k}": ["batch", "2", "past + tokens", "16"] for b in blocks for k in ("keys", "values")
    }
    plain = {
        "input_ids": ["batch", "tokens"],
        "attention_mask": ["batch", "past + tokens"],
        "position_ids": ["batch", "tokens"],
        "logits": ["batch", "tokens", "128"],
    }
    assert shapes == plain | past | present


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_no_path_of_this_machine_is_in_the_graph(exported, name):
    raw = exported(name).path.read_bytes()
    for secret in (str(Path.home()), str(Path(ghostexport.__file__).parents[1]), "site-packages", "/modeling_", ".py"):
        assert secret.encode() not in raw
    assert f"/{getpass.getuser()}/".encode() not in raw


@pytest.mark.slow
def test_a_sliding_window_reaches_across_many_cached_steps(exported):
    # window 8, 20 tokens one at a time: past is three windows long in the end
    case = exported("gemma3")
    session = open_graph(case.path)
    ids = np.random.default_rng(0).integers(0, 128, (2, 20))
    cache, logits = session.new_cache(2), None
    for t in range(20):
        logits, cache = session.forward(ids[:, t : t + 1], cache)
    with torch.no_grad():
        expected = case.model(torch.from_numpy(ids)).logits[:, -1:].numpy()
    np.testing.assert_allclose(logits, expected, atol=2e-5)


@pytest.mark.slow
def test_opset_23_uses_its_attention_and_norm_and_is_equal(exported):
    case = exported("llama", opset=23, num_hidden_layers=2)
    assert case.file.opset == 23
    assert "Attention" in {node.op_type for node in ir.load(case.path).graph}
    assert verify(case.model, case.path).worst_relative < 1e-4


@pytest.mark.slow
def test_an_export_is_silent_repeatable_and_leaves_the_model_alone(exported, tmp_path, capfd):
    first = exported("llama", num_hidden_layers=2).file
    model = tiny("llama", num_hidden_layers=2).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    steps = []
    capfd.readouterr()
    execution = Execution(progress=lambda task, done, total: steps.append((task, done, total)))
    again = export_model(model, tmp_path / "dense.onnx", opset=20, execution=execution)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert (again.graph_sha256, again.data_sha256) == (first.graph_sha256, first.data_sha256)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model._forward_pre_hooks
    assert steps == [("export", done, 5) for done in (0, 1, 2, 4, 5)]  # two blocks traced, translated, written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense.onnx", "dense.onnx.data"]
