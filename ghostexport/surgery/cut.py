"""Removes spans of blocks: re-route the residual stream around them, then delete what nothing needs any more.

With ``x`` the residual value that enters the span and ``y`` the one that leaves it::

    plain stream        uses of y  ->  x, or Add(x, branch) with an operator
    fused skip-norm     SkipNorm(res, mlp) that sums y  ->  SkipNorm(res_x, mlp_x), or SkipNorm(x, branch)
                        (the fused node performs the "I +" itself, and adds the operator's bias)
    embedding before a fused skip-norm, no operator: the fused node becomes the plain norm of x; likewise of Add(x, b)
                        with an operator that is a bias alone
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ghostexport.errors import SurgeryError
from ghostexport.operators import Operator
from ghostexport.surgery.flow import captures
from ghostexport.surgery.layout import DecoderLayout, ResidualPoint, bias_index, point_at
from ghostexport.surgery.splice import Splice, add_node, build_branch


@dataclass(frozen=True)
class Place:
    """A boundary in the graph at hand: its number, and the blocks ``[start, stop)`` that go (none: gone already)."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class CutResult:
    """Names of what one cut did."""

    consumers: tuple[str, ...]
    nodes_added: tuple[str, ...]
    weights: tuple[ir.Value, ...]


def cut(
    layout: DecoderLayout,
    place: Place,
    operator: Operator | None,
    stream: ir.DataType,
    dtype: ir.DataType,
) -> CutResult:
    """Routes the residual stream around one span, through the operator when there is one.

    An empty span is a cut that was made before: only the operator is spliced in.

    Args:
        stream: dtype of the residual stream.
        dtype: dtype of the operator's weights and products.

    Ensures:
        nothing outside the span reads a residual value from inside it; the span's nodes are still in the graph.
    """
    graph = layout.body.graph
    start, end = layout.points[place.start], layout.points[place.stop]
    splice: Splice | None = None
    branch: ir.Value | None = None
    added: list[ir.Node] = []
    uses = list(end.value.uses()) if end.value is not None else []  # before a node exists that must go on reading it
    active = operator is not None and operator.adds_nodes
    if start is end and not active:
        return CutResult((), (), ())
    if active and operator is not None and operator.site == "mid":
        mid = _splice_mid(layout, place, operator, stream, dtype)
        if start is end:
            return mid
        bare = _bypass(graph, place.index, start, end, uses, None)
        return CutResult((*mid.consumers, *bare.consumers), (*mid.nodes_added, *bare.nodes_added), mid.weights)
    if active and operator is not None:
        x, made = materialise(place.index, start)
        splice = build_branch(operator, x, stream, dtype, bias_apart=end.is_fused and stream == dtype)
        added = [*made, *splice.nodes]
        start, branch = ResidualPoint(start.node, x), splice.branch
        if operator.network is not None:  # the result is the new stream, not a change of it
            start, branch = ResidualPoint(start.node, branch), None
        elif end.is_fused and not splice.nodes:  # a bias [C] alone: a skip-norm adds only values of the stream's rank
            added.append(add_node(f"ghost.{place.index}.add", x, branch, x))
            start, branch = ResidualPoint(start.node, added[-1].outputs[0]), None
        _insert(graph, start, end, added)
    result = _bypass(graph, place.index, start, end, uses, branch, splice.bias if splice else None)
    names = tuple(node.name or "" for node in added)
    return CutResult(result.consumers, (*names, *result.nodes_added), tuple(splice.weights) if splice else ())


def _insert(graph: ir.Graph, start: ResidualPoint, end: ResidualPoint, nodes: list[ir.Node]) -> None:
    """Puts nodes that read the stream at ``start`` where they precede what reads ``end``."""
    if start.node is not end.node or end.is_fused:  # a fused sum at the end reads what the nodes make
        assert end.node is not None  # only h_{-1} can be a graph input
        graph.insert_before(end.node, nodes)
    elif end.node is not None:
        graph.insert_after(end.node, nodes)
    else:
        graph.insert_before(graph[0], nodes)


def materialise(b: int, point: ResidualPoint) -> tuple[ir.Value, list[ir.Node]]:
    """The residual value at ``point`` as a value of its own, and the Add nodes that make it."""
    if not point.is_fused:
        assert point.value is not None
        return point.value, []
    x, change, *bias = point.addends
    nodes = [add_node(f"ghost.{b}.stream_bias", change, value, x) for value in bias]
    nodes.append(add_node(f"ghost.{b}.stream", x, nodes[-1].outputs[0] if nodes else change, x))  # a residual sum last
    return nodes[-1].outputs[0], nodes


def _bypass(
    graph: ir.Graph,
    b: int,
    start: ResidualPoint,
    end: ResidualPoint,
    uses: Sequence[Any],
    branch: ir.Value | None,
    bias: ir.Value | None = None,
) -> CutResult:
    if not end.is_fused:
        assert end.value is not None
        x, added = materialise(b, start)
        if branch is not None:
            added.append(add_node(f"ghost.{b}.add", x, branch, end.value))
            x = added[-1].outputs[0]
        last = None if branch is None else branch.producer()
        if last is not None:
            graph.insert_after(last, added)
        else:
            _insert(graph, start, end, added)
        for use in uses:
            use.node.replace_input_with(use.idx, x)
        return CutResult(_names(use.node for use in uses), tuple(n.name or "" for n in added), ())
    node = end.node
    assert node is not None
    if branch is None and not start.is_fused:
        assert start.value is not None
        uses = [*node.outputs[0].uses(), *uses]
        plain = without_sum(graph, node, start.value)
        return CutResult(_names(use.node for use in uses), (plain.name or "",), ())
    change = (branch,) if bias is None else (branch, bias)
    set_addends(node, start.addends if branch is None else (start.value, *change))
    return CutResult((node.name or "",), (), ())


def without_sum(graph: ir.Graph, skip_norm: ir.Node, x: ir.Value) -> ir.Node:
    """Puts the plain norm of ``x`` in the place of a fused skip-norm; returns it."""
    plain = _plain_norm(skip_norm, x)
    graph.insert_before(skip_norm, plain)
    total = point_at(skip_norm).value
    _take_over(skip_norm.outputs[0], plain.outputs[0])
    if total is not None:
        total.replace_all_uses_with(x)
    return plain


def set_addends(node: ir.Node, addends: tuple[ir.Value | None, ...]) -> None:
    """Gives a skip-norm node new summands: two, and a bias where there are three."""
    bias_at = bias_index(node)
    if len(addends) > 2 and len(node.inputs) <= bias_at:
        node.resize_inputs(bias_at + 1)
    node.replace_input_with(0, addends[0])
    node.replace_input_with(1, addends[1])
    if len(node.inputs) > bias_at:
        node.replace_input_with(bias_at, addends[2] if len(addends) > 2 else None)
        if len(addends) == 2:
            node.resize_inputs(bias_at)


def _plain_norm(node: ir.Node, x: ir.Value) -> ir.Node:
    """The norm of a skip-norm node without its sum (ONNX Runtime registers both forms)."""
    simplified = node.op_type == "SkipSimplifiedLayerNormalization"
    op = "SimplifiedLayerNormalization" if simplified else "LayerNormalization"
    attributes = [ir.AttrInt64("axis", -1)]
    if "epsilon" in node.attributes:
        attributes.append(ir.AttrFloat32("epsilon", node.attributes["epsilon"].as_float()))
    weights = node.inputs[2:3] if simplified else node.inputs[2:4]
    return ir.Node("", op, [x, *weights], attributes, name=node.name)


def _take_over(old: ir.Value, new: ir.Value) -> None:
    new.type, new.shape = old.type, old.shape
    name, old.name = old.name, f"{old.name}.replaced"
    new.name = name
    old.replace_all_uses_with(new)


def _splice_mid(
    layout: DecoderLayout, place: Place, operator: Operator, stream: ir.DataType, dtype: ir.DataType
) -> CutResult:
    """Acts on the stream between attention and MLP of the last kept block before the cut.

    ``x_mid + mlp`` becomes ``(x_mid + x_mid @ M + b) + mlp``; the MLP still reads ``x_mid``.
    """
    block = place.start - 1
    if block < 0 or len(layout.sums[block]) != 2:
        reason = "no block is kept before the cut" if block < 0 else f"block {block} adds attention and MLP in one sum"
        raise SurgeryError(
            f"Operator {place.index} acts between attention and MLP, but {reason}.", "Use site 'boundary'."
        )
    middle, last = layout.sums[block]
    operand = next((i for i, v in enumerate(last.inputs[:2]) if v is not None and v.producer() is middle), None)
    if operand is None:
        raise SurgeryError(
            f"In block {block} the sum {last.name!r} does not read the stream after attention directly.",
            "Use site 'boundary'.",
        )
    x = last.inputs[operand]
    assert x is not None
    splice = build_branch(operator, x, stream, dtype)
    total = add_node(f"ghost.{place.index}.add", x, splice.branch, x)
    layout.body.graph.insert_before(last, [*splice.nodes, total])
    last.replace_input_with(operand, total.outputs[0])
    names = tuple(node.name or "" for node in (*splice.nodes, total))
    return CutResult((last.name or "",), names, tuple(splice.weights))


def live_nodes(graph: ir.Graph, outputs: Iterable[ir.Value]) -> dict[ir.Node, None]:
    """Nodes of ``graph`` that ``outputs`` need, Shape edges and captures of inner graphs included."""
    live: dict[ir.Node, None] = {}
    stack = [value.producer() for value in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in live or node.graph is not graph:
            continue
        live[node] = None
        stack.extend(value.producer() for value in node.inputs if value is not None)
        stack.extend(value.producer() for value in captures(node))
    return live


def remove_dead(graph: ir.Graph, live: dict[ir.Node, None]) -> list[ir.Node]:
    """Removes every node that is not live; returns them in graph order."""
    dead = [node for node in graph if node not in live]
    graph.remove(dead, safe=True)
    return dead


def drop_unused_initializers(graph: ir.Graph) -> list[ir.Value]:
    """Removes the initializers that nothing uses; a weight shared with a surviving block or the head stays."""
    unused = [v for v in graph.initializers.values() if not v.uses() and not v.is_graph_output()]
    for value in unused:
        del graph.initializers[value.name or ""]
    return unused


def _names(nodes: Iterable[ir.Node]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node.name or node.outputs[0].name or "" for node in nodes))
