"""Which cache belongs to which block is proven by data flow: names that lie, or that nobody knows, are not believed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from ghostexport.errors import RecipeError, SurgeryError, UnsupportedSharing
from ghostexport.kv_names import parse_kv_name
from ghostexport.plan import PrunePlan
from ghostexport.surgery import operate
from tests.unit.surgery.toy import Builder, C, Toy, build, save

PLAN = PrunePlan.from_spans(4, [(1, 2)])
KNOWN = ("past_key_values.{}.key", "past_key_values.{}.value", "present.{}.key", "present.{}.value")
UNKNOWN = ("past.{}.key", "past.{}.value", "now.{}.key", "now.{}.value")


@pytest.mark.parametrize(("inputs", "outputs"), [(UNKNOWN, KNOWN), (KNOWN, UNKNOWN), (UNKNOWN, UNKNOWN)])
def test_caches_under_names_that_nobody_knows_are_refused_and_a_pattern_is_offered(inputs, outputs, tmp_path: Path):
    toy = Toy(kv=(*inputs[:2], *outputs[2:]))
    source = save(toy, tmp_path / "dense.onnx")
    with pytest.raises(UnsupportedSharing, match="By data flow input") as error:
        operate(source, PLAN, None, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()
    assert error.value.remedy is not None
    offered = error.value.remedy.split("'")[1]
    assert "--kv-pattern" in error.value.remedy and set(offered.split(",")) == {*inputs[:2], *outputs[2:]}
    operate(source, PLAN, None, tmp_path / "out.onnx", kv_pattern=offered.split(","))
    cut = ir.load(tmp_path / "out.onnx").graph
    expected = [toy.kv[i].format(block) for block in range(3) for i in (0, 1)]
    assert [v.name for v in cut.inputs][1:] == expected and all(v.uses() for v in cut.inputs)


def _renamed(toy: Toy, names: dict[str, str], path: Path) -> Path:
    model = build(toy)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.name = names.get(value.name or "", value.name)
    ir.save(model, path)
    return path


def test_outputs_numbered_otherwise_than_their_inputs_are_refused(tmp_path: Path) -> None:
    swap = {f"present.{a}.{role}": f"present.{3 - a}.{role}" for a in range(4) for role in ("key", "value")}
    source = _renamed(Toy(), swap, tmp_path / "dense.onnx")
    with pytest.raises(SurgeryError):
        operate(source, PLAN, None, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_keys_and_values_exchanged_in_one_block_are_refused(tmp_path: Path) -> None:
    swap = {"present.2.key": "present.2.value", "present.2.value": "present.2.key"}
    with pytest.raises(UnsupportedSharing, match=r"becomes 'present\.2\.value'"):
        operate(_renamed(Toy(), swap, tmp_path / "dense.onnx"), PLAN, None, tmp_path / "out.onnx")


def test_names_that_count_tensors_are_understood_with_a_stride(tmp_path: Path) -> None:
    names = {KNOWN[i].format(b): f"{'kv' if i < 2 else 'new'}_{2 * b + i % 2}" for b in range(4) for i in range(4)}
    source = _renamed(Toy(), names, tmp_path / "dense.onnx")
    with pytest.raises(SurgeryError) as error:
        operate(source, PLAN, None, tmp_path / "out.onnx", kv_pattern=["kv_{}", "new_{}"])
    assert "--kv-pattern" in (error.value.remedy or "")
    operate(source, PLAN, None, tmp_path / "out.onnx", kv_pattern=["kv_{2b}", "kv_{2b+1}", "new_{2b},new_{2b+1}"])
    cut = ir.load(tmp_path / "out.onnx").graph
    assert [v.name for v in cut.inputs][1:] == [f"kv_{i}" for i in range(6)]
    assert [v.name for v in cut.outputs][1:] == [f"new_{i}" for i in range(6)]


def test_patterns_say_where_the_number_is() -> None:
    name = parse_kv_name("c_7", pattern="c_{2b+1}")
    assert name is not None and (name.block, name.renumbered(1)) == (3, "c_3")
    assert parse_kv_name("c_6", pattern="c_{2b+1}") is None
    for pattern in ("cache", "{}_{}", "c_{0b}"):
        with pytest.raises(RecipeError, match="does not say where"):
            parse_kv_name("c_1", pattern=pattern)


def _hybrid(blocks: int) -> ir.Model:
    """Blocks that add ``state @ W`` and ``tanh(x) @ U``, with ``state' = state + tanh(x)``; no attention."""
    b, generator = Builder(), np.random.default_rng(0)
    x = b.input("inputs_embeds", ir.DataType.FLOAT, ["batch", 1, C])
    for k in range(blocks):
        past = b.input(f"past_key_values.layers.{k}.recurrent_states", ir.DataType.FLOAT, ["batch", 1, C])
        w, u = (b.weight(f"{n}{k}", generator.normal(size=(C, C)).astype(np.float32)) for n in "wu")
        state = b.op("Add", past, b.op("Tanh", x))
        b.output(state, f"cache.layers.{k}.recurrent_states", ["batch", 1, C])
        x = b.op("Add", x, b.op("MatMul", state, w))
        x = b.op("Add", x, b.op("MatMul", b.op("Tanh", x), u))
    b.output(b.op("MatMul", x, b.weight("head", np.eye(C, dtype=np.float32))), "logits", ["batch", 1, C])
    return b.model()


def test_recurrent_states_are_cut_like_caches(tmp_path: Path) -> None:
    import onnxruntime

    model = _hybrid(4)
    weight = {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}  # type: ignore[union-attr]
    ir.save(model, tmp_path / "dense.onnx")
    report = operate(tmp_path / "dense.onnx", PLAN, None, tmp_path / "out.onnx")
    assert report.kv_inputs_removed == ("past_key_values.layers.1.recurrent_states",)
    assert report.kv_outputs_removed == ("cache.layers.1.recurrent_states",)
    generator = np.random.default_rng(1)
    names = ["inputs_embeds", *(f"past_key_values.layers.{k}.recurrent_states" for k in range(3))]
    feeds = {name: generator.normal(size=(2, 1, C)).astype(np.float32) for name in names}
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx")
    found = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    x = feeds["inputs_embeds"]
    for new, old in enumerate((0, 2, 3)):
        state = feeds[names[1 + new]] + np.tanh(x)
        np.testing.assert_allclose(found[f"cache.layers.{new}.recurrent_states"], state, rtol=1e-4, atol=1e-5)
        x = x + state @ weight[f"w{old}"]
        x = x + np.tanh(x) @ weight[f"u{old}"]
    np.testing.assert_allclose(found["logits"], x, rtol=1e-4, atol=1e-5)
