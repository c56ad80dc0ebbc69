"""One attention block whose KV cache is updated in place with ONNX TensorScatter, and its result in NumPy."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, WIDTH, CAPACITY = 11, 4, 16
_RNG = np.random.default_rng(0)
EMBEDDING = _RNG.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
HEAD = _RNG.standard_normal((WIDTH, VOCABULARY)).astype(np.float32)


def in_place_graph(path, capacity=(CAPACITY, CAPACITY)):
    """Inputs: input_ids and position_ids [B, T], write_indices [B], key and value caches [B, 1, capacity, WIDTH]."""
    node, value = helper.make_node, helper.make_tensor_value_info
    past, present = (["%s.0.key", "%s.0.value"], [f"present.0.{kind}" for kind in ("key", "value")])
    past = [name % "past_key_values" for name in past]
    nodes = [
        node("Gather", ["embedding", "input_ids"], ["x"]),
        node("Unsqueeze", ["x", "one"], ["head"]),  # [B, 1, T, WIDTH]
        node("TensorScatter", [past[0], "head", "write_indices"], [present[0]], name="update_key"),
        node("TensorScatter", [past[1], "head", "write_indices"], [present[1]], name="update_value"),
        node("Transpose", [present[0]], ["transposed"], perm=[0, 1, 3, 2]),
        node("MatMul", ["head", "transposed"], ["scores"]),  # [B, 1, T, capacity]
        node("Unsqueeze", ["position_ids", "one_three"], ["rows"]),  # [B, 1, T, 1]
        node("LessOrEqual", ["columns", "rows"], ["visible"]),
        node("Where", ["visible", "scores", "minus"], ["masked"]),
        node("Softmax", ["masked"], ["weights"], axis=-1),
        node("MatMul", ["weights", present[1]], ["mixed"]),
        node("Squeeze", ["mixed", "one"], ["hidden"]),
        node("MatMul", ["hidden", "unembedding"], ["logits"]),
    ]
    constants = {
        "embedding": EMBEDDING,
        "unembedding": HEAD,
        "one": np.array([1]),
        "one_three": np.array([1, 3]),
        "columns": np.arange(capacity[0]),
        "minus": np.float32(-1e9),
    }
    kv = [["batch", 1, length, WIDTH] for length in capacity]
    graph = helper.make_graph(
        nodes,
        "in_place",
        [
            value("input_ids", TensorProto.INT64, ["batch", "tokens"]),
            value("position_ids", TensorProto.INT64, ["batch", "tokens"]),
            value("write_indices", TensorProto.INT64, ["batch"]),
            *(value(name, TensorProto.FLOAT, dims) for name, dims in zip(past, kv, strict=True)),
        ],
        [
            value("logits", TensorProto.FLOAT, ["batch", "tokens", VOCABULARY]),
            *(value(name, TensorProto.FLOAT, dims) for name, dims in zip(present, kv, strict=True)),
        ],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11), path)
    return path


def in_place_logits(ids):
    """Logits ``(B, T, V)`` of causal attention over token ids ``(B, T)``, without a cache."""
    x = EMBEDDING[ids]  # (B, T, WIDTH)
    scores = np.where(np.tri(ids.shape[1], dtype=bool), x @ x.transpose(0, 2, 1), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ x @ HEAD
