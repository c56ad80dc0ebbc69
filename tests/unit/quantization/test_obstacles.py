"""Foreign quantised graphs: what TensorRT fails on is read off the graph, and the real builder fails on it."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ghostexport.errors import BuildError
from ghostexport.quantization.obstacles import find_obstacle
from ghostexport.quantization.targets import Settings
from ghostexport.quantization.writer import quantize_graph
from ghostexport.runtimes import RUNTIMES


def _first(graph, op):
    return next(node for node in graph.node if node.op_type == op)


def zero_points(graph):
    node = _first(graph, "DequantizeLinear")
    scale = next(i for i in graph.initializer if i.name == node.input[1])
    count = int(np.prod(scale.dims))
    zero = helper.make_tensor("zero", TensorProto.INT4, list(scale.dims), [1] * count)
    graph.initializer.append(zero)
    node.input.append("zero")


def unsigned(graph):
    node = _first(graph, "DequantizeLinear")
    weight = next(i for i in graph.initializer if i.name == node.input[0])
    weight.data_type = TensorProto.UINT4


def other_scales(graph):
    node = _first(graph, "DequantizeLinear")
    scale = next(i for i in graph.initializer if i.name == node.input[1])
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale).astype(np.float16), scale.name))
    for value in graph.value_info:
        if value.name == node.output[0]:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16


def dynamic(graph):
    product = _first(graph, "MatMul")
    at = list(graph.node).index(product)
    rounded = helper.make_node("DynamicQuantizeLinear", [product.input[0]], ["dq.q", "dq.s", "dq.z"], "dynamic")
    wide = helper.make_node("DequantizeLinear", ["dq.q", "dq.s", "dq.z"], ["dq.x"], "dynamic.back")
    product.input[0] = "dq.x"
    graph.node.insert(at, wide)
    graph.node.insert(at, rounded)


def four_by_eight(graph):
    product = next(n for n in graph.node if n.op_type == "MatMul" and n.input[1].endswith(".dequantize.value"))
    at = list(graph.node).index(product)
    graph.initializer.append(numpy_helper.from_array(np.asarray(0.05, np.float32), "a.s"))
    graph.initializer.append(numpy_helper.from_array(np.asarray(0, np.int8), "a.z"))
    narrow = helper.make_node("QuantizeLinear", [product.input[0], "a.s", "a.z"], ["a.q"], "a.narrow")
    wide = helper.make_node("DequantizeLinear", ["a.q", "a.s", "a.z"], ["a.x"], "a.wide")
    product.input[0] = "a.x"
    graph.node.insert(at, wide)
    graph.node.insert(at, narrow)


def gemm(graph):
    """The first product as ``Gemm`` of a turned weight, on flat rows."""
    product = next(n for n in graph.node if n.op_type == "MatMul" and n.input[1].endswith(".dequantize.value"))
    table = next(i for i in graph.initializer if i.name == product.input[1].replace(".dequantize.value", ".q"))
    shapes = {"g.rows": [-1, table.dims[0]], "g.back": [1, -1, table.dims[1]]}
    for name, shape in shapes.items():
        graph.initializer.append(numpy_helper.from_array(np.asarray(shape, np.int64), name))
    x, weight, y = product.input[0], product.input[1], product.output[0]
    new = [
        helper.make_node("Reshape", [x, "g.rows"], ["g.x"], "g.flat"),
        helper.make_node("Transpose", [weight], ["g.w"], "g.turned", perm=[1, 0]),
        helper.make_node("Gemm", ["g.x", "g.w"], ["g.y"], "g.product", transB=1),
        helper.make_node("Reshape", ["g.y", "g.back"], [y], "g.full"),
    ]
    where = list(graph.node).index(product)
    graph.node.remove(product)
    for node in reversed(new):
        graph.node.insert(where, node)


FAULTS = {
    zero_points: "has zero points other than 0",
    unsigned: "is UINT4, a type that tensorrt-rtx does not read",
    dynamic: "is a DynamicQuantizeLinear, an operator of ONNX Runtime",
    other_scales: "the scales are FLOAT16 and the stream is FLOAT",
    four_by_eight: "multiplies eight-bit activations by four-bit weights",
}


@pytest.fixture(scope="module")
def int4(exported, tmp_path_factory):
    path = tmp_path_factory.mktemp("obstacles") / "int4.onnx"
    quantize_graph(exported("llama-tied", vocab_size=264).path, path, "int4", Settings(scales="absmax"))
    return path


def changed(int4, change, folder):
    model = onnx.load(int4)
    change(model.graph)
    path = folder / f"{change.__name__}.onnx"
    onnx.save(model, path)
    return path


def test_our_own_graphs_have_no_obstacle(int4):
    assert all(find_obstacle(int4, runtime, "10.3") is None for runtime in RUNTIMES)


@pytest.mark.parametrize("change", FAULTS, ids=lambda change: change.__name__)
def test_what_the_real_builder_refuses_is_refused_before_it_starts(int4, change, build_rtx, tmp_path, monkeypatch):
    graph = changed(int4, change, tmp_path)
    with pytest.raises(BuildError, match=FAULTS[change]) as error:
        build_rtx(graph, "SM120")
    assert "ghostexport quantize GRAPH.onnx" in str(error.value)
    monkeypatch.setattr("ghostexport.runtimes.building.find_obstacle", lambda *_: None)
    with pytest.raises(BuildError):
        build_rtx(graph, "SM120")
    assert not list(tmp_path.glob("engine*"))


def test_blocks_that_do_not_divide_and_old_opsets(int4, tmp_path):
    def wide_blocks(graph):
        for attribute in _first(graph, "DequantizeLinear").attribute:
            attribute.i = 48 if attribute.name == "block_size" else attribute.i

    assert "blocks of 48 do not divide the" in find_obstacle(changed(int4, wide_blocks, tmp_path), "tensorrt")
    model = onnx.load(int4)
    model.opset_import[0].version = 20
    onnx.save(model, tmp_path / "old.onnx")
    assert "block_size and the graph is of opset 20" in find_obstacle(tmp_path / "old.onnx", "onnxruntime")
    assert find_obstacle(tmp_path / "old.onnx", "tensorrt-rtx") is None  # its parser takes them


@pytest.mark.parametrize("change", [other_scales, four_by_eight], ids=lambda change: change.__name__)
def test_a_product_is_one_however_it_is_written(int4, change, tmp_path):
    def rewritten(graph):
        change(graph)
        gemm(graph)

    assert FAULTS[change] in find_obstacle(changed(int4, rewritten, tmp_path), "tensorrt-rtx")


def test_blocks_run_along_axis_1_where_none_is_named(int4, tmp_path):
    def no_axis(graph):
        node = _first(graph, "DequantizeLinear")
        node.attribute.remove(next(a for a in node.attribute if a.name == "axis"))
        for attribute in node.attribute:
            attribute.i = 48 if attribute.name == "block_size" else attribute.i

    assert "blocks of 48 do not divide the" in find_obstacle(changed(int4, no_axis, tmp_path), "tensorrt")


def test_four_bit_activations_need_tensorrt_11(int4, tmp_path):
    def dynamic_fp4(graph):
        node = helper.make_node("TRT_FP4DynamicQuantize", [graph.input[0].name], ["f.q", "f.s"], "fp4", domain="trt")
        graph.node.insert(0, node)

    graph = changed(int4, dynamic_fp4, tmp_path)
    assert "TensorRT 10.9 lacks; 11 has it" in find_obstacle(graph, "tensorrt", "10.9")
    assert find_obstacle(graph, "tensorrt", "11.0") is None
