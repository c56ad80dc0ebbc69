import onnx
import pytest
from onnx import TensorProto, helper

from ghostexport.benchmarking.ideal import read_facts
from ghostexport.quantization.writer import quantize_graph


def test_facts_of_a_hand_made_graph(tmp_path):
    """Tied embedding [10, 4] (looked up, and multiplied transposed), one matrix [4, 4], one operator, KV of 2 x 3."""
    numbers = {"embedding": (10, 4), "weight": (4, 4), "ghost.0.delta": (4, 4), "norm": (4,), "rope.inv_freq": (2,)}
    initializers = [helper.make_tensor(n, TensorProto.FLOAT, d, [0.5] * _size(d)) for n, d in numbers.items()]
    nodes = [
        helper.make_node("Gather", ["embedding", "input_ids"], ["x"]),
        helper.make_node("MatMul", ["x", "weight"], ["y"]),
        helper.make_node("MatMul", ["y", "ghost.0.delta"], ["z"]),
        helper.make_node("Mul", ["z", "norm"], ["n"]),
        helper.make_node("Transpose", ["embedding"], ["head"], perm=[1, 0]),
        helper.make_node("MatMul", ["n", "head"], ["logits"]),
        helper.make_node("Identity", ["past_key_values.0.key"], ["present.0.key"]),
        helper.make_node("Identity", ["past_key_values.0.value"], ["present.0.value"]),
    ]
    kv = [2, 3]
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "tokens", 10])]
    for role in ("key", "value"):
        shape = ["batch", kv[0], "past", kv[1]]
        inputs.append(helper.make_tensor_value_info(f"past_key_values.0.{role}", TensorProto.FLOAT, shape))
        outputs.append(helper.make_tensor_value_info(f"present.0.{role}", TensorProto.FLOAT, shape))
    model = helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, initializers))
    onnx.save(model, tmp_path / "g.onnx")
    facts = read_facts(tmp_path / "g.onnx", blocks=1, query_heads=4)
    assert facts.parameters == 40 + 16 + 16 + 4  # the rotary buffer is none
    assert facts.operator_parameters == 16
    assert facts.flops_per_token == 2 * (16 + 16 + 40)
    assert facts.kv_bytes_per_token == 2 * 2 * 3 * 4  # key and value
    assert facts.attention_flops == 4 * 1 * 4 * 3
    assert facts.gathered_bytes == 0  # tied: the head reads all of it
    assert facts.dtype == "float32"


@pytest.mark.parametrize("form", ["int4", "mxfp8", "nvfp4"])
def test_a_quantised_graph_has_the_parameters_and_products_of_its_float_one(exported, form, tmp_path):
    dense = exported("llama-tied", vocab_size=264).path
    report = quantize_graph(dense, tmp_path / "q.onnx", form)
    before, after = read_facts(dense), read_facts(tmp_path / "q.onnx")
    assert (after.parameters, after.flops_per_token) == (before.parameters, before.flops_per_token)
    saved = report.weight_bytes_before - report.weight_bytes_after
    assert before.weight_bytes - after.weight_bytes == saved > 0


def _size(dims):
    return dims[0] if len(dims) == 1 else dims[0] * dims[1]
