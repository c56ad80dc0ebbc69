"""Healing: its loss and steps against plain PyTorch, what it leaves alone, its guard, and going on where it stopped."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import RecipeError
from ghostexport.execution import Execution
from ghostexport.operators import load_operators
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection, parse_recipe
from ghostexport.recovery.recover import recover
from ghostexport.recovery.trained.teacher import Teacher
from tests.tiny import tiny

healed = importlib.import_module("ghostexport.recovery.trained.healed")


def windows(count, seed):
    random = np.random.default_rng(seed)
    tokens, lengths = random.integers(3, 128, (count, 40)), random.integers(30, 41, count)
    return CalibrationSet.from_tokens(tokens, np.arange(40) < lengths[:, None])


CALIBRATION = windows(16, 0)
HELD_OUT = CALIBRATION.first(4)  # a random model learns nothing that holds for other random tokens
PLAN = PrunePlan.from_spans(6, [[2, 3], [4, 5]])


@pytest.fixture
def loaded(monkeypatch):
    monkeypatch.setattr(healed, "has_bfloat16", lambda device: False)
    return models.from_memory(tiny("llama"))


def recovered(loaded, *names, execution=None, **options):
    section = RecoverSection(operators=names, learning_rate=options.pop("learning_rate", 1e-3), **options)
    return recover(loaded, PLAN, CALIBRATION, HELD_OUT, section, execution)


def test_the_loss_is_the_kl_with_all_improbable_tokens_as_one(loaded, tmp_path):
    teacher, student = Teacher(loaded, HELD_OUT, tmp_path, "t", 16), tiny("llama", seed=5)
    with torch.no_grad():
        for batch in HELD_OUT.batches(tokens=1):
            p, q = (m(batch.input_ids).logits[batch.mask].double().softmax(1) for m in (loaded.model, student))
            top = p.topk(16, dim=1).indices
            p, q = (torch.cat([d.gather(1, top), 1 - d.gather(1, top).sum(1, keepdim=True)], 1) for d in (p, q))
            expected = float((p * (p / q).log()).sum(1).mean())
            found = teacher.divergence(student(batch.input_ids).logits[batch.mask], batch)
            assert float(found) == pytest.approx(expected, rel=2e-3)


def plain_training(loaded, start, steps, learning_rate):
    """The same steps in a few lines of PyTorch: the whole cut model, whole distributions over the 128 tokens."""
    model = models.patch(loaded, PLAN, start).model
    blocks = models.find_blocks(model)
    for module in [m for block in blocks[1:] for m in block.modules()] + [model.model.norm]:
        for key, old in list(module.named_parameters(recurse=False)):
            setattr(module, key, torch.nn.Parameter(old.detach().clone()))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.99), eps=1e-10, weight_decay=0)
    for step, batch in zip(range(steps), CALIBRATION.batches(tokens=1), strict=False):
        with torch.no_grad():
            p = loaded.model(batch.input_ids, attention_mask=batch.attention_mask).logits[batch.mask].softmax(1)
        log_q = model(batch.input_ids, attention_mask=batch.attention_mask).logits[batch.mask].log_softmax(1)
        optimizer.param_groups[0]["lr"] = healed.rate(learning_rate, step, steps)
        optimizer.zero_grad()
        (p * (p.log() - log_q)).sum(1).mean().backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    return model


def test_the_trained_model_is_that_of_plain_pytorch(loaded, monkeypatch):
    monkeypatch.setattr(healed, "TOP", 128)  # all tokens
    start = recovered(loaded, "ghost-split", statistics="sequential")["ghost-split"]
    before = {key: value.clone() for key, value in loaded.model.state_dict().items()}
    found = recovered(loaded, "ghost-healed")["ghost-healed"]
    assert all(torch.equal(loaded.model.state_dict()[key], value) for key, value in before.items())
    assert found.operators[0].fit["best_step"] == 16
    expected = plain_training(loaded, start, 16, 1e-3)
    ids = torch.from_numpy(HELD_OUT.tokens)
    with torch.no_grad():
        moved = expected(ids).logits - models.patch(loaded, PLAN, start).model(ids).logits
        error = models.patch(loaded, PLAN, found).model(ids).logits - expected(ids).logits
    assert float(error.norm() / moved.norm()) < 0.02  # probabilities wait in float16


def test_what_is_trained_and_what_is_left_alone(loaded):
    found = recovered(loaded, "ghost-healed", epochs=2)["ghost-healed"]
    fit = found.operators[0].fit
    assert fit["kl_after"] < fit["kl_before"] and 0 < fit["best_step"] <= fit["steps"] == 32
    assert {w.block for w in found.weights.values()} == {1, 3, 5, None}
    assert [name for name, w in found.weights.items() if w.block is None] == ["model.norm.weight"]
    per_block = sum(p.numel() for p in models.find_blocks(loaded.model)[0].parameters())
    assert fit["trained_weights"] == 3 * per_block + 64 + 2 * 64 * 64
    assert all(not o.folds and o.site == "mid" and o.delta.shape == (64, 64) for o in found.operators)
    again = recovered(loaded, "ghost-healed", epochs=2)["ghost-healed"]
    assert again.to_bytes() == found.to_bytes()


def test_the_blocks_before_the_first_cut_run_in_the_dense_pass_alone(loaded):
    calls = []
    original = type(models.find_blocks(loaded.model)[0]).forward

    def counted(block, *args, **kwargs):
        calls.append(block.self_attn.layer_idx)
        return original(block, *args, **kwargs)

    start = recovered(loaded, "ghost-split")["ghost-split"]
    student = healed.Student(loaded, start)
    with pytest.MonkeyPatch.context() as patch, healed.tempfile.TemporaryDirectory() as folder:
        patch.setattr(type(models.find_blocks(loaded.model)[0]), "forward", counted)
        texts = healed.Texts(student, HELD_OUT, healed.Path(folder), "t", Execution())
        assert calls == [0, 1, 2, 3, 4, 5] * 4
        calls.clear()
        texts.mean_loss(student)
    assert calls == [1, 2, 3] * 4  # positions of the cut model


def test_training_that_does_not_help_is_not_applied(loaded):
    lines = []
    execution = Execution(say=lines.append)
    start = recovered(loaded, "ghost-split", statistics="sequential")["ghost-split"]
    found = recovered(loaded, "ghost-healed", learning_rate=50.0, execution=execution)["ghost-healed"]
    assert any("did not help and is not applied" in line for line in lines)
    assert found.operators[0].fit["best_step"] == 0 and found.weights == {}
    assert found.operators[0].fit["kl_after"] == found.operators[0].fit["kl_before"]
    assert {k: v.tobytes() for k, v in found.tensors().items()} == {k: v.tobytes() for k, v in start.tensors().items()}


def test_an_interrupted_training_goes_on_and_ends_the_same(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(healed, "SAVE_EVERY", 0.0)
    whole = recovered(loaded, "ghost-healed")["ghost-healed"]
    lines = []

    def interrupt(task, done, total):
        if task.startswith("recover: heal") and done == 7 and not lines:
            raise KeyboardInterrupt

    execution = Execution(scratch=tmp_path, progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        recovered(loaded, "ghost-healed", execution=execution)
    (folder,) = tmp_path.iterdir()
    assert (folder / "state.pt").exists()
    execution = replace(execution, say=lines.append, progress=lambda task, done, total: None)
    found = recovered(loaded, "ghost-healed", execution=execution)["ghost-healed"]
    assert "heal: going on after step 6" in lines
    assert found.to_bytes() == whole.to_bytes() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["granite", "gemma2", "mixtral"])
def test_blocks_that_split_does_not_fit_are_healed_from_weighted(monkeypatch, name):
    loaded = models.from_memory(tiny(name))
    section = RecoverSection(quality="heal", learning_rate=3e-4, epochs=4)
    (found,) = recover(loaded, PLAN, CALIBRATION, HELD_OUT, section).values()
    assert found.name == ("ghost-healed" if name == "granite" else "ghost-weighted-healed")
    assert found.operators[0].fit["kl_after"] < found.operators[0].fit["kl_before"]


def test_cost_is_said_and_names_are_known(loaded):
    lines = []
    recovered(loaded, "ghost-healed", execution=Execution(say=lines.append))
    assert any("minutes for 16 sequences, 1 times" in line and "GB of memory" in line for line in lines)
    recipe = {"model": {"source": "x"}, "select": {"prune": 1}, "recover": {"quality": "heal"}}
    assert parse_recipe(recipe).recover.operators == ("heal",)
    with pytest.raises(RecipeError, match="cannot be refitted"):
        recovered(loaded, "ghost-distilled+refit")
    assert load_operators


def test_with_a_rank_every_linear_layer_changes_by_a_matrix_of_that_rank(loaded):
    found = recovered(loaded, "ghost-healed", heal_rank=3, learning_rate=5e-3)["ghost-healed"]
    start = recovered(loaded, "ghost-split", statistics="sequential")["ghost-split"]
    before, after = (models.patch(loaded, PLAN, operators).model for operators in (start, found))
    fit = found.operators[0].fit
    assert fit["kl_after"] < fit["kl_before"] and fit["rank"] == 3
    linear = [name for name, m in after.named_modules() if isinstance(m, torch.nn.Linear) and ".layers." in name]
    for name in linear:
        change = after.get_submodule(name).weight - before.get_submodule(name).weight
        assert int(torch.linalg.matrix_rank(change, rtol=1e-4)) == (0 if ".layers.0." in name else 3), name
    own = sum(3 * sum(after.get_submodule(n).weight.shape) for n in linear if ".layers.0." not in n)
    assert fit["trained_weights"] == own + 3 * 2 * 64 + 64 + 2 * 64 * 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_half_precision_model_is_trained_in_float32_without_fast_bfloat16(monkeypatch, dtype):
    monkeypatch.setattr(healed, "has_bfloat16", lambda device: False)
    loaded = models.from_memory(tiny("llama").to(getattr(torch, dtype)))
    found = recovered(loaded, "ghost-healed")["ghost-healed"]
    assert found.operators[0].fit["kl_after"] < found.operators[0].fit["kl_before"]
    patched = models.patch(loaded, PLAN, found).model
    assert {str(p.dtype) for n, p in patched.named_parameters() if "ghost" not in n} == {f"torch.{dtype}"}
    assert found.weights
