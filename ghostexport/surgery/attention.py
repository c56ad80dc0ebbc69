"""Recognises attention by structure: where tokens are mixed. No names of values or scopes."""

from __future__ import annotations

import onnx_ir as ir

from ghostexport.surgery.flow import is_weight

_PRODUCTS = frozenset({"MatMul", "Einsum", "FusedMatMul"})
# between the softmax and the product with the values: NaN guards, dtype changes, sink slices, layout changes
_PASS_THROUGH = frozenset({"Cast", "Identity", "Where", "Slice", "Reshape", "Transpose", "Dropout", "Mul", "IsNaN"})
_MAX_STEPS = 8


def is_attention(node: ir.Node) -> bool:
    """An attention operator of any domain, or a Softmax whose result is multiplied with another activation.

    A router's softmax (mixture of experts) is followed by TopK or by a product with a weight, so it does not count.
    """
    if "Attention" in node.op_type:
        return True
    return node.op_type == "Softmax" and _meets_activation_product(node)


def _meets_activation_product(softmax: ir.Node) -> bool:
    frontier = [softmax]
    for _ in range(_MAX_STEPS):
        following: list[ir.Node] = []
        for node in frontier:
            for consumer in (use.node for value in node.outputs for use in value.uses()):
                if consumer.op_type in _PRODUCTS and not any(v is not None and is_constant(v) for v in consumer.inputs):
                    return True
                if consumer.op_type in _PASS_THROUGH:
                    following.append(consumer)
        frontier = following
    return False


def is_constant(value: ir.Value) -> bool:
    """A weight, or computed from weights alone (Transpose, DequantizeLinear, Cast of an initializer)."""
    stack, seen = [value], {value}
    while stack:
        current = stack.pop()
        if is_weight(current):
            continue
        producer = current.producer()
        if producer is None or len(seen) > 64:
            return False
        for source in producer.inputs:
            if source is not None and source not in seen:
                seen.add(source)
                stack.append(source)
    return True
