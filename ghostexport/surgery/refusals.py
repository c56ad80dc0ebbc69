"""What must not be cut: state that blocks share beyond the residual stream, and graphs that contradict themselves.

Each function raises with the values that cross, or returns nothing. All run before anything is changed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import onnx_ir as ir

from ghostexport.errors import (
    BoundaryAmbiguous,
    BoundaryNotFound,
    NameCollision,
    SurgeryError,
    UnsupportedSharing,
)
from ghostexport.operators import OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.surgery.flow import is_constant
from ghostexport.surgery.layout import DecoderLayout, describe, is_attention
from ghostexport.surgery.stream import stream_type

_OURS = re.compile(r"^ghost\.(\d+|fold|weight)\.")
_SCOPE = re.compile(r"(?:^|[./_ '])(?:layers|layer|h|blocks|block)[./_](\d+)(?=$|[./_:'])")
_SCOPE_KEYS = ("pkg.torch.onnx.name_scopes", "namespace", "pkg.onnxscript.name_scopes")
_MIN_SHARE = (
    0.25  # a block number that covers fewer of a block's nodes than this is stray (values merged by the exporter)
)


def refuse_names(model: ir.Model, names: set[str]) -> None:
    """Raises NameCollision when a name that an operator needs is taken by something that is no surgery's."""
    ours = {value for node in model.graph.all_nodes() if _OURS.match(node.name or "") for value in node.outputs}
    ours |= {value for name, value in model.graph.initializers.items() if _OURS.match(name)}
    taken = names & {value.name or "" for value in _all_values(model) if value not in ours}
    if taken:
        raise NameCollision(
            f"Names needed for the operator are in use: {', '.join(sorted(taken))}.", "Rename them in the graph."
        )


def refuse_sharing(layout: DecoderLayout) -> None:
    """Raises UnsupportedSharing when blocks are tied together: KV sharing, per-block embeddings, misplaced caches."""
    flow = layout.flow
    attention: Counter[int] = Counter()
    kv = {flow.index(port.value) for port in layout.body.past}
    for vertex in layout.stream:
        item = flow.vertices[vertex]
        owner = layout.block_of(vertex)
        if isinstance(item, ir.Node) and owner is not None:
            opaque = bool(item.domain) and not kv.isdisjoint(flow.preds[vertex])
            attention[owner] += opaque or is_attention(item)
    stateful = {layout.numbers.index(port.block) for port in layout.body.past if port.kv.is_state}
    counts = {
        block: attention[block] for block in range(layout.num_blocks) if attention[block] or block not in stateful
    }
    empty = [block for block, count in counts.items() if count == 0]
    if empty:
        raise BoundaryNotFound(
            f"No attention was found in block {empty[0]}, between {layout.points[empty[0]].name!r} and "
            f"{layout.points[empty[0] + 1].name!r}: these are no decoder blocks.",
            "Give the ONNX file of a decoder-only LLM.",
        )
    if max(counts.values(), default=0) > 1 and len(set(counts.values())) > 1:
        most = max(counts, key=lambda b: counts[b])
        raise UnsupportedSharing(
            f"{counts[most]} attentions lie between {layout.points[most].name!r} and "
            f"{layout.points[most + 1].name!r} (block {most}), elsewhere {min(counts.values())}: later blocks read "
            f"{_crossing(layout, most)} of that block.",
            "Blocks that share a KV cache, or skip over each other, cannot be cut.",
        )
    for port in layout.body.present:
        place = flow.index(port.value)
        owner = None if place is None else layout.block_of(place)
        if owner is not None and port.block in layout.numbers and owner != layout.numbers.index(port.block):
            raise UnsupportedSharing(
                f"KV output {port.name!r} is computed in block {owner}.", "Cross-block KV sharing cannot be cut."
            )
    lookup = _second_embedding(layout)
    if lookup is not None:
        raise UnsupportedSharing(
            f"The token ids enter the blocks a second time, through {describe(lookup)} (embeddings per block).",
            "Decoders with per-layer embeddings cannot be cut.",
        )


def _crossing(layout: DecoderLayout, block: int) -> str:
    """Values made before the second attention of a merged block that several attentions of it read."""
    flow = layout.flow
    inside = {v for v in layout.stream if layout.block_of(v) == block}
    attentions = [v for v in sorted(inside) if isinstance(n := flow.vertices[v], ir.Node) and is_attention(n)]
    names: list[str] = []
    for vertex in sorted(inside):
        if len(names) < 4 and flow.ipdom[vertex] not in flow.succs[vertex] and len(flow.succs[vertex]) > 1:
            reached = flow.descendants([vertex])
            if len([a for a in attentions if a in reached]) > 1 and vertex not in attentions:
                names.append(describe(flow.vertices[vertex]))
    return ", ".join(names[-4:]) or "values"


def _second_embedding(layout: DecoderLayout) -> ir.Node | None:
    """A table lookup by token ids that enters the blocks beside the residual stream."""
    flow = layout.flow
    first = layout.points[0].node
    origin = None if first is None else flow.index(first)
    if origin is None:
        return None
    before = flow.ancestors([origin])
    tokens = {v for v in before if isinstance(flow.vertices[v], ir.Value)}
    for vertex in sorted(flow.descendants(tokens) - before):
        node = flow.vertices[vertex]
        if not isinstance(node, ir.Node) or node.op_type not in ("Gather", "GatherBlockQuantized"):
            continue
        table = node.inputs[0]
        direct = any(v is not None and flow.index(v) in tokens for v in node.inputs)
        if direct and table is not None and is_constant(table) and _is_float_table(table):
            return node
    return None


def _is_float_table(value: ir.Value) -> bool:
    floating = value.dtype is None or value.dtype.is_floating_point()
    return floating and (value.shape is None or len(value.shape) >= 2)


def refuse_plan(layout: DecoderLayout, plan: PrunePlan) -> None:
    """Raises when this plan would cut something off: taps in removed blocks, side inputs added inside them."""
    if plan.num_blocks != layout.num_blocks:
        raise SurgeryError(
            f"The plan is for {plan.num_blocks} blocks; the graph has {layout.num_blocks}.",
            "Make the plan for this graph: spans are counted in its decoder blocks, from 0.",
        )
    flow = layout.flow
    for name, value in layout.body.taps:
        span = _span_of(layout, plan, value)
        if span:
            raise UnsupportedSharing(
                f"Output {name!r} reads {value.name!r} inside or at the end of the removed blocks {span}.",
                "Remove that output first, or choose other blocks.",
            )
    for vertex, source in injections(layout):
        block = layout.block_of(vertex)
        if any(block is not None and block in span for span in plan.removed):
            raise UnsupportedSharing(
                f"{describe(flow.vertices[vertex])} adds input {source!r} to the stream in removed block {block}.",
                "Blocks that receive features from outside (DeepStack) cannot be removed.",
            )


def _span_of(layout: DecoderLayout, plan: PrunePlan, value: ir.Value) -> str | None:
    producer = value.producer()
    vertices = [layout.flow.index(value)] if layout.flow.index(value) is not None else []
    if not vertices and producer is not None:  # a tap may hang off the path to the logits
        vertices = _stream_ancestors(layout, producer)
    blocks = {layout.block_of(v) for v in vertices if v is not None}
    return next((str(span) for span in plan.removed if any(b in span for b in blocks if b is not None)), None)


def _stream_ancestors(layout: DecoderLayout, node: ir.Node) -> list[int | None]:
    found: list[int | None] = []
    stack, seen = [node], {node}
    while stack:
        for value in stack.pop().inputs:
            if value is None:
                continue
            vertex, producer = layout.flow.index(value), value.producer()
            if vertex is not None:
                found.append(vertex)
            elif producer is not None and producer not in seen:
                seen.add(producer)
                stack.append(producer)
    return found


def injections(layout: DecoderLayout) -> Iterator[tuple[int, str]]:
    """Vertices inside blocks where a float graph input of the stream's width joins the stream: ``(vertex, input)``."""
    flow, kv = layout.flow, {port.value for port in layout.body.past}
    width = stream_type(layout).hidden_size
    for source, item in enumerate(flow.vertices):
        if not isinstance(item, ir.Value) or item in kv or source == layout.entry or item.dtype is None:
            continue
        if not item.dtype.is_floating_point() or _last_dim(item) != width:
            continue
        side = flow.descendants([source]) - layout.stream | {source}
        for vertex in sorted({s for v in side for s in flow.succs[v]} & layout.stream):
            block = layout.block_of(vertex)
            if block is not None and 0 <= block < layout.num_blocks:
                yield vertex, item.name or "?"


def _last_dim(value: ir.Value) -> int | None:
    if value.shape is None or len(value.shape) == 0:
        return None
    dim = value.shape[-1]
    return dim if isinstance(dim, int) else None


def cross_check_names(layout: DecoderLayout) -> None:
    """Compares the blocks found by data flow with the block numbers in node names and scopes, where there are any.

    Names lie about single values (exporters merge equal ones), so only majorities count, and only their order: a graph
    that was cut before keeps the old numbers.

    Raises:
        BoundaryAmbiguous: names and data flow disagree; both answers are shown.
    """
    votes: list[Counter[int]] = [Counter() for _ in range(layout.num_blocks)]
    for vertex in layout.stream:
        node, block = layout.flow.vertices[vertex], layout.block_of(vertex)
        if isinstance(node, ir.Node) and block is not None and 0 <= block < layout.num_blocks:
            number = scope_number(node)
            if number is not None:
                votes[block][number] += 1
    if any(not vote for vote in votes):
        return
    majority = [vote.most_common(1)[0][0] for vote in votes]
    median = sorted(vote.total() for vote in votes)[len(votes) // 2]
    strong = {number for vote in votes for number, count in vote.items() if count > _MIN_SHARE * median}
    if majority != sorted(set(majority)) or strong - set(majority):
        raise BoundaryAmbiguous(
            f"By data flow the graph has {layout.num_blocks} blocks; by the names of its nodes they are {majority}, "
            f"and {sorted(strong)} are named in all.",
            "Report this graph: one of the two answers is wrong, and a wrong cut would be silent.",
        )


def scope_number(node: ir.Node) -> int | None:
    """Block number in a node's scope metadata or name; None when it has none."""
    for text in (*(node.metadata_props.get(key, "") for key in _SCOPE_KEYS), node.name or ""):
        match = _SCOPE.search(text)
        if match:
            return int(match.group(1))
    return None


def operator_names(operators: OperatorSet | None) -> set[str]:
    """Every name that splicing these operators can create."""
    if operators is None:
        return set()
    weights = "delta factor_u factor_v diagonal bias network_w1 network_b1 network_w2 network_b2"
    nodes = "matmul matmul_u matmul_v mul add_bias add stream stream_bias cast_in cast_out"
    network = "network_matmul1 network_add1 network_relu network_matmul2 network_add2"
    parts = (*weights.split(), *nodes.split(), *network.split())
    own = {f"ghost.{o.boundary.index}.{part}" for o in operators.operators for part in parts}
    return own | {f"ghost.weight.{name}" for name in operators.weights}


def _all_values(model: ir.Model) -> Iterator[ir.Value]:
    for graph in (model.graph, *model.graph.subgraphs()):
        yield from graph.inputs
        yield from graph.initializers.values()
        for node in graph:
            yield from node.outputs
