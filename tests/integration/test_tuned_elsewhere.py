"""A checkpoint that was pruned and trained elsewhere, by a plain training loop, in the dense graph and in an engine."""

import json

import onnx
import pytest
import torch
import transformers
from typer.testing import CliRunner

from ghostexport import api, models
from ghostexport.cli import app
from ghostexport.errors import ModelLayoutError, RecipeError, SurgeryError
from ghostexport.models.foreign import tuned_operators
from ghostexport.plan import PrunePlan
from ghostexport.runfolder import RunFolder
from ghostexport.verification import compare, verify
from tests.tiny import tiny, tiny_folder

PLAN = PrunePlan.from_spans(6, [(1, 2), (3, 5)])


def trained_elsewhere(dense, folder, steps=8):
    """Blocks 1, 3 and 4 removed with transformers alone, a few steps on next tokens, saved."""
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    model.model.layers = torch.nn.ModuleList(model.model.layers[i] for i in (0, 2, 5))
    model.config.num_hidden_layers = 3
    for index, block in enumerate(model.model.layers):
        block.self_attn.layer_idx = index
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = torch.randint(3, 264, (4, 24), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere")
    tiny_folder(folder / "dense")
    trained_elsewhere(folder / "dense", folder / "tuned")
    tiny("llama-tied", seed=9, vocab_size=264).save_pretrained(folder / "other")
    trained_elsewhere(folder / "other", folder / "other-tuned", steps=1)
    return folder


def test_its_blocks_are_found_and_its_weights_are_all_it_changes(places):
    dense, cut = (models.load_model(places / name, "float32") for name in ("dense", "tuned"))
    found = tuned_operators(dense, cut)
    assert found.plan.removed == PLAN.removed and not found.adds_nodes
    assert len(found.weights) == len(list(cut.model.parameters()))
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        assert torch.equal(models.patch(dense, found.plan, found).model(ids).logits, cut.model(ids).logits)
    with pytest.raises(ModelLayoutError, match=r"has 3 blocks; .* keeps 5"):
        tuned_operators(dense, cut, PrunePlan.from_spans(6, [(1, 2)]))
    with pytest.raises(ModelLayoutError, match="is not block 1 of the dense model, trained"):
        tuned_operators(dense, cut, PrunePlan.from_spans(6, [(2, 5)]))
    other = models.load_model(places / "other-tuned", "float32")
    with pytest.raises(ModelLayoutError, match="is near none of the 6 dense blocks"):
        tuned_operators(dense, other)
    with pytest.raises(ModelLayoutError, match="GPT2LMHeadModel"):
        tuned_operators(models.from_memory(tiny("gpt2")), cut)


@pytest.mark.slow
def test_the_graph_alone_takes_it_and_refuses_that_of_another_base(places, tmp_path):
    api.export(models.load_model(places / "dense", "float32"), tmp_path / "dense.onnx", exporter="transformers")
    cut = models.load_model(places / "tuned", "float32").model
    run = ["surgery", str(tmp_path / "dense.onnx"), "-o", str(tmp_path / "cut")]
    found = CliRunner().invoke(app, [*run, "--weights", str(places / "tuned")], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    graph = tmp_path / "cut" / "dense-tuned.onnx"
    assert verify(cut, graph, "tuned").worst_relative < 1e-4
    dense = models.load_model(places / "dense", "float32")
    assert not compare(models.patch(dense, PLAN).model, graph).passed
    names = {t.name for t in onnx.load(graph, load_external_data=False).graph.initializer}
    assert "ghost.weight.model.layers.5.mlp.down_proj.weight" in names
    with pytest.raises(ModelLayoutError, match="is near none of the 6 dense blocks"):
        api.surgery(tmp_path / "dense.onnx", None, tmp_path / "no.onnx", weights=places / "other-tuned")
    with pytest.raises(SurgeryError, match="replace nothing that the graph holds"):
        api.surgery(tmp_path / "dense.onnx", PLAN, tmp_path / "no.onnx", weights=places / "other-tuned")
    with pytest.raises(ModelLayoutError, match="has 3 blocks"):
        api.surgery(tmp_path / "dense.onnx", [(1, 2)], tmp_path / "no.onnx", weights=places / "tuned")
    with pytest.raises(RecipeError, match="Nothing to do"):
        api.surgery(tmp_path / "dense.onnx", None, tmp_path / "no.onnx")
    assert not (tmp_path / "no.onnx").exists()


@pytest.mark.slow
def test_from_the_model_and_its_checkpoint_to_an_engine(places, tmp_path):
    run = ["build", "engine", str(places / "dense"), "-o", str(tmp_path / "run"), "--weights", str(places / "tuned")]
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"document {i}: " + " ".join(map(str, range(i, i + 60))) for i in range(40)))
    run += ["--calibration", str(text), "--sequences", "8", "--length", "64", "--held-out", "2"]
    found = CliRunner().invoke(app, [*run, "--runtime", "onnxruntime"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    folder = RunFolder(tmp_path / "run")
    assert folder.read_plan().removed == PLAN.removed
    assert json.loads(folder.sidecar_path("onnxruntime", "tuned").read_text())["variant"] == "tuned"
    assert folder.read_parity()["tuned"]["passed"] is True
