"""Graphs of onnxruntime's and ModelOpt's kind, rewritten: the same function, and files that others read."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

import ghostexport as gx
from ghostexport.errors import SurgeryError
from ghostexport.quantization.conversion import convert_graph
from ghostexport.quantization.obstacles import find_obstacle
from ghostexport.quantization.targets import Settings
from ghostexport.quantization.writer import quantize_graph
from tests.decoding import onnx_logits

IDS = np.random.default_rng(1).integers(0, 128, (2, 9))


@pytest.fixture(scope="module")
def dense(exported):
    return exported("llama-tied", vocab_size=264).path


def of_onnxruntime(dense, path, symmetric=True):
    how = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=symmetric, accuracy_level=0)
    quantizer = MatMulNBitsQuantizer(onnx.load(dense), algo_config=how)
    quantizer.process()
    quantizer.model.save_model_to_file(str(path))
    return path


def logits(graph):
    return onnx_logits(graph, [IDS], fused=False)[0]


def test_products_of_onnxruntime_become_the_same_products_with_signed_weights(dense, build_rtx, tmp_path):
    theirs = of_onnxruntime(dense, tmp_path / "theirs.onnx")
    products = [n for n in onnx.load(theirs).graph.node if n.op_type == "MatMulNBits"]
    assert len(products) >= 7 * 6
    assert "quantize GRAPH.onnx --convert" in find_obstacle(theirs, "tensorrt-rtx")
    gx.convert(theirs, tmp_path / "ours.onnx")
    graph = onnx.load(tmp_path / "ours.onnx").graph
    assert not [n for n in graph.node if n.op_type == "MatMulNBits"]
    packed = {i.name: i for i in graph.initializer if i.data_type == onnx.TensorProto.INT4}
    assert len(packed) == len(products) and find_obstacle(tmp_path / "ours.onnx", "tensorrt-rtx") is None
    expected, found = logits(theirs), logits(tmp_path / "ours.onnx")
    assert np.abs(expected - found).max() < 1e-5 * expected.std()
    assert np.abs(expected - logits(dense)).max() > 1e-2 * expected.std()
    onnx.checker.check_model(str(tmp_path / "ours.onnx"))
    assert build_rtx(tmp_path / "ours.onnx").plan_bytes > 0


def test_zero_points_in_the_middle_are_none_and_others_are_refused(dense, tmp_path):
    asymmetric = of_onnxruntime(dense, tmp_path / "theirs.onnx", symmetric=False)
    with pytest.raises(SurgeryError, match=r"asymmetric: its zero points are not all 8"):
        convert_graph(asymmetric, tmp_path / "ours.onnx")
    assert not (tmp_path / "ours.onnx").exists()
    model = onnx.load(asymmetric)
    zeros = {n.input[3] for n in model.graph.node if n.op_type == "MatMulNBits"}
    for initializer in model.graph.initializer:
        if initializer.name in zeros:
            shape = numpy_helper.to_array(initializer).shape
            initializer.CopyFrom(numpy_helper.from_array(np.full(shape, 0x88, np.uint8), initializer.name))
    onnx.save(model, tmp_path / "middle.onnx")
    convert_graph(tmp_path / "middle.onnx", tmp_path / "ours.onnx")
    expected = logits(tmp_path / "middle.onnx")
    assert np.abs(expected - logits(tmp_path / "ours.onnx")).max() < 1e-5 * expected.std()


def test_blocks_under_an_opset_that_has_none_get_theirs(dense, tmp_path):
    quantize_graph(dense, tmp_path / "q.onnx", "int4", Settings(scales="absmax"))
    model = onnx.load(tmp_path / "q.onnx")
    model.opset_import[0].version = 20  # as ModelOpt writes it
    onnx.save(model, tmp_path / "theirs.onnx")
    assert "--convert" in find_obstacle(tmp_path / "theirs.onnx", "onnxruntime")
    assert convert_graph(tmp_path / "theirs.onnx", tmp_path / "ours.onnx") == 0
    assert find_obstacle(tmp_path / "ours.onnx", "onnxruntime") is None
    assert np.array_equal(logits(tmp_path / "ours.onnx"), logits(tmp_path / "q.onnx"))
    with pytest.raises(SurgeryError, match="nothing to convert"):
        convert_graph(tmp_path / "ours.onnx", tmp_path / "again.onnx")
