"""Quantised graphs of other producers: what a runtime's parser or builder would fail on, read off the graph at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from ghostexport.onnxfile import load_graph, values

#: Operators of onnxruntime.quantization that TensorRT has no importer for.
_ORT_ONLY = ("DynamicQuantizeLinear", "MatMulInteger", "QLinearMatMul", "QGemm", "DynamicQuantizeMatMul", "MatMulNBits")
_NO_TYPE = ("UINT4", "INT2", "UINT2", "FLOAT8E5M2", "FLOAT8E8M0", "FLOAT8E4M3FNUZ", "FLOAT8E5M2FNUZ")
_FOUR_BITS = (ir.DataType.INT4, ir.DataType.UINT4)
_CONVERT = "Rewrite it: ghostexport quantize GRAPH.onnx --convert -o OUT."
#: First opset whose DequantizeLinear knows blocks.
_BLOCKS_SINCE = 21


def find_obstacle(graph: Path, runtime: str, version: str = "") -> str | None:
    """Why ``runtime`` cannot build the graph's quantisation; None when nothing known stands against it.

    Args:
        graph: an ONNX file.
        runtime: ``tensorrt``, ``tensorrt-rtx`` or ``onnxruntime``.
        version: of TensorRT: dynamic NVFP4 needs 11.
    """
    model = load_graph(graph)
    nodes = list(model.graph.all_nodes())
    found = _of_blocks(model, nodes) if runtime == "onnxruntime" else _of_tensorrt(model, nodes, runtime, version)
    return next(found, None)


def _of_tensorrt(model: ir.Model, nodes: list[ir.Node], runtime: str, version: str) -> Iterator[str]:
    for node in nodes:
        if node.op_type in _ORT_ONLY:
            advice = f" {_CONVERT}" if node.op_type == "MatMulNBits" else ""
            named = f"{node.name or node.op_type} is a {node.op_type}"
            yield f"{named}, an operator of ONNX Runtime that {runtime} lacks.{advice}"
        if node.op_type == "TRT_FP4DynamicQuantize" and runtime == "tensorrt" and version.startswith("10."):
            yield f"{node.name} rounds activations to four bits, which TensorRT {version} lacks; 11 has it."
    for name, value in model.graph.initializers.items():
        if value.const_value is not None and value.const_value.dtype.name in _NO_TYPE:
            yield f"{name} is {value.const_value.dtype.name}, a type that {runtime} does not read."
    usual = model.graph.outputs[0].dtype  # of values whose type the file does not say
    for node in nodes:
        if node.op_type in ("DequantizeLinear", "QuantizeLinear"):
            yield from _of_scaling(node)
        if node.op_type in ("MatMul", "Gemm"):
            yield from _of_product(node, usual)


def _of_blocks(model: ir.Model, nodes: list[ir.Node]) -> Iterator[str]:
    opset = model.opset_imports.get("", 0)
    for node in nodes:
        if node.op_type == "DequantizeLinear" and "block_size" in node.attributes and opset < _BLOCKS_SINCE:
            blocks = f"{node.name} has a block_size and the graph is of opset {opset}"
            yield f"{blocks}; blocks came with {_BLOCKS_SINCE}. {_CONVERT}"


def _of_scaling(node: ir.Node) -> Iterator[str]:
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    if zero is not None and zero.const_value is not None and values(zero.const_value).astype(float).any():
        yield f"{node.name} has zero points other than 0; TensorRT's quantisation is symmetric."
    weight = node.inputs[0]
    block = node.attributes.get("block_size")
    if block is not None and weight is not None and weight.shape is not None:
        size = weight.shape[node.attributes["axis"].as_int() if "axis" in node.attributes else 1]
        if isinstance(size, int) and size % block.as_int():
            yield f"{node.name}: blocks of {block.as_int()} do not divide the {size} inputs of {weight.name}."


def _of_product(node: ir.Node, usual: ir.DataType | None) -> Iterator[str]:
    stream, weight = node.inputs[:2]
    producer = _maker(weight)
    if producer is None or producer.op_type != "DequantizeLinear" or stream is None:
        return
    packed, scale = producer.inputs[0], producer.inputs[1]
    kind, own = stream.dtype or usual, None if scale is None or scale.const_value is None else scale.const_value.dtype
    if own is not None and kind is not None and own != kind and own != ir.DataType.FLOAT8E4M3FN:
        yield f"{node.name}: the scales are {own} and the stream is {kind}; TensorRT wants one type."
    before = _maker(stream)
    rounded = before is not None and before.op_type == "DequantizeLinear"
    if rounded and packed is not None and packed.const_value is not None and packed.const_value.dtype in _FOUR_BITS:
        yield f"{node.name} multiplies eight-bit activations by four-bit weights, which TensorRT has no kernel for."


def _maker(value: ir.Value | None) -> ir.Node | None:
    """The node that makes a value, seen through those that only lay it out anew (a tied head turns its table)."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in ("Transpose", "Reshape", "Identity"):
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    return node
