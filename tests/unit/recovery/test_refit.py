"""Refits on real tiny models against dense solves; what must not change does not change."""

from __future__ import annotations

import copy
import importlib
import re
import tempfile

import numpy as np
import pytest
import torch
import transformers

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import RecoveryError
from ghostexport.execution import Execution
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.recover import recover
from ghostexport.recovery.refit.judging import SEQUENCES, STRIDE
from ghostexport.recovery.refit.parts import SingleBlock
from ghostexport.recovery.refit.streams import fill, open_streams
from ghostexport.recovery.refit.walk import _Step, _Walk, steps
from tests.tiny import tiny
from tests.unit.recovery.synthetic import least_squares


def windows(count, seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(40, 61, count)
    return CalibrationSet.from_tokens(random.integers(3, 128, (count, 60)), np.arange(60) < lengths[:, None])


CALIBRATION, HELD_OUT = windows(48, 0), windows(6, 1)


def recovered(loaded, spans, name, **section):
    plan = PrunePlan.from_spans(6, spans)
    sets = recover(loaded, plan, CALIBRATION, HELD_OUT, RecoverSection(operators=(name,), **section))
    return plan, sets[name]


def silent(name, blocks):
    """A tiny model in which some blocks add nothing to the stream."""
    model = tiny(name)
    for index in blocks:
        projections = models.find_projections(model, index)
        for projection in (projections.attention_output, projections.mlp_output):
            projection.weight.data.zero_()
            if projection.bias is not None:
                projection.bias.data.zero_()
    return models.from_memory(model)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_where_nothing_is_lost_nothing_changes(name, monkeypatch):
    """Removing blocks that do nothing: the refit is the identity, whatever the judges would say."""
    refit = importlib.import_module("ghostexport.recovery.refit.walk")
    monkeypatch.setattr(refit, "surely_less", lambda after, before: True)
    operators = recovered(silent(name, (2, 3)), [[2, 4]], "ghost-weighted+refit")[1]
    assert np.abs(operators.operators[0].delta).max() < 1e-6
    assert not operators.operators[0].folds and len(operators.operators[0].fit["refit"]) == 4


def opt():
    """Its MLPs read all tokens in one row."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96}
    config = transformers.OPTConfig(num_hidden_layers=6, num_attention_heads=4, max_position_embeddings=256, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox", "opt"])
def test_a_planted_correction_is_recovered(name):
    """A block whose two projections were spoilt learns them back from its own dense self."""
    loaded = models.from_memory(opt() if name == "opt" else tiny(name))
    step = _Step(3, 3, 0)
    with open_streams(loaded, CALIBRATION) as streams:
        walk = _Walk(loaded, CALIBRATION, streams, Execution())
        fill(loaded, CALIBRATION, 3, streams.repaired, Execution())
        streams.dense.copy_(streams.repaired)
        walk.depth = 3
        student = SingleBlock(loaded, 3)
        random = torch.Generator().manual_seed(0)
        for projection in (student.attention_output, student.mlp_output):
            noise = torch.randn(projection.weight.shape, generator=random)
            projection.weight.data += 0.3 * float(projection.weight.std()) * noise
        folds, judged = [], []
        walk.teach(student, step, folds, judged)
    assert [entry["role"] for entry in judged] == ["attention_output", "mlp_output"]
    if name == "gpt-neox":  # parallel: attention is solved against the sum of both, and the MLP against the rest
        assert judged[-1]["after"] < 0.9
        return
    assert all(entry["after"] < 0.02 for entry in judged)
    if name == "llama":  # GPT-2's activations leave some directions of the weight without effect
        for fold in folds:
            weight = getattr(models.find_projections(loaded.model, 3), fold.role).weight.T
            assert np.linalg.norm(fold.weight - weight.numpy()) < 0.02 * float(weight.norm()), fold.role


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox"])
def test_judges_compare_predictions_of_whole_models(name):
    """KL of the judging sequences, block by block, against models changed and run whole; nothing stays changed."""
    loaded = models.from_memory(tiny(name))
    step = _Step(3, 3, 0)
    change = 0.05 * torch.randn(65, 64, generator=torch.Generator().manual_seed(3)).double()
    with open_streams(loaded, CALIBRATION) as streams:
        walk = _Walk(loaded, CALIBRATION, streams, Execution())
        fill(loaded, CALIBRATION, 3, streams.repaired, Execution())
        streams.repaired *= 1.5
        fill(loaded, CALIBRATION, 4, streams.dense, Execution())
        walk.depth = 4
        student = SingleBlock(loaded, 3)
        found = [walk.look(student, step)]
        student.part("attention_output").move(change)
        found.append(walk.look(student, step))
    ids, mask = torch.from_numpy(CALIBRATION.tokens[3::4]), torch.from_numpy(CALIBRATION.attention_mask[3::4])
    dense = loaded.model(ids, attention_mask=mask).logits.double().log_softmax(-1)
    for changed, kl in zip((False, True), found, strict=True):
        model = copy.deepcopy(loaded.model)
        block = models.find_blocks(model)[3]
        block.register_forward_pre_hook(lambda m, a, k: scaled(a, k), with_kwargs=True)
        if changed:
            projection = models.find_projections(model, 3).attention_output
            weight = projection.weight.data if name == "gpt2" else projection.weight.data.T
            weight += change[:64]
            if projection.bias is not None:
                projection.bias.data += change[64]
        got = model(ids, attention_mask=mask).logits.double().log_softmax(-1)
        rows = (dense.exp() * (dense - got)).sum(-1)
        expected = [float(row[keep][::STRIDE].mean()) for row, keep in zip(rows, mask.bool(), strict=True)]
        np.testing.assert_allclose(kl, expected[:SEQUENCES], atol=2e-4)  # dense predictions are kept in float16
    assert len(found[0]) == SEQUENCES


def scaled(args, kwargs):
    if "hidden_states" in kwargs:
        return args, kwargs | {"hidden_states": 1.5 * kwargs["hidden_states"]}
    return (1.5 * args[0], *args[1:]), kwargs


def test_every_change_is_judged_against_the_model_as_it_stands(monkeypatch):
    """All are accepted: what a change is held against was looked at after the one before it was made whole."""
    walk = importlib.import_module("ghostexport.recovery.refit.walk")
    looked, pairs = [], []
    divergences = walk.Predictions.divergences

    def look(self, point, stream):
        looked.append(divergences(self, point, stream))
        return looked[-1]

    def accept(after, before):
        assert after == looked[-1] and before == looked[-2]
        pairs.append((before, after))
        return True

    monkeypatch.setattr(walk.Predictions, "divergences", look)
    monkeypatch.setattr(walk, "surely_less", accept)
    recovered(models.from_memory(tiny("llama")), [[1, 3]], "ghost+refit")
    assert len(pairs) >= 4 and len({tuple(before) for before, _ in pairs}) == len(pairs)


def test_a_nearer_stream_with_worse_predictions_is_left_alone(monkeypatch):
    """The same weights are taken or left by what the judges' predictions say, whatever the stream says."""
    loaded = models.from_memory(tiny("llama"))
    refit = importlib.import_module("ghostexport.recovery.refit.walk")
    asked = []
    monkeypatch.setattr(refit, "surely_less", lambda after, before: asked.append((after, before)))
    operators = recovered(loaded, [[2, 4]], "none+refit")[1]
    assert asked and not operators.operators[0].folds
    entries = [e for e in operators.operators[0].fit["refit"] if "kl_before" in e]
    assert len(entries) == len(asked) and all(e["ridge"] is None and e["after"] < 1 for e in entries)


@pytest.mark.parametrize("massive", [False, True])
def test_the_first_refitted_weight_is_the_ridge_solution(massive, monkeypatch):
    """o_proj of the block behind the cut, from the patched model's own activations and dense float64 QR.

    One token in a hundred may be massive: its square outweighs all others' by far.
    """
    refit = importlib.import_module("ghostexport.recovery.refit.walk")
    monkeypatch.setattr(refit, "surely_less", lambda after, before: True)
    model = tiny("gpt2")
    model.transformer.wte.weight.data[7] *= 1000 if massive else 1
    loaded = models.from_memory(model)
    plan, operators = recovered(loaded, [[2, 4]], "ghost-weighted+refit")
    operator = operators.operators[0]
    (fold,) = [f for f in operator.folds if (f.block, f.role) == (4, "attention_output")]
    entry = next(e for e in operator.fit["refit"] if (e["block"], e["role"]) == (4, "attention_output"))
    alone = recovered(loaded, [[2, 4]], "ghost-weighted")[1]
    patched = models.patch(loaded, plan, alone).model
    seen = {}
    block, dense = patched.transformer.h[2], loaded.model.transformer.h[4]
    hooks = [
        block.attn.c_proj.register_forward_pre_hook(lambda m, a: seen.update(c=a[0])),
        block.ln_2.register_forward_pre_hook(lambda m, a: seen.update(have=a[0])),
        dense.ln_2.register_forward_pre_hook(lambda m, a: seen.update(aim=a[0])),
    ]
    ids, mask = torch.from_numpy(CALIBRATION.tokens), torch.from_numpy(CALIBRATION.attention_mask)
    with torch.no_grad():
        patched(ids, attention_mask=mask)
        loaded.model(ids, attention_mask=mask)
    for hook in hooks:
        hook.remove()
    c, have, aim = (seen[key][mask.bool()].double() for key in ("c", "have", "aim"))
    c = torch.cat([c, torch.ones(len(c), 1)], dim=1)  # GPT-2 has biases
    w = 1 / (aim.square().mean(1) + 1e-6)
    assert (float(aim.square().sum(1).max() / aim.square().sum(1).median()) > 1000) == massive
    scale = float((w[:, None] * c.square()).sum(0).median())
    change = least_squares(c, aim - have, w, entry["ridge"] * scale)
    np.testing.assert_allclose(fold.weight, block.attn.c_proj.weight.double() + change[:-1], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(fold.bias, block.attn.c_proj.bias.double() + change[-1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox", "qwen2"])
def test_refitting_brings_held_out_text_nearer(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    loaded = models.from_memory(tiny(name))
    before = loaded.model(torch.from_numpy(HELD_OUT.tokens)).logits
    errors = []
    for kind in ("none", "none+refit"):
        plan, operators = recovered(loaded, [[1, 2], [3, 4]], kind)
        logits = models.patch(loaded, plan, operators).model(torch.from_numpy(HELD_OUT.tokens)).logits
        errors.append(float((logits - before).norm()))
    assert errors[1] < errors[0]
    figures = operators.operators[1].fit
    assert figures["relative_error_final_held_out"] > 0 and figures["relative_error_held_out"] > 0
    torch.testing.assert_close(loaded.model(torch.from_numpy(HELD_OUT.tokens)).logits, before, rtol=0, atol=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("spans", [[[0, 2]], [[2, 4]], [[4, 6]]])
def test_figures_of_the_first_cut_are_those_of_the_operator_alone(spans):
    """The stream before the first cut is the dense model's; the bounds for float16 are among the figures."""
    loaded = models.from_memory(tiny("llama"))
    alone, refitted = (
        recovered(loaded, spans, kind)[1].operators[0].fit for kind in ("ghost-weighted", "ghost-weighted+refit")
    )
    for key in ("nmse", "relative_error", "relative_change"):
        assert refitted[f"{key}_held_out"] == pytest.approx(alone[f"{key}_held_out"], rel=1e-3)
    for key in ("largest_x", "largest_change", "largest_y"):
        assert refitted[key] == pytest.approx(alone[key], rel=1e-3) and alone[key] > 0


@pytest.mark.parametrize("kind", ["ghost-split", "ghost-zero"])
def test_figures_of_what_reaches_inside_the_last_block(kind):
    loaded = models.from_memory(tiny("llama"))
    alone, refitted = (recovered(loaded, [[2, 4]], name)[1].operators[0].fit for name in (kind, f"{kind}+refit"))
    for key in ("nmse_held_out", "relative_error_held_out", "relative_change_held_out", "largest_y"):
        assert refitted[key] == pytest.approx(alone[key], rel=1e-3)


def test_upstream_blocks_are_refitted_too():
    loaded = models.from_memory(tiny("llama"))
    operators = recovered(loaded, [[3, 5]], "ghost-zero+refit", refit_upstream=2)[1]
    touched = {(f.block, f.role) for f in operators.operators[0].folds}
    judged = {(e["block"], e["role"]): e["ridge"] for e in operators.operators[0].fit["refit"]}
    both = {(block, role) for block in (1, 5) for role in ("attention_output", "mlp_output")}
    assert set(judged) == both | {(2, "attention_output")}
    assert touched == {where for where, ridge in judged.items() if ridge} | {(2, "mlp_output")}
    assert (1, "mlp_output") in touched
    assert len(touched) == len(operators.operators[0].folds)
    assert not operators.operators[0].adds_nodes


def test_steps():
    plan = PrunePlan.from_spans(12, [[4, 7], [9, 10]])
    assert [(s.block, s.teacher, s.boundary) for s in steps(plan, False, 0)] == [
        (7, 7, 0), (8, 8, 0), (10, 10, 1), (11, 11, 1),
    ]  # fmt: skip
    upstream = steps(plan, True, 2)
    assert [(s.block, s.teacher, s.boundary) for s in upstream] == [
        (2, 3, 0), (3, 6, 0), (7, 8, 1), (8, 9, 1), (10, 10, 1), (11, 11, 1),
    ]  # fmt: skip
    assert [s.block for s in upstream if not s.whole] == [3, 8]


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2"])
@pytest.mark.parametrize("kind", ["ghost-split", "ghost-zero"])
def test_post_norm_models_have_no_split(name, kind):
    with pytest.raises(RecoveryError, match="has a norm between its MLP's projection") as refusal:
        recovered(models.from_memory(tiny(name)), [[2, 4]], kind)
    assert refusal.value.message.startswith(f"{kind} does not apply to") and "ghost-weighted" in refusal.value.remedy


def test_what_does_not_apply_says_so():
    neox = models.from_memory(tiny("gpt-neox"))
    for kind in ("ghost-split", "ghost-zero+refit"):
        with pytest.raises(RecoveryError, match=rf"^{re.escape(kind)} does not apply.*attention and MLP"):
            recovered(neox, [[2, 4]], kind)
    llama = models.from_memory(tiny("llama"))
    for kind in ("ghost-zero", "replaceme-cosine"):
        with pytest.raises(RecoveryError, match=rf"^{re.escape(kind)} needs a kept block.*block 0 is removed"):
            recovered(llama, [[0, 2]], kind)
    with pytest.raises(RecoveryError, match="folded into the weights that a refit replaces"):
        recovered(llama, [[2, 4]], "prune-and-comp+refit")


@pytest.mark.parametrize("suffix", ["", "+refit"])
def test_a_split_of_the_first_blocks_is_ghost_weighted(suffix):
    """Nothing is kept before the cut: there is no down-projection to solve together with the map."""
    loaded = models.from_memory(tiny("llama"))
    split = recovered(loaded, [[0, 2], [3, 4]], f"ghost-split{suffix}")[1].operators
    weighted = recovered(loaded, [[0, 2], [3, 4]], f"ghost-weighted{suffix}")[1].operators
    assert (split[0].kind, split[0].site, split[1].kind, split[1].site) == (
        "ghost-weighted", "boundary", "ghost-split", "mid",
    )  # fmt: skip
    np.testing.assert_array_equal(split[0].delta, weighted[0].delta)


def test_refusals_come_before_anything_is_measured(monkeypatch):
    """A recipe with a refit that cannot be is refused at once, not after its other operators are fitted."""
    monkeypatch.setattr("ghostexport.recovery.recover.gather", lambda *args: pytest.fail("a pass was made"))
    few, plan = CalibrationSet.from_tokens(np.ones((3, 60))), PrunePlan.from_spans(6, [[2, 4]])
    for kind in ("ghost+refit", "ghost-split", "ghost-zero"):
        with pytest.raises(RecoveryError, match=rf"^{re.escape(kind)} needs at least 4 calibration sequences"):
            section = RecoverSection(operators=("ghost", kind))
            recover(models.from_memory(tiny("llama")), plan, few, HELD_OUT, section)
    with pytest.raises(RecoveryError, match="Rank 65 exceeds the hidden size 64"):
        recovered(models.from_memory(tiny("llama")), [[2, 4]], "ghost", rank=65)
    for name, kind in (("gpt-neox", "ghost-split+refit"), ("gemma2", "ghost-zero+refit")):
        with pytest.raises(RecoveryError):
            loaded = models.from_memory(tiny(name))
            section = RecoverSection(operators=("ghost", kind))
            recover(loaded, PrunePlan.from_spans(6, [[2, 4]]), CALIBRATION, HELD_OUT, section)


def test_what_was_changed_and_what_has_no_effect_is_said():
    loaded = models.from_memory(tiny("llama"))

    def lines(spans, *names, **section):
        said = []
        section = RecoverSection(operators=names, **section)
        plan = PrunePlan.from_spans(6, spans)
        sets = recover(loaded, plan, CALIBRATION, HELD_OUT, section, Execution(say=said.append))
        return sets, "\n".join(said)

    sets, said = lines([[2, 4]], "none+refit", per_block=True, rank=4)
    assert f"refit: {len(sets['none+refit'].operators[0].folds)} of 4 weights changed" in said
    assert "per_block (True) has no effect on none+refit" in said and "rank (4) has no effect on none+refit" in said
    said = lines([[4, 6]], "ghost+refit")[1]
    assert "nothing to refit behind the last cut (refit_upstream" in said and "0 of 0 weights" not in said
    said = lines([[2, 4]], "ghost", "ghost-zero", refit_upstream=2, rank=4)[1]
    assert "refit_upstream (2) has no effect on ghost, ghost-zero" in said and "rank" not in said


def test_few_judges_are_announced():
    loaded, plan = models.from_memory(tiny("llama")), PrunePlan.from_spans(6, [[2, 4]])
    for count in (8, 16):
        said = []
        tokens = windows(count, 0)
        section = RecoverSection(operators=("none+refit",))
        recover(loaded, plan, tokens, HELD_OUT, section, Execution(say=said.append))
        assert any("2 of 8 sequences judge, too few" in line for line in said) == (count == 8)
