"""Graphs quantised by others, rewritten to the form that every runtime reads: ``DequantizeLinear -> MatMul``.

``com.microsoft.MatMulNBits(x, B, s)`` holds unsigned ``B [N, K / block, block * bits / 8]``, packed from the lowest
bits on, and means ``x @ W`` with ``W[k, n] = (B[n, k] - 2^(bits - 1)) s[n, k / block]``. With no zero point, or with
that one everywhere, the shifted numbers are the signed ones of ``DequantizeLinear``, and nothing is rounded again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ghostexport.errors import SurgeryError
from ghostexport.onnxfile import initializer, load_graph, save_graph, values
from ghostexport.quantization.writer import raise_opset, register

_SIGNED = {4: ir.DataType.INT4, 8: ir.DataType.INT8}
#: Since when ``DequantizeLinear`` knows blocks; ModelOpt writes them into files that declare 20.
_OPSET = 21


def convert_graph(source: Path, output: Path) -> int:
    """Rewrites the products of ``source``, and declares the opset that its blocks need; returns how many there were.

    Weights are unpacked one at a time, when they are written.

    Raises:
        SurgeryError: a product cannot be rewritten exactly, with the reason; or there is nothing to rewrite.
    """
    model = load_graph(source)
    products = [node for node in model.graph if node.op_type == "MatMulNBits"]
    blocks = [n for n in model.graph if n.op_type == "DequantizeLinear" and "block_size" in n.attributes]
    if not products and (not blocks or (model.opset_imports[""] or 0) >= _OPSET):
        raise SurgeryError(f"{source} has nothing to convert.", "It is float, or in a form that runtimes read.")
    for node in products:
        _require_exact(node)
    raise_opset(model, _OPSET)
    new = [value for node in products for value in _rewrite(model.graph, node)]
    for name in [name for name, value in model.graph.initializers.items() if not value.uses()]:
        del model.graph.initializers[name]
    save_graph(model, output, new, self_contained=True)
    return len(products)


def _require_exact(node: ir.Node) -> None:
    where = f"{node.name or 'A MatMulNBits'}"
    bits, block, inputs = (node.attributes[key].as_int() for key in ("bits", "block_size", "K"))
    if bits not in _SIGNED:
        raise SurgeryError(f"{where} has weights of {bits} bits.", "Only four and eight have a signed ONNX type.")
    if inputs % block:
        raise SurgeryError(f"{where}: blocks of {block} do not divide its {inputs} inputs.", "Quantise it again.")
    if len(node.inputs) > 4 and node.inputs[4] is not None:
        raise SurgeryError(f"{where} reorders its inputs (g_idx).", "Quantise the float graph without act-order.")
    zero = node.inputs[3] if len(node.inputs) > 3 else None
    if zero is None:
        return
    if zero.const_value is None or not _is_middle(values(zero.const_value), bits):
        raise SurgeryError(
            f"{where} is asymmetric: its zero points are not all {1 << (bits - 1)}, and TensorRT's are 0.",
            "Quantise the float graph again: ghostexport quantize GRAPH.onnx -o OUT.",
        )


def _is_middle(stored: NDArray[Any], bits: int) -> bool:
    """Whether zero points, packed bytes or numbers, are all in the middle; the last half byte may be padding."""
    middle = 1 << (bits - 1)
    if stored.dtype != np.uint8:
        return bool((stored.astype(np.float32) == middle).all())
    if bits == 8:
        return bool((stored == middle).all())
    return bool((stored & 15 == middle).all() and np.isin(stored >> 4, (middle, 0)).all())


def _rewrite(graph: ir.Graph, node: ir.Node) -> list[ir.Value]:
    """Puts ``DequantizeLinear -> MatMul`` (``-> Add``) in the node's place; returns the new weights."""
    packed, stored = node.inputs[1], node.inputs[2]
    assert packed is not None and packed.const_value is not None
    assert stored is not None and stored.const_value is not None
    bits, block, K, N = (node.attributes[key].as_int() for key in ("bits", "block_size", "K", "N"))
    name, tensor, scales, kind = packed.name or "", packed.const_value, stored.const_value, _SIGNED[bits]

    def numbers() -> ir.TensorProtocol:
        raw = values(tensor).reshape(N, -1)
        q = raw if bits == 8 else np.stack([raw & 15, raw >> 4], axis=-1).reshape(N, -1)
        signed = (q.astype(np.int16) - (1 << (bits - 1))).astype(kind.numpy())
        return ir.tensor(np.ascontiguousarray(signed.T), dtype=kind, name=f"{name}.q")

    def scale() -> ir.TensorProtocol:
        laid = np.ascontiguousarray(values(scales).reshape(N, K // block).T)
        return ir.tensor(laid, dtype=scales.dtype, name=f"{name}.scale")

    shapes = (ir.Shape([K, N]), ir.Shape([K // block, N]))
    new = [
        initializer(ir.LazyTensor(make, dtype=dtype, shape=shape, name=f"{name}.{part}"))
        for make, dtype, shape, part in zip((numbers, scale), (kind, scales.dtype), shapes, ("q", "scale"), strict=True)
    ]
    register(graph, new)
    unpack = ir.node("DequantizeLinear", new, {"axis": 0, "block_size": block}, name=f"{name}.dequantize")
    weight, old = unpack.outputs[0], node.outputs[0]
    weight.name, weight.shape, weight.type = f"{name}.dequantize.value", shapes[0], ir.TensorType(scales.dtype)
    nodes = [unpack, ir.node("MatMul", [node.inputs[0], weight], name=node.name)]
    bias = node.inputs[5] if len(node.inputs) > 5 else None
    if bias is not None:
        nodes[1].outputs[0].name = f"{name}.product"
        nodes.append(ir.node("Add", [nodes[1].outputs[0], bias], name=f"{name}.bias"))
    result, label = nodes[-1].outputs[0], old.name
    result.shape, result.type = old.shape, old.type
    graph.insert_before(node, nodes)
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    result.name = label
    return new
