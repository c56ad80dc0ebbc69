"""Rounding and scales against brute force: every grid value tried, every bit of the stored numbers counted."""

import ml_dtypes
import numpy as np
import pytest

from ghostexport.quantization.forms import FORMS
from ghostexport.quantization.scales import dequantize, quantize, relative_error

FLOAT16 = np.dtype(np.float16)


def grid(form):
    """Every value the form can hold."""
    if form.name == "int8":
        return np.arange(-127, 128, dtype=np.float32)
    if form.name == "int4":
        return np.arange(-8, 8, dtype=np.float32)
    eight = form.name in ("fp8", "mxfp8")
    bits = np.arange(256 if eight else 16, dtype=np.uint8)
    values = bits.view(form.numpy) if eight else bits.astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
    values = values.astype(np.float32)
    return np.unique(values[np.isfinite(values)])


def weights(inputs=128, outputs=24, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((inputs, outputs)) * np.exp(rng.standard_normal(outputs))).astype(np.float32)


@pytest.mark.parametrize("name", FORMS)
def test_every_weight_goes_to_the_nearest_value_of_the_grid(name):
    form, W = FORMS[name], weights()
    block = form.block_for([128])
    q, scale, unit = quantize(W, form, block, FLOAT16, search=False)
    s = np.repeat(np.atleast_2d(scale).astype(np.float32) * unit, block or 128, axis=0)
    distances = np.abs(W[..., None] - grid(form) * s[..., None])
    taken = np.abs(W - dequantize(q, scale, unit))
    assert np.allclose(taken, distances.min(-1), atol=1e-6 * np.abs(W).max())


@pytest.mark.parametrize("name", FORMS)
def test_scales_map_the_largest_magnitude_of_a_block_to_the_end_of_the_grid(name):
    form, W = FORMS[name], weights()
    q, scale, unit = quantize(W, form, form.block_for([128]), FLOAT16, search=False)
    blocks = np.atleast_2d(scale)
    largest = np.abs(W).reshape(len(blocks), -1, W.shape[1]).max(1)
    if form.powers:  # the smallest power of two that clips nothing
        s = blocks.astype(np.float32)
        assert scale.dtype == ml_dtypes.float8_e8m0fnu
        assert (s * form.grid >= largest).all() and (s / 2 * form.grid < largest).all()
        return
    precision = 2.0**-4 if form.double else 2.0**-11  # E4M3 has 3 bits of mantissa, float16 ten
    assert np.allclose(blocks.astype(np.float32) * unit * form.grid, largest, rtol=precision + 1e-6)
    assert scale.dtype == (ml_dtypes.float8_e4m3fn if form.double else np.float16)
    assert np.abs(q.astype(np.float32)).max() == form.grid


@pytest.mark.parametrize("name", FORMS)
def test_a_searched_scale_is_never_worse_and_weighs_by_the_inputs(name):
    form, W = FORMS[name], weights()
    d = np.exp(2 * np.random.default_rng(1).standard_normal(128))
    block = form.block_for([128])
    errors = {
        kind: relative_error(W, dequantize(*quantize(W, form, block, FLOAT16, importance, search)), d)
        for kind, importance, search in (("absmax", None, False), ("plain", None, True), ("weighted", d, True))
    }
    assert errors["weighted"] <= errors["plain"] and errors["weighted"] <= errors["absmax"]
    if name in ("int4", "nvfp4"):
        assert errors["weighted"] < 0.97 * errors["absmax"]


def test_the_search_finds_the_best_scale_of_a_block_within_a_hundredth():
    W, form = weights(64, 8), FORMS["int4"]
    q, scale, unit = quantize(W, form, 64, np.dtype(np.float32))
    found = ((W - dequantize(q, scale, unit)) ** 2).sum(0)
    tried = np.linspace(0.3, 1.3, 4001)[:, None, None] * np.abs(W).max(0) / 7
    best = ((W - np.clip(np.rint(W / tried), -8, 7) * tried) ** 2).sum(1).min(0)
    assert (found <= 1.01 * best).all()


@pytest.mark.parametrize(("name", "block"), [("int4", 16), ("mxfp8", 32)])
@pytest.mark.parametrize("search", [True, False])
def test_an_empty_block_and_an_input_that_never_fires_stay_finite(name, block, search):
    W = weights(2 * block, 4)
    W[:block] = 0
    q, scale, unit = quantize(W, FORMS[name], block, FLOAT16, np.zeros(2 * block), search)
    assert not q[:block].astype(np.float32).any()
    assert np.isfinite(dequantize(q, scale, unit)).all()


def test_the_pieces_of_a_large_weight_are_rounded_as_one(monkeypatch):
    W = weights(64, 40)
    whole = quantize(W, FORMS["int4"], 32, FLOAT16)
    monkeypatch.setattr("ghostexport.quantization.scales._AT_ONCE", 64 * 7)
    for one, other in zip(whole, quantize(W, FORMS["int4"], 32, FLOAT16), strict=True):
        assert np.array_equal(one.astype(np.float32), other.astype(np.float32))


def test_a_block_must_divide_every_weight():
    assert FORMS["int4"].block_for([576, 1536]) == 64
    assert FORMS["int8"].block_for([100]) is None
    with pytest.raises(ValueError, match=r"no block of int4 .* divides \[100\]"):
        FORMS["int4"].block_for([100])


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4"])
def test_floats_are_rounded_as_the_type_rounds_them_ties_and_small_ones_too(name):
    form = FORMS[name]
    values, rng = grid(form), np.random.default_rng(0)
    middles = (values[1:] + values[:-1]) / 2
    above = np.nextafter(middles, np.float32(np.inf))
    many = np.exp(rng.uniform(-15, 7, 50_000)) * rng.choice([-1, 1], 50_000)
    x = np.concatenate([values, middles, above, many]).astype(np.float32)
    expected = np.clip(x, form.low, form.grid).astype(form.numpy).astype(np.float32)
    assert np.array_equal(form.nearest(x, np.ones(1, np.float32)), expected)
