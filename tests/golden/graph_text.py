"""A graph as text that a person can review: one line per input, output, node and weight; weights as stubs."""

from __future__ import annotations

import onnx_ir as ir

from ghostexport.surgery.refusals import scope_number


def graph_text(model: ir.Model) -> str:
    """Deterministic text of the main graph; weights show dtype and shape, never numbers (scalars excepted)."""
    graph = model.graph
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in sorted(model.opset_imports.items()))
    lines = [f"opset   {opsets}"]
    lines += [f"input   {value.name}  {_type(value)}" for value in graph.inputs]
    lines += [f"output  {value.name}  {_type(value)}" for value in graph.outputs]
    lines += sorted(f"weight  {_weight(value)}" for value in graph.initializers.values())
    lines += [_node(node) for node in graph]
    return "\n".join(lines) + "\n"


def _node(node: ir.Node) -> str:
    inputs = ", ".join(value.name or "?" if value is not None else "-" for value in node.inputs)
    outputs = ", ".join(value.name or "-" for value in node.outputs)
    attributes = ", ".join(f"{name}={_attribute(attribute)}" for name, attribute in sorted(node.attributes.items()))
    block = scope_number(node)
    scope = "" if block is None else f"  # {block}"
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    return f"node    {outputs} = {operator}({inputs}){f' {{{attributes}}}' if attributes else ''}{scope}"


def _attribute(attribute: ir.Attr) -> str:
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        return str(tensor.numpy().tolist()) if tensor.size <= 8 else _shape(tensor.dtype, tensor.shape)
    return str(attribute.value) if attribute.type != ir.AttributeType.GRAPH else "graph"


def _weight(value: ir.Value) -> str:
    tensor = value.const_value
    assert tensor is not None
    stub = f" = {tensor.numpy().tolist()}" if tensor.size <= 4 else ""
    return f"{value.name}  {_shape(tensor.dtype, tensor.shape)}{stub}"


def _type(value: ir.Value) -> str:
    return _shape(value.dtype, value.shape)


def _shape(dtype: ir.DataType | None, shape: object) -> str:
    dims = "" if shape is None else ", ".join(str(getattr(dim, "value", dim)) for dim in shape)  # type: ignore[attr-defined]
    return f"{dtype.name.lower() if dtype else '?'}[{dims}]"
