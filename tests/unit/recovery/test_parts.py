"""Refits of every shape of block: what was spoilt in a block is learnt back from its own dense self."""

import numpy as np
import pytest
import torch

from ghostexport import models
from ghostexport.execution import Execution
from ghostexport.models import gain
from ghostexport.operators import OperatorSet, WeightFold, load_operators
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.recover import best_operator, recover, require_operators
from ghostexport.recovery.refit.parts import SingleBlock
from ghostexport.recovery.refit.streams import fill, open_streams
from ghostexport.recovery.refit.walk import _Step, _Walk
from tests.tiny import tiny
from tests.unit.recovery.test_refit import CALIBRATION, HELD_OUT, windows


def spoil(part, generator):
    """Moves a part off its place, by a fifth of its own size."""
    noise = torch.randn(next(part.module.parameters()).shape, generator=generator)
    if part.is_gain:
        models.scale_gain(part.module, 1 + 0.2 * noise)
    else:
        part.module.weight.data += 0.2 * float(part.module.weight.std()) * noise


def taught(loaded, roles):
    """What is judged while block 3, spoilt in some parts, learns from its dense self."""
    with open_streams(loaded, CALIBRATION) as streams:
        walk = _Walk(loaded, CALIBRATION, streams, Execution())
        fill(loaded, CALIBRATION, 3, streams.repaired, Execution())
        streams.dense.copy_(streams.repaired)
        walk.depth = 3
        student = SingleBlock(loaded, 3)
        generator = torch.Generator().manual_seed(0)
        for part in student.parts:
            if part.role in roles:
                spoil(part, generator)
        folds, judged = [], []
        walk.teach(student, _Step(3, 3, 0), folds, judged)
        return student, folds, judged


@pytest.mark.parametrize("name", ["granite", "falcon", "falcon-parallel", "cohere", "persimmon"])
@pytest.mark.parametrize("role", ["attention_output", "mlp_output"])
def test_a_spoilt_projection_is_learnt_back(name, role):
    """Multipliers, additions in place, parallel blocks, norms that read transposed tensors."""
    loaded = models.from_memory(tiny(name))
    _, _, judged = taught(loaded, {role})
    assert [entry["role"] for entry in judged] == ["attention_output", "mlp_output"]
    (entry,) = [entry for entry in judged if entry["role"] == role]
    parallel = name in ("falcon-parallel", "cohere")  # attention is solved first, against the sum of both
    assert entry["after"] < (0.9 if parallel and role == "mlp_output" else 0.02)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2"])
@pytest.mark.parametrize("side", ["attention", "mlp"])
def test_a_spoilt_gain_is_learnt_back(name, side):
    """The gain of the norm behind a projection, channel by channel, in closed form."""
    loaded = models.from_memory(tiny(name))
    student, folds, judged = taught(loaded, {f"{side}_gain"})
    assert [entry["role"] for entry in judged] == ["attention_gain", "attention_output", "mlp_gain", "mlp_output"]
    (entry,) = [entry for entry in judged if entry["role"] == f"{side}_gain"]
    assert entry["after"] < 1e-3 and entry["ridge"] is not None
    addition = getattr(models.find_anatomies(loaded.model, [3])[3], "mixer" if side == "attention" else "mlp")
    torch.testing.assert_close(gain(student.part(f"{side}_gain").module), gain(addition.norm), rtol=2e-2, atol=2e-2)
    (fold,) = [fold for fold in folds if fold.role == f"{side}_gain"]
    np.testing.assert_allclose(fold.weight, np.ones(64), atol=2e-2)  # of the dense model's gain


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2"])
def test_a_spoilt_projection_before_a_norm_comes_nearer(name):
    """One step of an iteration: most of the error goes."""
    _, _, judged = taught(models.from_memory(tiny(name)), {"mlp_output"})
    after = {entry["role"]: entry["after"] for entry in judged}
    assert after["mlp_output"] < 0.35 * min(1, after["mlp_gain"])


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_of_a_mixture_of_experts_the_attention_is_refitted(name):
    _, _, judged = taught(models.from_memory(tiny(name)), {"attention_output"})
    (entry,) = judged
    assert entry["role"] == "attention_output" and entry["after"] < 0.02


@pytest.mark.parametrize(
    ("name", "expected", "why"),
    [
        ("llama", "ghost-split+refit", "applies"),
        ("granite", "ghost-split+refit", "applies"),
        ("falcon", "ghost-split+refit", "applies"),
        ("persimmon", "ghost-split+refit", "applies"),
        ("gpt-neox", "ghost-weighted+refit", "parallel"),
        ("gemma3", "ghost-weighted+refit", "a norm"),
        ("mixtral", "ghost-weighted+refit", "mixture of experts"),
        ("qwen3-moe", "ghost-weighted+refit", "block 0 has no single MLP"),
    ],
)
def test_best_is_the_best_that_applies(name, expected, why):
    loaded, said = models.from_memory(tiny(name)), []
    assert best_operator(loaded, None, 48)[0] == expected
    section = RecoverSection(operators=("best", expected))
    require_operators(loaded, RecoverSection(operators=(expected,)), None, len(CALIBRATION))
    plan = PrunePlan.from_spans(6, [[2, 4]])
    if name == "qwen3-moe":  # the plan says that block 1 is the last kept one, and that is no mixture
        expected, why = "ghost-split+refit", "applies"
    sets = recover(loaded, plan, CALIBRATION, HELD_OUT, section, Execution(say=said.append))
    assert expected in sets and "best" not in sets
    (line,) = [line for line in said if "best is" in line]
    assert expected in line and why in line


def test_best_with_few_sequences_asks_for_no_judges():
    loaded, few = models.from_memory(tiny("llama")), windows(3, 0)
    sets = recover(loaded, PrunePlan.from_spans(6, [[2, 4]]), few, HELD_OUT, RecoverSection(operators=("best",)))
    assert list(sets) == ["ghost-weighted"]


@pytest.mark.parametrize("name", ["gemma3", "olmo2"])
def test_a_rescaled_gain_survives_its_file(name, tmp_path):
    """Saved, loaded, patched: the norm's result is multiplied, whether its gain is kept as w or 1 + w."""
    loaded = models.from_memory(tiny(name))
    plan = PrunePlan.from_spans(6, [[2, 4]])
    none = recover(loaded, plan, CALIBRATION, HELD_OUT, RecoverSection(operators=("none",)))["none"].operators[0]
    factor = np.random.default_rng(0).uniform(0.5, 2, 64).astype(np.float32)
    operator = type(none)(none.boundary, "none", folds=(WeightFold(4, "mlp_gain", factor),))
    path = tmp_path / "none.safetensors"
    path.write_bytes(OperatorSet("none", (operator,), plan).to_bytes())
    patched = models.patch(loaded, plan, load_operators(path)).model
    before, after = (models.find_anatomies(m, [i])[i].mlp.norm for m, i in ((loaded.model, 4), (patched, 2)))
    x = torch.randn(3, 64)
    torch.testing.assert_close(after(x), before(x) * torch.from_numpy(factor), rtol=1e-5, atol=1e-5)
