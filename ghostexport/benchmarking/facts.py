"""What a graph says about its variant before it runs: parameters, bytes, FLOPs. Weights are not loaded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ghostexport.benchmarking.ideal import VariantFacts
from ghostexport.kv_names import parse_kv_name
from ghostexport.runtimes.interface import load_graph, read_interface

#: Nodes between an initializer and the product that uses it.
_PASSED_THROUGH = {"Transpose", "Cast", "Identity", "DequantizeLinear"}
_PRODUCTS = {"MatMul", "Gemm", "MatMulNBits", "FusedMatMul"}
_FLOATS = {1, 10, 11, 16}  # onnx.TensorProto: FLOAT, FLOAT16, DOUBLE, BFLOAT16
#: Buffers that exporters store among the initializers; they are not parameters.
_BUFFERS = ("inv_freq", "position_ids")


def read_facts(graph: Path, blocks: int, query_heads: int | None = None) -> VariantFacts:
    """Facts of one variant, from its ONNX graph.

    Args:
        graph: the variant's graph (not the runtime's optimised one).
        blocks: decoder blocks left.
        query_heads: query heads of a block, for attention's FLOPs; None leaves attention out.

    Raises:
        BuildError: the graph is not a readable decoder.
    """
    interface = read_interface(graph)
    proto = load_graph(graph).graph
    floats = {i.name: tuple(i.dims) for i in proto.initializer if i.data_type in _FLOATS}
    sizes = {name: math.prod(dims) for name, dims in floats.items() if not name.endswith(_BUFFERS) and dims}
    itemsize = {i.name: _itemsize(i.data_type) for i in proto.initializer}
    multiplied = _multiplied(proto, floats)
    looked_up = {node.input[0] for node in proto.node if node.op_type == "Gather"} & sizes.keys()
    kv = [t for t in interface.inputs if parse_kv_name(t.name)]
    numbers = sum(math.prod(d for d in t.dims if isinstance(d, int)) for t in kv)
    head_size = next((t.dims[-1] for t in kv if isinstance(t.dims[-1], int)), 0)
    return VariantFacts(
        blocks=blocks,
        parameters=sum(sizes.values()),
        weight_bytes=interface.weight_bytes,
        kv_bytes_per_token=numbers * (2 if "16" in interface.dtype else 4),
        flops_per_token=2 * sum(math.prod(floats[name]) for name in multiplied),
        attention_flops=4 * blocks * (query_heads or 0) * int(head_size),
        gathered_bytes=sum(sizes[n] * itemsize[n] for n in looked_up if n not in set(multiplied)),
        operator_parameters=sum(size for name, size in sizes.items() if name.startswith("ghost.")),
        dtype=interface.dtype,
    )


def _multiplied(graph: Any, floats: dict[str, tuple[int, ...]]) -> list[str]:
    """Names of the matrices that a product uses, once per product."""
    source = {}
    for node in graph.node:
        if node.op_type in _PASSED_THROUGH:
            source[node.output[0]] = node.input[0]
    found = []
    for node in graph.node:
        if node.op_type in _PRODUCTS:
            for name in node.input[:2]:
                while name in source:
                    name = source[name]
                if len(floats.get(name, ())) >= 2:
                    found.append(name)
    return found


def _itemsize(data_type: int) -> int:
    import onnx

    return int(onnx.helper.tensor_dtype_to_np_dtype(data_type).itemsize)
