"""Rounding in turn against the algorithm behind it: optimal brain surgery, an explicit inverse at each step."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from ghostexport.errors import RecipeError
from ghostexport.quantization.forms import FORMS
from ghostexport.quantization.gptq import DAMPING, round_in_turn
from ghostexport.quantization.inputs import measure_inputs
from ghostexport.quantization.scales import dequantize, quantize
from ghostexport.quantization.targets import Settings
from ghostexport.quantization.writer import quantize_graph

FLOAT32 = np.dtype(np.float32)
TOKENS = np.random.default_rng(2).integers(0, 128, (4, 24))


def problem(inputs=64, outputs=12, seed=0):
    """Weights, and ``X'X`` of inputs that depend on one another."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((500, 8)) @ rng.standard_normal((8, inputs)) + 0.3 * rng.standard_normal((500, inputs))
    return rng.standard_normal((inputs, outputs)).astype(np.float32), (X.T @ X).astype(np.float32)


def surgeon(W, S, H, form):
    """Fixes one input after the other; the free ones move to where ``e'He`` is least with it fixed."""
    W, Q = W.astype(np.float64), np.empty_like(W)
    H = H.astype(np.float64) + DAMPING * np.diagonal(H).mean(dtype=np.float64) * np.eye(len(H))
    free = list(np.argsort(-np.diagonal(H), kind="stable"))
    while free:
        k = free[0]
        Q[k] = form.nearest(W[k].astype(np.float32), S[k])
        inverse = np.linalg.inv(H[np.ix_(free, free)])
        W[free] -= np.outer(inverse[:, 0], (W[k] - S[k] * Q[k]) / inverse[0, 0])
        free = free[1:]
    return Q


def error(W, rounded, H):
    E = (W - rounded).astype(np.float64)
    return np.einsum("kn,kl,ln->n", E, H.astype(np.float64), E)


@pytest.mark.parametrize("name", FORMS)
def test_it_is_optimal_brain_surgery_where_that_wins_and_nearest_elsewhere(name):
    form, (W, H) = FORMS[name], problem(inputs=256)
    block = form.block_for([256])
    q, scale, unit = quantize(W, form, block, FLOAT32, np.diagonal(H).astype(float))
    turned, before, after = round_in_turn(W, q, scale, unit, form, H)
    S = dequantize(np.ones_like(q, np.float32), scale, unit)
    expected = surgeon(W, S, H, form)
    old, new = error(W, S * q.astype(np.float32), H), error(W, S * expected, H)
    won = new < old
    assert won.any()
    # a value in the middle of two may go either way in float32
    assert (turned.astype(np.float32)[:, won] != expected[:, won]).mean() < 0.02
    assert np.array_equal(turned[:, ~won].view(np.uint8), q[:, ~won].view(np.uint8))
    whole = error(W, np.zeros_like(W), H).sum()
    assert before == pytest.approx(np.sqrt(old.sum() / whole), rel=1e-3)
    taken = error(W, dequantize(turned, scale, unit), H)
    assert after == pytest.approx(np.sqrt(taken.sum() / whole), rel=1e-3)
    assert (taken <= old * (1 + 1e-4)).all()


def test_it_halves_the_error_of_four_bits_on_inputs_that_depend_on_one_another():
    W, H = problem()
    q, scale, unit = quantize(W, FORMS["int4"], 32, FLOAT32)
    _, before, after = round_in_turn(W, q, scale, unit, FORMS["int4"], H)
    assert after < 0.6 * before


def test_independent_inputs_are_rounded_to_the_nearest():
    W, _ = problem()
    q, scale, unit = quantize(W, FORMS["int4"], 32, FLOAT32)
    turned, before, after = round_in_turn(W, q, scale, unit, FORMS["int4"], np.diag(np.arange(1.0, 65)))
    assert np.array_equal(turned, q) and before == after > 0


def test_inputs_that_never_fire_leave_the_rounding():
    W, _ = problem()
    q, scale, unit = quantize(W, FORMS["int4"], 32, FLOAT32)
    assert np.array_equal(round_in_turn(W, q, scale, unit, FORMS["int4"], np.zeros((64, 64)))[0], q)


@pytest.fixture(scope="module")
def dense(exported):
    return exported("llama-tied", vocab_size=264)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("grams")


@pytest.fixture(scope="module")
def seen(dense, folder):
    return measure_inputs(dense.path, TOKENS, grams=folder)


def test_the_measured_products_have_the_measured_squares_on_their_diagonal(dense, seen, folder, monkeypatch, tmp_path):
    grams = {name: np.load(found.gram) for name, found in seen.items()}
    assert len({found.gram for found in seen.values()}) == len(list(folder.iterdir())) < len(seen)
    for name, found in seen.items():
        gram = grams[name]
        assert np.allclose(np.diagonal(gram), found.squares, rtol=1e-4)
        assert np.allclose(gram, gram.T) and np.linalg.eigvalsh(gram.astype(float)).min() > -1e-3 * gram.max()
    monkeypatch.setattr("ghostexport.quantization.inputs._GRAM_BYTES", 1)  # a run for each
    steps = []
    apart = measure_inputs(dense.path, TOKENS, lambda done, total: steps.append((done, total)), tmp_path)
    runs = len(list(folder.iterdir()))
    assert steps == [(i + 1, len(TOKENS) * (1 + runs)) for i in range(len(TOKENS) * (1 + runs))]
    assert all(np.array_equal(np.load(apart[name].gram), gram) for name, gram in grams.items())


@pytest.mark.parametrize("head", ["keep", "int8"])
def test_a_graph_keeps_the_scales_and_lowers_the_error_of_its_outputs(dense, seen, tmp_path, head):
    reports = {}
    for rounding in ("nearest", "gptq"):
        settings = Settings(rounding=rounding, head=head)
        reports[rounding] = quantize_graph(dense.path, tmp_path / rounding / "q.onnx", "int4", settings, inputs=seen)
    near, turned = (
        {i.name: numpy_helper.to_array(i) for i in onnx.load(tmp_path / rounding / "q.onnx").graph.initializer}
        for rounding in ("nearest", "gptq")
    )
    float_weights = {i.name: numpy_helper.to_array(i) for i in onnx.load(dense.path).graph.initializer}
    rows = [row for row in reports["gptq"].linears if row.form == "int4"]
    assert len(rows) == 7 * 6
    for row in rows:
        scale = turned[f"{row.weight}.scale"]
        assert np.array_equal(near[f"{row.weight}.scale"], scale)
        W, H = float_weights[row.weight], np.load(seen[row.weight].gram)
        whole = error(W, np.zeros_like(W), H).sum()
        for held, claimed in zip((near, turned), row.output_error, strict=True):
            rounded = dequantize(held[f"{row.weight}.q"], scale)
            assert np.sqrt(error(W, rounded, H).sum() / whole) == pytest.approx(claimed, rel=1e-3)
        assert row.output_error[1] <= row.output_error[0]
    assert sum(row.output_error[1] for row in rows) < 0.9 * sum(row.output_error[0] for row in rows)
    assert all(row.output_error is None for row in reports["nearest"].linears)


def test_without_calibration_it_is_refused(dense, tmp_path):
    with pytest.raises(RecipeError, match=r"gptq.*calibration"):
        quantize_graph(dense.path, tmp_path / "q.onnx", "int4", Settings(rounding="gptq"))
    assert not list(tmp_path.iterdir())
