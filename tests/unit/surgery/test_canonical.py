"""Canonical form: symbols are named by role, numbers in quotes become numbers, no path survives."""

from __future__ import annotations

import onnx_ir as ir

from ghostexport.exporters.graph_file import canonicalise


def _model() -> ir.Model:
    def val(name: str, dims: list[int | str]) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(ir.DataType.FLOAT))

    ids, mask = val("input_ids", ["s1", "s2"]), val("attention_mask", ["s3", "s4"])
    past = val("past_key_values.layers.0.keys", ["s1", "2", "s5", "16"])
    node = ir.Node("", "Concat", [past, past], [ir.AttrInt64("axis", 2)], name="cat")
    node.metadata_props["pkg.torch.onnx.stack_trace"] = 'File "/home/somebody/model.py", line 1'
    node.metadata_props["pkg.torch.onnx.name_scopes"] = "['model.layers.0']"
    present = node.outputs[0]
    present.name, present.type = "cache.layers.0.keys", ir.TensorType(ir.DataType.FLOAT)
    present.shape = ir.Shape(["s1", "2", "s5 + s2", "16"])
    graph = ir.Graph([ids, mask, past], [present], nodes=[node], opset_imports={"": 20}, name="main")
    return ir.Model(graph, ir_version=10)


def _dims(value: ir.Value) -> list[object]:
    assert value.shape is not None
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape]


def test_symbols_are_named_by_role_and_quoted_numbers_become_integers() -> None:
    graph = canonicalise(_model()).graph
    assert [_dims(value) for value in graph.inputs] == [
        ["batch", "tokens"],
        ["batch", "past + tokens"],
        ["batch", 2, "past", 16],
    ]
    assert _dims(graph.outputs[0]) == ["batch", 2, "past + tokens", 16]


def test_a_length_of_its_own_of_a_present_cache_is_past_plus_tokens() -> None:
    """What the exporter cannot derive it calls by a new symbol, another one for every output."""
    model = _model()
    model.graph.outputs[0].shape = ir.Shape(["s1", "2", "cat_dim_2", "16"])
    assert _dims(canonicalise(model).graph.outputs[0]) == ["batch", 2, "past + tokens", 16]


def test_paths_go_and_scopes_stay() -> None:
    model = canonicalise(_model())
    assert b"somebody" not in ir.to_proto(model).SerializeToString()
    assert next(iter(model.graph)).metadata_props == {"pkg.torch.onnx.name_scopes": "['model.layers.0']"}


def test_canonical_form_is_a_fixed_point() -> None:
    once = ir.to_proto(canonicalise(_model())).SerializeToString(deterministic=True)
    assert ir.to_proto(canonicalise(canonicalise(_model()))).SerializeToString(deterministic=True) == once
