import numpy as np
import pytest

from ghostexport.errors import RecoveryError, RunFolderError
from ghostexport.operators import Operator, OperatorSet, WeightFold, load_operators
from ghostexport.plan import PrunePlan

PLAN = PrunePlan.from_spans(8, [[1, 3], [5, 6]])


def operators(seed=0):
    rng = np.random.default_rng(seed)
    first, second = PLAN.boundaries
    fold = WeightFold(0, "mlp_output", rng.normal(size=(6, 4)).astype(np.float32))
    return OperatorSet(
        "demo",
        (
            Operator(first, "ghost", delta=rng.normal(size=(4, 4)).astype(np.float32), fit={"nmse": 0.25}),
            Operator(second, "low-rank", factors=(np.ones((4, 2)), np.ones((2, 4))), bias=np.ones(4), folds=(fold,)),
        ),
        PLAN,
        "cafe",
    )


def test_file_round_trip_keeps_everything_and_equal_content_gives_equal_bytes(tmp_path):
    path = tmp_path / "demo.safetensors"
    path.write_bytes(operators().to_bytes())
    again = load_operators(path)
    assert again.to_bytes() == operators().to_bytes() == path.read_bytes()
    assert again.plan == PLAN and again.calibration_sha256 == "cafe"
    assert again.operators[0].fit == {"nmse": 0.25}
    assert again.operators[1].folds[0].block == 0 and again.operators[1].folds[0].role == "mlp_output"
    assert again.num_parameters == 16 + 8 + 8 + 4


FORMS = {
    "delta": {"delta": (4, 4)},
    "delta and bias": {"delta": (4, 4), "bias": (4,)},
    "factors": {"factors": ((4, 2), (2, 4))},
    "diagonal": {"diagonal": (4,)},
    "network": {"network": ((4, 3), (3,), (3, 4), (4,))},
    "bias": {"bias": (4,)},
}


@pytest.mark.parametrize("site", ["boundary", "mid"])
@pytest.mark.parametrize("form", [*FORMS, "scale", "nothing"])
def test_every_form_comes_back_as_it_was(form, site, tmp_path):
    rng = np.random.default_rng(3)

    def drawn(shape):
        return tuple(map(drawn, shape)) if isinstance(shape[0], tuple) else rng.normal(size=shape).astype(np.float32)

    folds = (
        WeightFold(0, "attention_output", drawn((5, 4))),
        WeightFold(0, "mlp_output", drawn((6, 4)), drawn((4,))),
        WeightFold(7, "mlp_output", drawn((6, 4)), drawn((4,))),
    )
    values = {key: drawn(shape) for key, shape in FORMS.get(form, {}).items()}
    if form == "scale":
        values["scale"] = 1.2345678901234567
    first = Operator(PLAN.boundaries[0], "first", **values, folds=folds, site=site, fit={"nmse": [0.5, 1]})
    second = Operator(PLAN.boundaries[1], "second", delta=drawn((4, 4)))
    path = tmp_path / "x.safetensors"
    path.write_bytes(OperatorSet("x", (first, second), PLAN).to_bytes())
    found, other = load_operators(path).operators
    assert (found.boundary, found.kind, found.site, found.scale) == (first.boundary, "first", site, first.scale)
    assert found.fit == first.fit and other.kind == "second" and other.site == "boundary" and not other.folds
    assert found.arrays.keys() == first.arrays.keys()
    for key, array in first.arrays.items():
        np.testing.assert_array_equal(found.arrays[key], array)
    assert [(f.block, f.role) for f in found.folds] == [(f.block, f.role) for f in folds]
    for one, fold in zip(found.folds, folds, strict=True):
        np.testing.assert_array_equal(one.weight, fold.weight)
        assert (one.bias is None) == (fold.bias is None)
        if fold.bias is not None:
            np.testing.assert_array_equal(one.bias, fold.bias)


def test_apply_is_x_plus_x_m_plus_b_in_every_form():
    x = np.random.default_rng(1).normal(size=(2, 3, 4))
    (b,) = PrunePlan.from_spans(4, [[1, 2]]).boundaries
    d = np.array([0.5, -1.0, 2.0, 0.0])
    u, v = np.arange(8.0).reshape(4, 2), np.arange(8.0).reshape(2, 4)
    for operator, m in [
        (Operator(b, "k", delta=np.outer(d, d)), np.outer(d, d)),
        (Operator(b, "k", diagonal=d), np.diag(d)),
        (Operator(b, "k", factors=(u, v), bias=d), u @ v),
    ]:
        bias = 0 if operator.bias is None else operator.bias
        np.testing.assert_allclose(operator.apply(x), x @ (np.eye(4) + m) + bias, atol=1e-12)
        np.testing.assert_array_equal(operator.matrix, m)
        assert operator.hidden_size == 4


def test_one_form_per_operator_and_one_operator_per_boundary():
    with pytest.raises(ValueError, match="one form"):
        Operator(PLAN.boundaries[0], "k", delta=np.eye(2), diagonal=np.ones(2))
    with pytest.raises(ValueError, match="one operator per boundary"):
        OperatorSet("k", operators().operators[:1], PLAN)
    with pytest.raises(ValueError, match="in order"):
        OperatorSet("k", operators().operators[::-1], PLAN)


@pytest.mark.parametrize("damage", ["missing", "truncated", "foreign", "header"])
def test_a_damaged_file_is_refused(tmp_path, damage):
    path = tmp_path / "demo.safetensors"
    data = operators().to_bytes()
    if damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "foreign":
        from safetensors.numpy import save

        path.write_bytes(save({"a": np.ones(3)}))
    elif damage == "header":
        path.write_bytes(data.replace(b'\\"boundary\\": 1', b'\\"boundery\\": 1').replace(b"[5, 6]", b"[6, 5]"))
    with pytest.raises(RunFolderError, match="ghostexport recover"):
        load_operators(path)


@pytest.mark.parametrize(
    ("stream", "fit", "expected"),
    [
        ("float32", {"largest_x": 1e6}, "float32"),
        ("bfloat16", {"largest_x": 1e6}, "bfloat16"),
        ("float16", {"largest_x": 2e4, "largest_change": 10.0, "largest_y": 2e4}, "float16"),
        ("float16", {"largest_x": 2e4, "largest_change": 4e4, "largest_y": 2.5e4}, "float32"),
    ],
)
def test_an_operator_near_the_end_of_float16_becomes_a_float32_island(stream, fit, expected):
    plan = PrunePlan.from_spans(4, [[1, 2]])
    made = OperatorSet("k", (Operator(plan.boundaries[0], "k", delta=np.eye(2), fit=fit),), plan)
    assert made.dtype_in(stream)[0] == expected


def test_a_repaired_stream_beyond_float16_is_refused():
    plan = PrunePlan.from_spans(4, [[1, 2]])
    made = OperatorSet("k", (Operator(plan.boundaries[0], "k", fit={"largest_y": 5e4}),), plan)
    with pytest.raises(RecoveryError, match="50000"):
        made.dtype_in("float16")
