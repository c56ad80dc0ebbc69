"""Which weights of a graph can be quantised: constant matrices that a ``MatMul`` or ``Gemm`` multiplies by.

The tied head is one of them: an embedding ``[V, C]`` that a ``Gather`` reads and that reaches the last ``MatMul``
through a ``Transpose``. Its inputs run along axis 1; one quantised table then serves both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from ghostexport.quantization.forms import SCALE_DTYPES

#: The operator's own weights, which stay in the stream's dtype (int4 there costs quality). Weights of kept blocks that
#: an operator set changed (``ghost.fold.*``, ``ghost.weight.*``) are linears like any other.
OPERATOR = re.compile(r"ghost\.\d+\.")


@dataclass(frozen=True)
class Linear:
    """One quantisable weight.

    Attributes:
        weight: the initializer.
        inputs_axis: its axis that runs over the inputs of the product (0 for ``x @ W``, 1 behind a Transpose).
        readers: nodes that read it.
        products: the ``MatMul``/``Gemm`` nodes it ends up in.
        embedding: a Gather reads it as well, or alone.
        head: it makes the logits.
    """

    weight: ir.Value
    inputs_axis: int
    readers: tuple[ir.Node, ...]
    products: tuple[ir.Node, ...]
    embedding: bool
    head: bool

    @property
    def kind(self) -> str:
        """``body``, ``head`` or ``operator``."""
        return "operator" if OPERATOR.match(self.name) else "head" if self.head else "body"

    @property
    def name(self) -> str:
        return self.weight.name or ""

    @property
    def shape(self) -> tuple[int, int]:
        """``(inputs, outputs)``."""
        assert self.weight.const_value is not None
        rows, columns = self.weight.const_value.shape.numpy()
        return (rows, columns) if self.inputs_axis == 0 else (columns, rows)


def find_linears(model: ir.Model, operators: bool = False) -> list[Linear]:
    """Every quantisable weight of the main graph, in graph order (those of operators on request)."""
    outputs = {value for value in model.graph.outputs if "logits" in (value.name or "")}
    order = {node: i for i, node in enumerate(model.graph)}
    found = [
        linear
        for value in model.graph.initializers.values()
        if (operators or not OPERATOR.match(value.name or ""))
        and (linear := _linear(value, outputs)) is not None
        and all(node in order for node in linear.readers)
    ]
    return sorted(found, key=lambda linear: order[linear.readers[0]])


def _linear(value: ir.Value, outputs: set[ir.Value]) -> Linear | None:
    tensor = value.const_value
    if tensor is None or len(tensor.shape) != 2 or tensor.dtype not in SCALE_DTYPES:
        return None
    axes, products, embedding = set(), [], False
    for node, index in value.uses():
        if node.op_type == "Gather" and index == 0 and _attribute(node, "axis", 0) == 0:
            embedding = True
            continue
        reached = list(_products_at(node, index))
        if not reached:
            return None
        axes |= {axis for _, axis in reached}
        products += [product for product, _ in reached]
    if embedding and not axes:
        axes = {1}
    if len(axes) != 1:
        return None
    head = any(output in outputs for product in products for output in _logits_of(product))
    readers = tuple(dict.fromkeys(node for node, _ in value.uses()))
    return Linear(value, axes.pop(), readers, tuple(products), embedding, head)


def products_of(weight: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """The products that a weight is multiplied in, with its axis that runs over their inputs."""
    for node, index in weight.uses():
        yield from _products_at(node, index)


def _products_at(node: ir.Node, index: int) -> Iterator[tuple[ir.Node, int]]:
    if node.op_type == "MatMul" and index == 1:
        yield node, 0
    elif node.op_type == "Gemm" and index == 1:
        yield node, _attribute(node, "transB", 0)
    elif node.op_type == "Transpose":
        for product, axis in products_of(node.outputs[0]):
            yield product, 1 - axis


def _logits_of(product: ir.Node) -> Iterator[ir.Value]:
    """Values that are the product itself, seen through element-wise ends of a head (bias, soft cap, cast)."""
    frontier = [product.outputs[0]]
    seen: set[ir.Value] = set()
    while frontier and len(seen) < 32:
        value = frontier.pop()
        if value in seen:
            continue
        seen.add(value)
        yield value
        for node, _ in value.uses():
            if node.op_type in ("Add", "Mul", "Div", "Tanh", "Cast", "Identity"):
                frontier += node.outputs


def _attribute(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else int(attribute.as_int())
