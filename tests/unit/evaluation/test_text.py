"""Perplexity, KL and agreement against textbook formulas in NumPy float64."""

from __future__ import annotations

import numpy as np
import torch

from ghostexport.calibration import CalibrationSet
from ghostexport.evaluation.quality_meter import QualityMeter
from ghostexport.evaluation.text import evaluate, losses, torch_forward
from tests.tiny import tiny

RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(0, 40, (3, 200))
LOGITS, DENSE = RANDOM.normal(size=(2, 3, 200, 40)).astype(np.float32) * 3


def probabilities(logits):
    exps = np.exp(logits.astype(np.float64))
    return exps / exps.sum(-1, keepdims=True)


def expected(mask):
    q, p = probabilities(LOGITS)[:, :-1], probabilities(DENSE)[:, :-1]
    counted = (mask[:, :-1] * mask[:, 1:]).astype(bool)
    picked = np.take_along_axis(q, TOKENS[:, 1:, None], -1)[..., 0]
    kl = (p * np.log(p / q)).sum(-1)
    agree = p.argmax(-1) == q.argmax(-1)
    return np.exp(-np.log(picked[counted]).mean()), kl[counted].mean(), agree[counted].mean(), counted.sum()


def measured(mask=None, parts=((0, 3),), convert=np.asarray):
    meter = QualityMeter()
    for start, stop in parts:
        part = slice(start, stop)
        meter.add(convert(LOGITS[part]), TOKENS[part], None if mask is None else mask[part], convert(DENSE[part]))
    quality = meter.result()
    return quality.perplexity, quality.mean_kl, quality.top1_agreement, quality.tokens


def test_figures_equal_their_definitions():
    mask = np.ones_like(TOKENS)
    np.testing.assert_allclose(measured(), expected(mask), rtol=1e-12)
    mask[1, 150:] = 0
    mask[2, :20] = 0
    np.testing.assert_allclose(measured(mask), expected(mask), rtol=1e-12)


def test_streaming_and_tensor_inputs_do_not_matter():
    np.testing.assert_allclose(measured(parts=((0, 1), (1, 3)), convert=torch.from_numpy), measured(), rtol=1e-12)


def test_perplexity_equals_the_models_own_loss_and_dense_agrees_with_itself():
    model = tiny("llama")
    windows = CalibrationSet.from_tokens(RANDOM.integers(0, 128, (4, 50)))
    ids = torch.from_numpy(windows.tokens)
    found = evaluate({"dense": torch_forward(model), "other": torch_forward(tiny("llama", seed=1))}, windows, "dense")
    loss = model(input_ids=ids, labels=ids).loss
    np.testing.assert_allclose(found["dense"].perplexity, float(loss.detach().exp()), rtol=1e-5)
    assert (found["dense"].mean_kl, found["dense"].top1_agreement, found["dense"].tokens) == (0.0, 1.0, 4 * 49)
    assert found["other"].mean_kl > 0 and found["other"].top1_agreement < 1


def test_without_reference_or_tokens():
    meter = QualityMeter()
    assert np.isnan(meter.result().perplexity)
    meter.add(LOGITS, TOKENS)
    quality = meter.result()
    assert quality.mean_kl is None and quality.top1_agreement is None and quality.tokens == 3 * 199


def test_a_loss_counts_real_tokens_after_real_tokens_on_either_side_of_the_padding():
    mask = np.ones_like(TOKENS)
    mask[0, :60], mask[1, 150:], mask[2, 40:50] = 0, 0, 0
    (batch,) = CalibrationSet.from_tokens(TOKENS, mask).batches()
    parts = list(losses(torch.from_numpy(LOGITS), batch))
    mean = sum(float(loss) for loss, _ in parts) / sum(count for _, count in parts)
    perplexity, _, _, counted = expected(mask)
    np.testing.assert_allclose(np.exp(mean), perplexity, rtol=1e-6)
    assert sum(count for _, count in parts) == counted == 139 + 149 + 188
