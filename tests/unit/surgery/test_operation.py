"""Surgery on toy decoders against NumPy; identity, determinism, and every refusal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ghostexport.errors import (
    AlreadySpliced,
    GhostExportError,
    NameCollision,
    RecipeError,
    RecoveryError,
    SurgeryError,
)
from ghostexport.operators import Operator, OperatorSet, WeightFold
from ghostexport.plan import PrunePlan
from ghostexport.surgery import inspect_graph, operate
from ghostexport.surgery.operated import RECORD
from tests.decoding import session
from tests.surgery_cases import SPANS, dense_operators
from tests.unit.surgery.toy import VOCABULARY, C, Toy, build, build_merged, compute, define_plugin, save, weights

TOLERANCE = 2e-5  # float32 graph against double-precision NumPy
DIALECTS = {
    "plain": Toy(blocks=6),
    "parallel": Toy(blocks=6, parallel=True),
    "identity-casts": Toy(blocks=6, casts=True),
    "token-major": Toy(blocks=6, rank=2),
    "qdq": Toy(blocks=6, qdq="int8"),
    "qdq-fp8": Toy(blocks=6, qdq="float8_e4m3fn"),
    "no-cache": Toy(blocks=6, cache=False),
    "embeds": Toy(blocks=6, embeds=True),
    "skip-norm": Toy(blocks=6, skip=True),
    "skip-norm-epsilon": Toy(blocks=6, skip=True, epsilon=2e-4),
    "two-masks": Toy(blocks=6, masks=True),
    "positions-from-1": Toy(blocks=6, positions=True, first=1),
}


def run(path: Path, toy: Toy, plan: PrunePlan, past_length: int = 3, seed: int = 5) -> tuple[NDArray[Any], Any, Any]:
    """Logits of ONNX Runtime, and the embeddings and caches it was fed."""
    generator = np.random.default_rng(seed)
    lead = (4,) if toy.rank == 2 else (2, 4)
    w = weights(toy)
    ids = generator.integers(0, VOCABULARY, lead)
    x = generator.normal(size=(*lead, C)).astype(np.float32) if toy.embeds else w["embed"][ids]
    feeds: dict[str, Any] = {"inputs_embeds": x, "input_ids": ids}
    feeds["position_ids"] = np.broadcast_to(np.arange(lead[-1]), lead)
    if toy.positions:
        x = x + w["positions"][feeds["position_ids"]]
    past = {}
    for k in range(toy.blocks):
        length = past_length + 2 * (toy.masks and k % 2)
        past[k] = generator.normal(size=(2, *lead[:-1], length, C)).astype(np.float32)
        new = plan.new_index(k)
        if new is not None:
            feeds[toy.kv[0].format(new + toy.first)], feeds[toy.kv[1].format(new + toy.first)] = past[k]
    model = session(path)
    names = {i.name for i in model.get_inputs()}
    assert not {n for n in names if "past" in n} - feeds.keys(), "KV inputs are numbered densely"
    return model.run(["logits"], {k: v for k, v in feeds.items() if k in names})[0], x, past


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_computes_what_numpy_does(dialect: str, spans: str, tmp_path: Path) -> None:
    toy = DIALECTS[dialect]
    plan = PrunePlan.from_spans(6, SPANS[spans])
    source = save(toy, tmp_path / "dense.onnx")
    for operators in (None, dense_operators(plan, C), dense_operators(plan, C, bias=False)):
        report = operate(source, plan, operators, tmp_path / "out.onnx")
        onnx.checker.check_model(tmp_path / "out.onnx")
        got, x, past = run(tmp_path / "out.onnx", toy, plan)
        expected = compute(toy, plan, operators, x, past)
        assert np.abs(got - expected).max() < TOLERANCE * np.abs(expected).max()
        assert report.blocks_after == len(plan.kept)
        assert len(report.kv_inputs_removed) == (2 * plan.num_removed if toy.cache else 0)


@pytest.mark.parametrize("spans", SPANS)
def test_blocks_that_are_functions(spans: str, tmp_path: Path) -> None:
    toy, plan = Toy(blocks=6, function=True), PrunePlan.from_spans(6, SPANS[spans])
    operators = dense_operators(plan, C)
    operate(save(toy, tmp_path / "dense.onnx"), plan, operators, tmp_path / "out.onnx")
    got, x, past = run(tmp_path / "out.onnx", toy, plan)
    expected = compute(toy, plan, operators, x, past)
    assert np.abs(got - expected).max() < TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("spans", SPANS)
def test_attention_plugins_with_a_packed_cache(spans: str, tmp_path: Path) -> None:
    """As TensorRT Edge-LLM writes it: embedding outside, ``trt`` domain, one packed cache per block."""
    toy, plan = Toy(blocks=6, plugin=True, embeds=True, cache=False), PrunePlan.from_spans(6, SPANS[spans])
    operators = dense_operators(plan, C)
    source = save(toy, tmp_path / "dense.onnx")
    assert inspect_graph(source).producer == "edge-llm"
    operate(source, plan, operators, tmp_path / "out.onnx")
    model = ir.load(tmp_path / "out.onnx")
    define_plugin(model)
    ir.save(model, tmp_path / "run.onnx")
    generator = np.random.default_rng(0)
    x = generator.normal(size=(2, 4, C)).astype(np.float32)
    past = generator.normal(size=(6, 2, 2, 3, C)).astype(np.float32)
    feeds = {"inputs_embeds": x} | {f"past_key_values_{new}": past[k] for new, k in enumerate(plan.kept)}
    outputs = session(tmp_path / "run.onnx").run(None, feeds)
    assert len(outputs) == 1 + len(plan.kept)
    expected = compute(replace(toy, cache=True), plan, operators, x, dict(enumerate(past)))
    assert np.abs(outputs[0] - expected).max() < TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("spans", SPANS)
def test_merged_decoders_are_cut_in_both_branches(spans: str, tmp_path: Path) -> None:
    toy, plan = Toy(blocks=6), PrunePlan.from_spans(6, SPANS[spans])
    operators = dense_operators(plan, C)
    ir.save(build_merged(toy), tmp_path / "dense.onnx", external_data="dense.onnx.data", size_threshold_bytes=64)
    report = operate(tmp_path / "dense.onnx", plan, operators, tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx.data").stat().st_size < 1.3 * len(plan.removed) * 4 * (C * C + C)
    assert len(report.kv_outputs_removed) == 2 * plan.num_removed
    model = session(tmp_path / "out.onnx")
    generator = np.random.default_rng(0)
    ids = generator.integers(0, VOCABULARY, (2, 4))
    for length in (0, 3):
        past = {k: generator.normal(size=(2, 2, length, C)).astype(np.float32) for k in range(6)}
        feeds: dict[str, Any] = {"input_ids": ids, "use_cache_branch": np.array([length > 0])}
        for new, k in enumerate(plan.kept):
            feeds[toy.kv[0].format(new)], feeds[toy.kv[1].format(new)] = past[k]
        outputs = model.run(None, feeds)
        assert len(outputs) == 1 + 2 * len(plan.kept)
        expected = compute(toy, plan, operators, weights(toy)["embed"][ids], past)
        assert np.abs(outputs[0] - expected).max() < TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("form", ["factors", "diagonal", "bias"])
def test_other_forms_of_operators(form: str, skip: bool, tmp_path: Path) -> None:
    toy, plan = Toy(blocks=6, skip=skip), PrunePlan.from_spans(6, [(2, 4)])
    generator = np.random.default_rng(0)
    values: dict[str, Any] = {
        "factors": (generator.normal(size=(C, 3)), generator.normal(size=(3, C))),
        "diagonal": generator.normal(size=C),
        "bias": generator.normal(size=C),
    }
    operators = OperatorSet("x", (Operator(plan.boundaries[0], "x", **{form: values[form]}),), plan)
    report = operate(save(toy, tmp_path / "dense.onnx"), plan, operators, tmp_path / "out.onnx")
    got, x, past = run(tmp_path / "out.onnx", toy, plan)
    expected = compute(toy, plan, operators, x, past)
    assert np.abs(got - expected).max() < TOLERANCE * np.abs(expected).max()
    names = {
        "factors": ("ghost.0.matmul_u", "ghost.0.matmul_v", "ghost.0.add"),
        "diagonal": ("ghost.0.mul", "ghost.0.add"),
        "bias": ("ghost.0.add",),
    }
    assert skip or report.boundaries[0].nodes_added == names[form]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_operator_of_another_dtype_is_an_island_between_casts(dtype: str, tmp_path: Path) -> None:
    toy, plan = Toy(blocks=6), PrunePlan.from_spans(6, [(2, 4)])
    operators = dense_operators(plan, C)
    report = operate(save(toy, tmp_path / "dense.onnx"), plan, operators, tmp_path / "out.onnx", operator_dtype=dtype)
    assert report.boundaries[0].nodes_added == (
        "ghost.0.cast_in",
        "ghost.0.matmul",
        "ghost.0.add_bias",
        "ghost.0.cast_out",
        "ghost.0.add",
    )
    model = ir.load(tmp_path / "out.onnx")
    assert model.graph.initializers["ghost.0.delta"].dtype == ir.DataType[dtype.upper()]
    if dtype == "float16":  # ONNX Runtime has no bfloat16 MatMul on CPU
        got, x, past = run(tmp_path / "out.onnx", toy, plan)
        expected = compute(toy, plan, operators, x, past)
        assert np.abs(got - expected).max() < 5e-3 * np.abs(expected).max()


def test_mid_site_acts_between_attention_and_mlp(tmp_path: Path) -> None:
    toy, plan = Toy(blocks=6), PrunePlan.from_spans(6, [(3, 5)])
    delta = np.random.default_rng(0).normal(size=(C, C)) / 3
    operators = OperatorSet("mid", (Operator(plan.boundaries[0], "mid", delta=delta, site="mid"),), plan)
    operate(save(toy, tmp_path / "dense.onnx"), plan, operators, tmp_path / "out.onnx")
    got, x, past = run(tmp_path / "out.onnx", toy, plan)
    w = {name: array.astype(np.float64) for name, array in weights(toy).items()}
    expected = _mid_reference(toy, plan, delta, x, past, w)
    assert np.abs(got - expected).max() < TOLERANCE * np.abs(expected).max()


def _mid_reference(toy: Toy, plan: PrunePlan, delta: Any, x: Any, past: Any, w: Any) -> NDArray[Any]:
    def rms(v: Any, g: Any) -> Any:
        return v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-6) * g

    x = x.astype(np.float64)
    for k in plan.kept:
        a = rms(x, w[f"g{k}"])
        key = np.concatenate([past[k][0], a @ w[f"k{k}"]], -2)
        value = np.concatenate([past[k][1], a @ w[f"v{k}"]], -2)
        scores = np.exp(a @ w[f"q{k}"] @ np.swapaxes(key, -1, -2))
        middle = x + scores / scores.sum(-1, keepdims=True) @ value @ w[f"o{k}"]
        mlp = 1 / (1 + np.exp(-(rms(middle, w[f"h{k}"]) @ w[f"up{k}"]))) @ w[f"down{k}"]
        x = middle + (middle @ delta if k == plan.removed[0].start - 1 else 0) + mlp
    return np.asarray(x @ w["head"])


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("role", ["attention_output", "mlp_output"])
def test_folded_weights_are_those_of_the_named_layer(role: Any, parallel: bool, tmp_path: Path) -> None:
    toy, plan = Toy(blocks=6, parallel=parallel), PrunePlan.from_spans(6, [(3, 5)])
    name = "o2" if role == "attention_output" else "down2"
    generator = np.random.default_rng(1)
    new = generator.normal(size=weights(toy)[name].shape).astype(np.float32)
    bias = generator.normal(size=C).astype(np.float32)
    operator = Operator(plan.boundaries[0], "fold", folds=(WeightFold(2, role, new, bias),))
    report = operate(
        save(toy, tmp_path / "dense.onnx"), plan, OperatorSet("fold", (operator,), plan), tmp_path / "out.onnx"
    )
    assert dict(report.boundaries[0].weights_folded) == {name: f"ghost.fold.2.{role}.weight"}
    assert name in report.initializers_dropped
    bare = Operator(plan.boundaries[0], "fold", folds=(WeightFold(2, role, new),))
    operate(tmp_path / "dense.onnx", plan, OperatorSet("fold", (bare,), plan), tmp_path / "bare.onnx")
    got, x, past = run(tmp_path / "bare.onnx", toy, plan)
    expected = compute(toy, plan, None, x, past, {name: new})
    assert np.abs(got - expected).max() < TOLERANCE * np.abs(expected).max()
    model = ir.load(tmp_path / "out.onnx")
    value = model.graph.initializers[f"ghost.fold.2.{role}.weight"].const_value
    assert value is not None and np.array_equal(value.numpy(), new)
    (reader,) = {use.node for use in model.graph.initializers[f"ghost.fold.2.{role}.weight"].uses()}
    (add,) = [use.node for use in reader.outputs[0].uses()]
    assert add.op_type == "Add" and add.inputs[1] is model.graph.initializers[f"ghost.fold.2.{role}.bias"]
    session(tmp_path / "out.onnx")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ["o2", "down2"])
def test_a_fold_into_a_gemm_replaces_its_weight_and_bias(name: str, biased: bool, tmp_path: Path) -> None:
    """The graph with the new numbers folded in is the graph that was built with them."""
    toy, plan = Toy(blocks=6, rank=2), PrunePlan.from_spans(6, [(3, 5)])
    generator = np.random.default_rng(1)
    old, new = (generator.normal(size=weights(toy)[name].shape).astype(np.float32) for _ in range(2))
    biases = [generator.normal(size=C).astype(np.float32) for _ in range(2)]

    def gemm(path: Path, weight: NDArray[Any], bias: NDArray[Any]) -> Path:
        model = build(toy)
        (node,) = [use.node for use in model.graph.initializers[name].uses()]
        values = []
        for key, array in ((f"{name}.t", weight.T.copy()), (f"{name}.bias", bias)):
            tensor = ir.Tensor(array, name=key)
            values.append(ir.Value(name=key, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor))
            model.graph.register_initializer(values[-1])
        made = ir.Node("", "Gemm", [node.inputs[0], *values], [ir.AttrInt64("transB", 1)], name="gemm")
        made.outputs[0].name = "gemm.out"
        model.graph.insert_before(node, made)
        node.outputs[0].replace_all_uses_with(made.outputs[0])
        model.graph.remove(node, safe=True)
        del model.graph.initializers[name]
        ir.save(model, path)
        return path

    role = "attention_output" if name == "o2" else "mlp_output"
    fold = WeightFold(2, role, new, biases[1] if biased else None)  # type: ignore[arg-type]
    operators = OperatorSet("fold", (Operator(plan.boundaries[0], "fold", folds=(fold,)),), plan)
    operate(gemm(tmp_path / "old.onnx", old, biases[0]), plan, operators, tmp_path / "folded.onnx")
    operate(gemm(tmp_path / "new.onnx", new, biases[int(biased)]), plan, None, tmp_path / "built.onnx")
    folded, built = (run(tmp_path / f"{kind}.onnx", toy, plan)[0] for kind in ("folded", "built"))
    np.testing.assert_array_equal(folded, built)


@pytest.mark.parametrize("contained", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_weights_pass_through_as_bytes(dtype: str, contained: bool, tmp_path: Path) -> None:
    """Every stored byte, NaN payloads and scales included, is the dense file's; no DequantizeLinear is folded away."""
    toy, plan = Toy(blocks=6, qdq=dtype), PrunePlan.from_spans(6, [(1, 2), (3, 5)])
    model = build(toy)
    odd = model.graph.initializers[f"up2.{dtype}"]
    assert odd.const_value is not None and odd.const_value.size >= C * 12
    array = np.arange(256, dtype=np.uint8)[-C * 12 :].view(odd.const_value.numpy().dtype).reshape(C, 12)
    odd.const_value = ir.Tensor(array, name=odd.name)
    ir.save(model, tmp_path / "dense.onnx", external_data="dense.onnx.data", size_threshold_bytes=64)
    operate(tmp_path / "dense.onnx", plan, dense_operators(plan, C), tmp_path / "out.onnx", self_contained=contained)
    before, after = ir.load(tmp_path / "dense.onnx"), ir.load(tmp_path / "out.onnx")
    stored = [name for name in after.graph.initializers if dtype in name or name.endswith(".scale")]
    assert len(stored) == 2 * 6 * len(plan.kept)
    for name in stored:
        old, new = (m.graph.initializers[name].const_value for m in (before, after))
        assert old is not None and new is not None
        assert (old.dtype, old.tobytes()) == (new.dtype, new.tobytes())
    assert sum(node.op_type == "DequantizeLinear" for node in after.graph) == 6 * len(plan.kept)


def test_a_fold_into_a_quantised_weight_is_rounded_in_its_form(tmp_path: Path) -> None:
    """One scale for the whole weight, as the toy's layers have it: half a step is the largest error."""
    toy, plan = Toy(blocks=6, qdq="int8"), PrunePlan.from_spans(6, [(3, 5)])
    new = np.random.default_rng(3).normal(size=(12, C)).astype(np.float32)
    folds = (WeightFold(2, "mlp_output", new),)
    operators = OperatorSet("fold", (Operator(plan.boundaries[0], "fold", folds=folds),), plan)
    operate(save(toy, tmp_path / "dense.onnx"), plan, operators, tmp_path / "out.onnx")
    stored = ir.load(tmp_path / "out.onnx").graph.initializers
    q, scale = (stored[f"ghost.fold.2.mlp_output.weight.{part}"].const_value for part in ("q", "scale"))
    assert q is not None and scale is not None and q.dtype == ir.DataType.INT8
    step = float(scale.numpy().item())
    assert np.abs(q.numpy() * step - new).max() <= step / 2 * 1.0001 and step == pytest.approx(np.abs(new).max() / 127)
    session(tmp_path / "out.onnx")


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(st.integers(0, 5), max_size=5), st.booleans(), st.booleans())
def test_equal_input_gives_equal_bytes_and_nothing_to_do_is_the_identity(
    tmp_path: Path, removed: set[int], parallel: bool, contained: bool
) -> None:
    plan = PrunePlan.from_blocks(6, removed)
    source = save(Toy(blocks=6, parallel=parallel), tmp_path / "dense.onnx")
    operators = dense_operators(plan, C)
    for name in ("a", "b"):
        operate(source, plan, operators, tmp_path / name / "out.onnx", self_contained=contained)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    if not removed:
        assert (tmp_path / "a" / "out.onnx").read_bytes() == source.read_bytes()
    for name in ("a", "b"):
        for path in (tmp_path / name).iterdir():
            path.unlink()


def test_variants_share_the_dense_data_and_write_only_what_is_new(tmp_path: Path) -> None:
    source, plan = save(Toy(blocks=6), tmp_path / "dense.onnx"), PrunePlan.from_spans(6, [(2, 4)])
    before = (tmp_path / "dense.onnx.data").read_bytes()
    report = operate(source, plan, dense_operators(plan, C), tmp_path / "ghost.onnx")
    assert report.data_files == ("dense.onnx.data", "ghost.onnx.data")
    assert (tmp_path / "ghost.onnx.data").stat().st_size == 4 * (C * C + C)
    assert (tmp_path / "dense.onnx.data").read_bytes() == before
    beside = operate(source, plan, None, tmp_path / "pruned.onnx")
    assert beside.bytes_written == (tmp_path / "pruned.onnx").stat().st_size
    assert not (tmp_path / "pruned.onnx.data").exists()
    alone = operate(source, plan, None, tmp_path / "alone.onnx", self_contained=True)
    elsewhere = operate(source, plan, None, tmp_path / "out" / "alone.onnx")
    for report, data in ((alone, tmp_path / "alone.onnx.data"), (elsewhere, tmp_path / "out" / "alone.onnx.data")):
        assert report.data_files == ("alone.onnx.data",)
        assert data.stat().st_size < len(before) - 2 * 4 * 8 * C * 4
        assert report.weight_bytes_after == beside.weight_bytes_after < report.weight_bytes_before
    assert onnx.load(tmp_path / "out" / "alone.onnx").graph.node  # onnx itself takes the data file


def test_an_identity_in_another_folder_takes_the_data_file_along(tmp_path: Path) -> None:
    source = save(Toy(blocks=4), tmp_path / "dense.onnx")
    operate(source, PrunePlan(4), None, tmp_path / "out" / "same.onnx")
    assert (tmp_path / "out" / "same.onnx").read_bytes() == source.read_bytes()
    assert (tmp_path / "out" / "dense.onnx.data").read_bytes() == (tmp_path / "dense.onnx.data").read_bytes()
    assert onnx.load(tmp_path / "out" / "same.onnx").graph.node and onnx.load(source).graph.node


@pytest.mark.parametrize(
    ("flaw", "spans", "message"),
    [
        ("unet", [(0, 1)], "same two residual values|attentions lie between"),
        ("shared_kv", [(0, 1)], "attentions lie between|share|same two residual values"),
        ("per_layer_embedding", [(0, 1)], "second time"),
        ("deepstack", [(1, 2)], "visual_embeds"),
        ("tap", [(0, 2)], "hidden_states"),
    ],
)
def test_shared_state_is_refused_with_what_crosses(
    flaw: str, spans: list[tuple[int, int]], message: str, tmp_path: Path
) -> None:
    source = save(Toy(blocks=4, flaw=flaw), tmp_path / "dense.onnx")
    with pytest.raises(SurgeryError, match=message):
        operate(source, PrunePlan.from_spans(4, spans), None, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("flaw", ["deepstack", "tap"])
def test_what_is_outside_the_cut_does_not_matter(flaw: str, tmp_path: Path) -> None:
    source = save(Toy(blocks=4, flaw=flaw), tmp_path / "dense.onnx")
    assert inspect_graph(source).remarks
    operate(source, PrunePlan.from_spans(4, [(2, 3)]), None, tmp_path / "out.onnx")
    session(tmp_path / "out.onnx")


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    source, plan = save(Toy(blocks=6), tmp_path / "dense.onnx"), PrunePlan.from_spans(6, [(2, 4)])
    out = tmp_path / "out.onnx"
    operate(source, plan, dense_operators(plan, C), tmp_path / "ghost.onnx")
    model = ir.load(tmp_path / "ghost.onnx")
    del model.metadata_props[RECORD]
    ir.save(model, tmp_path / "ghost.onnx")
    cases: list[tuple[type[GhostExportError], str, Any]] = [
        (
            AlreadySpliced,
            "ghost.0",
            lambda: operate(tmp_path / "ghost.onnx", PrunePlan.from_spans(4, [(0, 1)]), None, out),
        ),
        (SurgeryError, "hidden size 9", lambda: operate(source, plan, dense_operators(plan, 9), out)),
        (SurgeryError, "plan is for 7", lambda: operate(source, PrunePlan.from_spans(7, [(2, 4)]), None, out)),
        (
            RecipeError,
            "fitted for",
            lambda: operate(source, PrunePlan.from_spans(6, [(0, 2)]), dense_operators(plan, C), out),
        ),
        (RecipeError, "dtype", lambda: operate(source, plan, None, out, operator_dtype="int8")),
        (SurgeryError, "is the source", lambda: operate(source, plan, None, source)),
        (SurgeryError, "cannot be read", lambda: operate(tmp_path / "none.onnx", plan, None, out)),
        (
            RecoveryError,
            "not finite in FLOAT16",
            lambda: operate(source, plan, _huge(plan), out, operator_dtype="float16"),
        ),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
        assert not out.exists() and not out.with_name("out.onnx.data").exists()


def _huge(plan: PrunePlan) -> OperatorSet:
    return OperatorSet("x", (Operator(plan.boundaries[0], "x", delta=np.full((C, C), 1e6)),), plan)


def test_a_taken_name_is_refused(tmp_path: Path) -> None:
    model = build(Toy(blocks=6))
    next(iter(model.graph)).outputs[0].name = "ghost.0.matmul"
    ir.save(model, tmp_path / "dense.onnx")
    plan = PrunePlan.from_spans(6, [(2, 4)])
    with pytest.raises(NameCollision, match=r"ghost\.0\.matmul"):
        operate(tmp_path / "dense.onnx", plan, dense_operators(plan, C), tmp_path / "out.onnx")


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    source, plan = save(Toy(blocks=6), tmp_path / "dense.onnx"), PrunePlan.from_spans(6, [(2, 4)])
    report = operate(source, plan, None, tmp_path / "out" / "x.onnx", dry_run=True)
    assert report.nodes_after < report.nodes_before and not (tmp_path / "out").exists()


def test_unusual_kv_names_need_a_pattern(tmp_path: Path) -> None:
    toy = Toy(blocks=4, kv=("ck_{}", "cv_{}", "nk_{}", "nv_{}"))
    source, plan = save(toy, tmp_path / "dense.onnx"), PrunePlan.from_spans(4, [(1, 2)])
    with pytest.raises(SurgeryError, match="Several outputs"):
        operate(build_without_logits_name(toy, tmp_path), plan, None, tmp_path / "out.onnx")
    operate(source, plan, None, tmp_path / "out.onnx", kv_pattern="ck_{},cv_{},nk_{},nv_{}")
    names = [value.name for value in ir.load(tmp_path / "out.onnx").graph.inputs]
    assert names == ["input_ids", "ck_0", "cv_0", "ck_1", "cv_1", "ck_2", "cv_2"]


def build_without_logits_name(toy: Toy, folder: Path) -> Path:
    model = build(toy)
    model.graph.outputs[0].name = "scores"
    ir.save(model, folder / "unnamed.onnx")
    return folder / "unnamed.onnx"
