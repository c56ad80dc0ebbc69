import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ghostexport.errors import BuildError
from ghostexport.runtimes.base import Tensor
from ghostexport.runtimes.interface import decoder_feeds, read_interface
from tests.runtime_graphs import dense_graph, variant_graph
from tests.unit.runtimes.in_place import CAPACITY, in_place_graph


def toy(
    path, mask=("s43", "s53"), kv=("b", "2", "s85", "16"), location=None, dtype=TensorProto.BFLOAT16, op="Identity"
):
    """A decoder's interface around one node and one weight."""
    value = helper.make_tensor_value_info
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4], [1, 2, 3, 4])
    if location:
        weight.ClearField("float_data")
        weight.data_location = TensorProto.EXTERNAL
        for key, entry in (("location", location), ("offset", "0"), ("length", "16")):
            weight.external_data.add(key=key, value=entry)
    graph = helper.make_graph(
        [
            helper.make_node(op, ["past_key_values.0.key"], ["present.0.key"], name="the_node"),
            helper.make_node("Identity", ["w"], ["logits"]),
        ],
        "toy",
        [
            value("input_ids", TensorProto.INT64, ["s1", "s2"]),
            value("attention_mask", TensorProto.INT64, list(mask)),
            value("past_key_values.0.key", dtype, list(kv)),
        ],
        [value("logits", TensorProto.FLOAT, [4]), value("present.0.key", dtype, list(kv))],
        [weight],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    return path


def test_dims_get_roles_and_numeric_strings_become_numbers(tmp_path):
    interface = read_interface(toy(tmp_path / "m.onnx"))
    assert interface.inputs == (
        Tensor("input_ids", "int64", ("batch", "tokens")),
        Tensor("attention_mask", "int64", ("batch", "total")),
        Tensor("past_key_values.0.key", "bfloat16", ("batch", 2, "past", 16)),
    )
    assert interface.outputs[1] == Tensor("present.0.key", "bfloat16", ("batch", 2, "total", 16))
    assert interface.kv == (("past_key_values.0.key", "present.0.key"),)
    assert (interface.dtype, interface.opset) == ("bfloat16", 20)


def test_a_cache_laid_out_tokens_first_is_recognised(tmp_path):
    interface = read_interface(toy(tmp_path / "m.onnx", kv=("b", "past", 2, 16)))
    assert interface.inputs[2].dims == ("batch", "past", 2, 16)


def test_positions_count_attended_tokens_whatever_side_is_padded():
    ids = np.arange(8).reshape(2, 4)
    mask = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])  # two tokens in the cache, four new
    feeds = decoder_feeds(ids, 2, mask)
    assert feeds["position_ids"].tolist() == [[0, 1, 2, 3], [2, 3, 3, 3]]
    assert feeds["attention_mask"].tolist() == mask.tolist() and feeds["input_ids"] is ids
    assert (feeds["write_indices"].tolist(), feeds["nonpad_kv_seqlen"].tolist()) == ([2, 2], [6, 6])
    plain = decoder_feeds(ids, 3)
    assert plain["attention_mask"].tolist() == [[1] * 7] * 2
    assert plain["position_ids"].tolist() == [[3, 4, 5, 6]] * 2
    with pytest.raises(ValueError, match=r"4 tokens after 3 need \(2, 7\)"):
        decoder_feeds(ids, 3, mask)


def test_an_exported_variant_has_linked_roles_weights_and_operators():
    dense, ghost = read_interface(dense_graph()), read_interface(variant_graph("ghost"))
    assert [t.dims for t in dense.inputs if t.name == "attention_mask"] == [("batch", "total")]
    assert len(dense.kv) == 6 and len(ghost.kv) == 4
    assert ghost.spliced == {"ghost.0.delta": (64, 64)}
    assert set(ghost.spliced_nodes) == {"ghost.0.matmul", "ghost.0.add"}
    assert {f.name for f in ghost.data_files} == {"dense.onnx.data", "ghost.onnx.data"}
    # one of three blocks is gone and an operator of 64 x 64 float32 numbers came
    assert dense.weight_bytes > ghost.weight_bytes > dense.weight_bytes / 2


def test_a_cache_updated_in_place_has_a_capacity_and_no_past(tmp_path):
    interface = read_interface(in_place_graph(tmp_path / "m.onnx"))
    assert interface.capacity == CAPACITY and read_interface(dense_graph()).capacity is None
    assert interface.inputs[2:4] == (
        Tensor("write_indices", "int64", ("batch",)),
        Tensor("past_key_values.0.key", "float32", ("batch", 1, CAPACITY, 4)),
    )
    assert interface.outputs[1].dims == ("batch", 1, CAPACITY, 4)
    with pytest.raises(BuildError, match=r"capacity is not one fixed number: \['16', '8'\]"):
        read_interface(in_place_graph(tmp_path / "m.onnx", capacity=(16, 8)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": ("b", 7)}, r"total length of input attention_mask .* baked in as 7"),
        ({"kv": ("b", 2, 7, 16)}, "past length of input past_key_values.0.key .* baked in as 7"),
        ({"kv": ("b", "heads", "past", 16)}, "no fixed heads"),
        ({"mask": ("b", "h", "s", "t")}, "dims of unknown role"),
        ({"location": "gone.data"}, "gone.data of m.onnx is missing"),
        ({"location": "../m.data"}, "points outside the model's folder"),
        ({"location": "/etc/hostname"}, "points outside the model's folder"),
    ],
)
def test_unusable_graphs_are_refused(tmp_path, changes, message):
    with pytest.raises(BuildError, match=message):
        read_interface(toy(tmp_path / "m.onnx", **changes))


def test_truncated_external_data_is_refused(tmp_path):
    (tmp_path / "m.data").write_bytes(b"123")
    with pytest.raises(BuildError, match="has 3 of at least 16 bytes"):
        read_interface(toy(tmp_path / "m.onnx", location="m.data"))


def test_missing_and_broken_files_are_refused(tmp_path):
    with pytest.raises(BuildError, match="does not exist"):
        read_interface(tmp_path / "none.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"\x08\xff not a model")
    with pytest.raises(BuildError, match="not an ONNX model"):
        read_interface(tmp_path / "bad.onnx")
