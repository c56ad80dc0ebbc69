"""Finds the residual values between decoder blocks by data flow alone; names play no part.

Every path from the embedding to the logits passes a chain of post-dominators. In a residual decoder that chain is the
residual stream: embedding, sum after attention, sum after MLP, ..., final norm, head. The attention of block ``k``
lies between two neighbours of the chain. So, with ``c_0, c_1, ...`` the chain and ``c_a`` the first chain vertex after
the attention of block ``k``::

    h_{k-1} = c_{a-1}        (residual value that enters block k; h_{-1} = embedding)
    h_{N-1} = the last sum of two activations on the chain (before final norm and head)

Attention is anchored by what reads the KV inputs of block ``k`` or, without KV inputs, by attention operators.
Post-dominators cost O(E log V) for V nodes and E edges; the search for the entry walks the graph once per candidate,
an input or a table lookup, so with s of them the whole finder is O(s (V + E) + E log V).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from ghostexport.errors import BoundaryAmbiguous, BoundaryNotFound
from ghostexport.surgery.body import Body
from ghostexport.surgery.flow import DataFlow, is_constant, is_weight

SKIP_NORMS = frozenset({"SkipSimplifiedLayerNormalization", "SkipLayerNormalization"})
_LOOKUPS = frozenset({"Gather", "GatherBlockQuantized"})
_SUMS = frozenset({"Add", "Sum"}) | SKIP_NORMS
_PRODUCTS = frozenset({"MatMul", "Einsum", "FusedMatMul"})
# between the softmax and the product with the values: NaN guards, dtype changes, sink slices, layout changes
_PASS_THROUGH = frozenset({"Cast", "Identity", "Where", "Slice", "Reshape", "Transpose", "Dropout", "Mul", "IsNaN"})
_ATTENTION_STEPS = 8


@dataclass(frozen=True)
class ResidualPoint:
    """The residual stream at one place.

    Attributes:
        node: the chain node; None when the value is a graph input (embedding outside the graph).
        value: the residual value; None when a fused skip-norm node sums it without giving it out.
        addends: for a fused skip-norm node, the values whose sum is the residual value; else empty.
    """

    node: ir.Node | None
    value: ir.Value | None
    addends: tuple[ir.Value, ...] = ()

    @property
    def name(self) -> str:
        if self.value is not None and self.value.name:
            return self.value.name
        return " + ".join(v.name or "?" for v in self.addends)

    @property
    def is_fused(self) -> bool:
        return bool(self.addends)


@dataclass(frozen=True)
class DecoderLayout:
    """The blocks of one body.

    Attributes:
        body, flow: what was searched.
        points: ``N + 1`` residual values ``h_{-1} ... h_{N-1}``; block ``k`` leads from point ``k`` to point ``k + 1``.
        sums: per block, the chain nodes that add to the residual stream (two for sequential, one for parallel blocks).
        stream: vertices that depend on the embedding.
        entry: vertex where the data enters (input_ids, or the embeddings themselves).
        numbers: per block, its number in the names of the KV inputs; equals the block index when there are none.
    """

    body: Body
    flow: DataFlow
    points: tuple[ResidualPoint, ...]
    sums: tuple[tuple[ir.Node, ...], ...]
    stream: frozenset[int]
    entry: int
    numbers: tuple[int, ...]
    _segment: tuple[int, ...]
    _bounds: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        return len(self.points) - 1

    def block_of(self, vertex: int) -> int | None:
        """Block of a stream vertex: -1 before the first, ``num_blocks`` after the last, None off the stream."""
        if vertex not in self.stream:
            return None
        return bisect.bisect_left(self._bounds, self._segment[vertex]) - 1


def find_layout(body: Body) -> DecoderLayout:
    """Finds the decoder blocks of one body.

    Raises:
        BoundaryNotFound: nothing here looks like a residual decoder; the message has the near miss.
        BoundaryAmbiguous: two blocks lie between the same two residual values, or KV numbers contradict the depth.
    """
    flow = DataFlow(body.graph, body.logits)
    entry, stream = _entry(flow, body)
    chain = flow.chain(entry)
    segment = _segments(flow, chain)
    anchors = _kv_anchors(flow, body) or _attention_anchors(flow, stream, segment)
    if not anchors:
        raise BoundaryNotFound(
            "No attention was found between the inputs and the output: this graph is not a decoder-only LLM.",
            "Give the ONNX file of a decoder-only LLM; name its KV inputs with --kv-pattern if needed.",
        )
    numbers = _numbers(body, tuple(anchors))
    positions = [_position(flow, chain, segment, k, vertices) for k, vertices in anchors.items()]
    _require_increasing(flow, chain, numbers, positions)
    last = _last_sum(flow, chain, stream, positions[-1])
    last += _tail(flow, chain, stream, positions, last)
    bounds = tuple([a - 1 for a in positions] + [last])
    points = tuple(point_at(flow.vertices[chain[b]]) for b in bounds)
    sums = tuple(
        tuple(n for p in range(a + 1, b + 1) if (n := _sum_at(flow, chain[p], stream)) is not None)
        for a, b in itertools.pairwise(bounds)
    )
    return DecoderLayout(body, flow, points, sums, frozenset(stream), entry, numbers, tuple(segment), bounds)


def _entry(flow: DataFlow, body: Body) -> tuple[int, set[int]]:
    """The source whose chain holds the most residual sums, and everything that depends on it."""
    kv = {port.value for port in body.past}
    best: tuple[int, int, set[int]] | None = None
    for vertex, item in enumerate(flow.vertices):
        is_source = isinstance(item, ir.Value) and item not in kv
        is_lookup = isinstance(item, ir.Node) and item.op_type in _LOOKUPS and _reads_table(item)
        if not (is_source or is_lookup):
            continue
        stream = flow.descendants([vertex])
        count = sum(_sum_at(flow, v, stream) is not None for v in flow.chain(vertex))
        if best is None or count > best[0]:
            best = count, vertex, stream
    if best is None or best[0] == 0:
        raise BoundaryNotFound(
            "No residual stream leads from an input to the output: no chain of sums that every path passes.",
            "Give the ONNX file of a decoder-only LLM.",
        )
    return best[1], best[2]


def _reads_table(node: ir.Node) -> bool:
    return any(value is not None and is_weight(value) for value in node.inputs)


def _segments(flow: DataFlow, chain: list[int]) -> list[int]:
    """Per vertex, the position on the chain of its first post-dominator there."""
    segment = [-1] * len(flow.vertices)
    for position, vertex in enumerate(chain):
        segment[vertex] = position
    for vertex in range(len(segment) - 1, -1, -1):
        if segment[vertex] < 0:
            segment[vertex] = segment[flow.ipdom[vertex]]
    return segment


def _kv_anchors(flow: DataFlow, body: Body) -> dict[int, list[int]]:
    anchors: dict[int, list[int]] = {}
    for port in body.past:
        vertex = flow.index(port.value)
        if vertex is not None:
            anchors.setdefault(port.block, []).extend(flow.succs[vertex])
    numbers = sorted(anchors)
    if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise BoundaryAmbiguous(
            f"The KV inputs are numbered {numbers}: blocks without a cache of their own lie between them.",
            "Only decoders whose blocks all have a KV cache can be cut.",
        )
    return {number: anchors[number] for number in numbers}


def _numbers(body: Body, found: tuple[int, ...]) -> tuple[int, ...]:
    """Block numbers in names: those of the KV outputs where there are no KV inputs."""
    present = tuple(sorted({port.block for port in body.present}))
    return present if len(present) == len(found) else found


def _attention_anchors(flow: DataFlow, stream: set[int], segment: list[int]) -> dict[int, list[int]]:
    by_position: dict[int, list[int]] = {}
    for vertex in sorted(stream):
        item = flow.vertices[vertex]
        if isinstance(item, ir.Node) and is_attention(item):
            by_position.setdefault(segment[vertex], []).append(vertex)
    return {block: by_position[position] for block, position in enumerate(sorted(by_position))}


def _position(flow: DataFlow, chain: list[int], segment: list[int], block: int, vertices: Iterable[int]) -> int:
    positions = sorted({segment[v] for v in vertices})
    if len(positions) > 1 or positions[0] == 0:
        places = ", ".join(describe(flow.vertices[chain[p]]) for p in positions)
        raise BoundaryAmbiguous(
            f"The cache of block {block} is read in several places along the residual stream: {places}.",
            "Blocks that share a KV cache cannot be cut.",
        )
    return positions[0]


def _require_increasing(flow: DataFlow, chain: list[int], numbers: tuple[int, ...], positions: list[int]) -> None:
    for (k, a), (j, b) in itertools.pairwise(zip(numbers, positions, strict=True)):
        if a == b:
            raise BoundaryAmbiguous(
                f"Blocks {k} and {j} lie between the same two residual values, {describe(flow.vertices[chain[a - 1]])} "
                f"and {describe(flow.vertices[chain[a]])}: no single value separates them.",
                "Skip connections or shared state across blocks cannot be cut. Where the KV names count tensors, not "
                "blocks, say so: --kv-pattern 'past_{2b},past_{2b+1},...'.",
            )
        if a > b:
            raise BoundaryAmbiguous(
                f"By data flow block {k} comes after block {j}, by the names of the KV inputs before it.",
                "Name the KV inputs in depth order, or give --kv-pattern.",
            )


def _last_sum(flow: DataFlow, chain: list[int], stream: set[int], first: int) -> int:
    for position in range(len(chain) - 1, first - 1, -1):
        if _sum_at(flow, chain[position], stream) is not None:
            return position
    raise BoundaryNotFound(
        f"After {describe(flow.vertices[chain[first]])}, which follows the last attention, no residual sum was found.",
        "Only residual decoder blocks can be cut.",
    )


def _tail(flow: DataFlow, chain: list[int], stream: set[int], positions: list[int], last: int) -> int:
    """Chain vertices that end a block after its last sum (a norm after the sum, as in post-norm decoders)."""
    if len(positions) < 2:
        return 0
    end = positions[-1] - 1
    start = end
    while start > positions[-2] and _sum_at(flow, chain[start], stream) is None:
        start -= 1
    tail = [_op(flow.vertices[v]) for v in chain[start + 1 : end + 1]]
    here = [_op(flow.vertices[v]) for v in chain[last + 1 : last + 1 + len(tail)]]
    return len(tail) if tail == here else 0


def _sum_at(flow: DataFlow, vertex: int, stream: set[int]) -> ir.Node | None:
    """The node when it adds two activations of the stream (a bias or an embedding of positions does not count)."""
    node = flow.vertices[vertex]
    if not isinstance(node, ir.Node) or node.op_type not in _SUMS:
        return None
    operands = node.inputs[:2] if node.op_type in SKIP_NORMS else node.inputs
    inside = [v for v in operands if v is not None and flow.index(v) in stream and not is_constant(v)]
    return node if len(inside) >= 2 else None


def is_attention(node: ir.Node) -> bool:
    """An attention operator of any domain, or a Softmax whose result is multiplied with another activation.

    A router's softmax (mixture of experts) is followed by TopK or by a product with a weight, so it does not count.
    """
    if "Attention" in node.op_type:
        return True
    return node.op_type == "Softmax" and _meets_activation_product(node)


def _meets_activation_product(softmax: ir.Node) -> bool:
    frontier = [softmax]
    for _ in range(_ATTENTION_STEPS):
        following: list[ir.Node] = []
        for node in frontier:
            for consumer in (use.node for value in node.outputs for use in value.uses()):
                if consumer.op_type in _PRODUCTS and not any(v is not None and is_constant(v) for v in consumer.inputs):
                    return True
                if consumer.op_type in _PASS_THROUGH:
                    following.append(consumer)
        frontier = following
    return False


def bias_index(skip_norm: ir.Node) -> int:
    """Which input of a fused skip-norm is its sum's bias: input, skip, gamma, [beta of the LayerNorm form], bias."""
    return 3 if skip_norm.op_type == "SkipSimplifiedLayerNormalization" else 4


def point_at(item: ir.Node | ir.Value) -> ResidualPoint:
    """The residual value that a node makes, or that is a graph input."""
    if isinstance(item, ir.Value):
        return ResidualPoint(None, item)
    if item.op_type not in SKIP_NORMS:
        return ResidualPoint(item, item.outputs[0])
    bias_at = bias_index(item)
    addends = [item.inputs[0], item.inputs[1], *item.inputs[bias_at : bias_at + 1]]
    total = item.outputs[3] if len(item.outputs) > 3 and item.outputs[3].name else None
    return ResidualPoint(item, total, tuple(v for v in addends if v is not None))


def _op(item: ir.Node | ir.Value) -> str:
    return item.op_type if isinstance(item, ir.Node) else "input"


def describe(item: ir.Node | ir.Value) -> str:
    """A vertex for a message: its operator and the name of its value."""
    if isinstance(item, ir.Value):
        return f"input {item.name!r}"
    return f"{item.op_type} {(item.outputs[0].name or item.name)!r}"
