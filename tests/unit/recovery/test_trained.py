"""Trained operators: losses against direct formulas, that training helps, and that the best state is kept."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import RecipeError, RecoveryError
from ghostexport.files import write_bytes
from ghostexport.operators import Operator, OperatorSet, load_operators
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.recover import recover
from ghostexport.recovery.trained.distilled import TOP
from ghostexport.recovery.trained.teacher import Teacher
from tests.tiny import tiny


def windows(count, seed):
    random = np.random.default_rng(seed)
    tokens, lengths = random.integers(3, 128, (count, 40)), random.integers(30, 41, count)
    return CalibrationSet.from_tokens(tokens, np.arange(40) < lengths[:, None])


CALIBRATION, HELD_OUT = windows(16, 0), windows(4, 1)
PLAN = PrunePlan.from_spans(6, [[1, 2], [3, 5]])


def recovered(loaded, *names, **options):
    return recover(loaded, PLAN, CALIBRATION, HELD_OUT, RecoverSection(operators=names, **options))


def test_the_teachers_loss_is_the_kl_of_renormalised_top_logits(tmp_path):
    loaded, student = models.from_memory(tiny("llama")), tiny("llama", seed=5)
    teacher = Teacher(loaded, HELD_OUT, tmp_path, "t", TOP)
    with torch.no_grad():
        for batch in HELD_OUT.batches(tokens=1):
            dense, other = (m(batch.input_ids).logits[batch.mask].double() for m in (loaded.model, student))
            chosen = dense.topk(TOP, dim=1).indices
            p, q = dense.gather(1, chosen).softmax(1), other.gather(1, chosen).softmax(1)
            expected = float((p * (p / q).log()).sum(1).mean())
            assert float(teacher.loss(student, batch)) == pytest.approx(expected, rel=5e-3)
    assert teacher.values.dtype == np.float16 and teacher.indices.dtype == np.int32


@pytest.mark.parametrize(
    ("name", "base"), [("ghost-distilled", "ghost"), ("linearpatch-distilled", "linearpatch-rotate")]
)
def test_distillation_lowers_the_held_out_loss_and_keeps_the_best(name, base):
    loaded = models.from_memory(tiny("llama"))
    before = {key: value.clone() for key, value in loaded.model.state_dict().items()}
    sets = recovered(loaded, base, name, epochs=6)
    first, trained = sets[base].operators, sets[name].operators
    fit = trained[0].fit
    assert fit["loss_held_out"] < fit["loss_before"] and 0 < fit["best_step"] <= fit["steps"] == 6 * 16
    for one, other in zip(first, trained, strict=True):
        assert other.kind == name and other.delta.dtype == np.float32
        assert 0 < np.abs(one.delta - other.delta).max() < 0.1
        assert other.fit["nmse_held_out"] > 0
    after = loaded.model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    alone = recovered(loaded, base)[base]
    assert [a.delta.tobytes() for a in alone.operators] == [a.delta.tobytes() for a in first]


def test_of_a_distillation_the_best_state_is_kept_and_not_the_last(monkeypatch):
    """Held-out losses as they may be when a training runs away: the maps are those of the second look."""
    distilled = importlib.import_module("ghostexport.recovery.trained.distilled")
    losses, seen = iter([5.0, 4.0, 2.0, 3.0, 6.0]), []

    def judged(student, judge, held_out):
        modules = (m for m in student.modules() if isinstance(m, models.BoundaryModule))
        seen.append([module.delta.detach().clone().numpy() for module in modules])
        return next(losses)

    monkeypatch.setattr(distilled, "_judged", judged)
    loaded = models.from_memory(tiny("llama"))
    operators = recovered(loaded, "ghost-distilled", epochs=1)["ghost-distilled"].operators
    assert operators[0].fit["loss_before"] == 5.0 and operators[0].fit["loss_held_out"] == 2.0
    assert operators[0].fit["best_step"] == 8 and operators[0].fit["steps"] == 16
    for operator, best, last in zip(operators, seen[2], seen[4], strict=True):
        np.testing.assert_array_equal(operator.delta, best)
        assert np.abs(operator.delta - last).max() > 0


def test_cosine_beats_the_start_and_runs_behind_the_repaired_prefix():
    loaded = models.from_memory(tiny("gpt2"))
    operators = recovered(loaded, "replaceme-cosine", epochs=20)["replaceme-cosine"]
    for operator in operators.operators:
        assert operator.fit["cosine_after"] > operator.fit["cosine_before"]
        (fold,) = operator.folds
        assert fold.role == "mlp_output" and fold.block == operator.boundary.span.start - 1 and fold.bias is not None
    # T from the fold: V = V0 T, so the first cut's cosine can be measured directly
    fold = operators.operators[0].folds[0]
    V0 = models.find_projections(loaded.model, 0).mlp_output.weight.double()
    T = torch.linalg.lstsq(V0, torch.as_tensor(fold.weight).double()).solution
    seen = {}
    ln = models.find_blocks(loaded.model)[0].ln_2
    handle = ln.register_forward_pre_hook(lambda module, args: seen.__setitem__("mid", args[0].double()))
    mask = torch.from_numpy(CALIBRATION.attention_mask)
    models.read_residuals(
        loaded.model, (1, 2), lambda p, x: seen.__setitem__(p, x.double()), torch.from_numpy(CALIBRATION.tokens), mask
    )
    handle.remove()
    m, target = ((seen[p] - seen["mid"])[mask.bool()] for p in (1, 2))
    direct = float(torch.nn.functional.cosine_similarity(m @ T, target, dim=1).mean())
    assert operators.operators[0].fit["cosine_after"] == pytest.approx(direct, abs=1e-3)


def test_the_network_learns_and_is_what_the_patched_model_runs(tmp_path):
    loaded = models.from_memory(tiny("llama"))
    few = recovered(loaded, "streamline-ffn", epochs=1)["streamline-ffn"]
    many = recovered(loaded, "streamline-ffn", epochs=60)["streamline-ffn"]
    errors = [[o.fit["nmse_held_out"] for o in trained.operators] for trained in (many, few)]
    assert all(late < early for late, early in zip(*errors, strict=True))
    assert many.num_parameters == 2 * (8 * 64 * 64 + 5 * 64)
    write_bytes(tmp_path / "o.safetensors", many.to_bytes())
    read = load_operators(tmp_path / "o.safetensors")
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    W1, b1, W2, b2 = many.operators[0].network
    expected = np.maximum(x @ W1 + b1, 0) @ W2 + b2
    np.testing.assert_allclose(read.operators[0].apply(x), expected, rtol=1e-6)
    patched = models.patch(loaded, PLAN, read).model
    seen = {}
    ids = torch.from_numpy(HELD_OUT.tokens)
    models.read_residuals(patched, [1], lambda p, v: seen.__setitem__(p, v), ids)
    block = models.find_blocks(patched)[1]
    got = []
    block.register_forward_pre_hook(lambda module, args: got.append(args[0]))
    patched(ids)
    np.testing.assert_allclose(got[0], many.operators[0].apply(seen[1].numpy()), rtol=1e-4, atol=1e-4)


def test_refusals():
    loaded = models.from_memory(tiny("llama"))
    with pytest.raises(RecipeError, match="a trained operator cannot be refitted"):
        recovered(loaded, "ghost-distilled+refit")
    with pytest.raises(RecoveryError, match="full matrices"):
        recovered(loaded, "ghost-distilled", rank=4)
    with pytest.raises(ValueError, match="one form"):
        Operator(PLAN.boundaries[0], "x", delta=np.eye(2), network=(np.eye(2),) * 4)
    assert OperatorSet
