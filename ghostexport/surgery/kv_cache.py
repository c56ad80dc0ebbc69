"""KV-cache inputs and outputs after a cut: remove the pruned ones, renumber the rest, keep length sources alive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import onnx_ir as ir

from ghostexport.errors import NameCollision, UnsupportedSharing
from ghostexport.plan import PrunePlan
from ghostexport.surgery.body import KVPort
from ghostexport.surgery.flow import SHAPE_OPS
from ghostexport.surgery.layout import DecoderLayout


def is_removed(port: KVPort, layout: DecoderLayout, plan: PrunePlan) -> bool:
    return plan.new_index(layout.numbers.index(port.block)) is None


def removed_outputs(layout: DecoderLayout, plan: PrunePlan) -> list[KVPort]:
    """Present outputs of removed blocks."""
    return [port for port in layout.body.present if is_removed(port, layout, plan)]


def repoint_shapes(layout: DecoderLayout, plan: PrunePlan, live: Iterable[ir.Node]) -> dict[str, str]:
    """Moves every live ``Shape`` of something removed to the same thing of a surviving block.

    Mask and past length are read off the shape of *some* block's cache (the last one's, block 0's, ...). A cache input
    is replaced by one of the same role and shape, of a surviving block that uses the same masks and rotary tables (a
    sliding-window cache is no substitute for a full one); a residual value is replaced by the one at the cut.

    Returns:
        node name -> name of its new source.

    Raises:
        UnsupportedSharing: nothing that survives has the same role and shape.
    """
    removed = {port.value: port for port in layout.body.past if is_removed(port, layout, plan)}
    moved: dict[str, str] = {}
    groups: dict[int, frozenset[int]] | None = None
    for node in live:
        if node.op_type not in SHAPE_OPS or node.inputs[0] is None:
            continue
        source = node.inputs[0]
        replacement: ir.Value | None = None
        if source in removed:
            groups = groups or side_values(layout)
            replacement = _same_role(removed[source], layout, plan, groups)
        else:
            replacement = _same_stream(source, layout, plan)
        if replacement is not None:
            node.replace_input_with(0, replacement)
            moved[node.name or node.outputs[0].name or "?"] = replacement.name or "?"
    return moved


def side_values(layout: DecoderLayout) -> dict[int, frozenset[int]]:
    """Per block, the vertices off the residual stream that it shares with other blocks: masks, rotary tables."""
    flow = layout.flow
    kv = {flow.index(port.value) for port in layout.body.past}
    used: dict[int, set[int]] = {block: set() for block in range(layout.num_blocks)}
    for vertex in layout.stream:
        block = layout.block_of(vertex)
        if block is not None and block in used:
            used[block].update(p for p in flow.preds[vertex] if p not in layout.stream and p not in kv)
    counts: dict[int, int] = {}
    for vertices in used.values():
        for vertex in vertices:
            counts[vertex] = counts.get(vertex, 0) + 1
    return {block: frozenset(v for v in vertices if counts[v] > 1) for block, vertices in used.items()}


def _same_role(port: KVPort, layout: DecoderLayout, plan: PrunePlan, groups: dict[int, frozenset[int]]) -> ir.Value:
    block = layout.numbers.index(port.block)
    candidates = [
        (abs(other - block), other, candidate)
        for candidate in layout.body.past
        if candidate.template == port.template
        and (other := layout.numbers.index(candidate.block)) in plan.kept
        and _static(candidate.value) == _static(port.value)
    ]
    alike = [c for c in candidates if groups[c[1]] >= {v for v in groups[block] if _still_used(v, plan, groups)}]
    if not alike:
        raise UnsupportedSharing(
            f"The length of {port.name!r} (removed block {block}) is still needed, and no surviving block has a cache "
            "of the same role and shape.",
            "Keep at least one block of each attention kind (sliding-window and full).",
        )
    return min(alike, key=lambda c: c[:2])[2].value


def _still_used(vertex: int, plan: PrunePlan, groups: dict[int, frozenset[int]]) -> bool:
    return any(vertex in groups[block] for block in plan.kept)


def _same_stream(source: ir.Value, layout: DecoderLayout, plan: PrunePlan) -> ir.Value | None:
    vertex = layout.flow.index(source)
    block = None if vertex is None else layout.block_of(vertex)
    span = next((s for s in plan.removed if block is not None and block in s), None)
    if span is None:
        return None
    start = layout.points[span.start].value
    if start is None or source.shape is None or start.shape is None or list(source.shape) != list(start.shape):
        raise UnsupportedSharing(
            f"The shape of {source.name!r}, computed in removed block {block}, is still needed by surviving blocks.",
            "Choose other blocks.",
        )
    return start


def _static(value: ir.Value) -> list[int | None] | None:
    return None if value.shape is None else [dim if isinstance(dim, int) else None for dim in value.shape]


def renumber(graph: ir.Graph, layouts: Sequence[DecoderLayout], plan: PrunePlan) -> dict[str, str]:
    """Renames the surviving KV inputs and outputs to consecutive numbers, in the producer's own pattern.

    Returns:
        old name -> new name, only where it changed.

    Raises:
        NameCollision: a new name belongs to another value.
    """
    layout = layouts[0]
    base = layout.numbers[0]
    ports = {port.name: port for port in (*layout.body.past, *layout.body.present)}
    renames: dict[ir.Value, str] = {}
    for value in (*graph.inputs, *graph.outputs):
        port = ports.get(value.name or "")
        new = None if port is None else plan.new_index(layout.numbers.index(port.block))
        if port is not None and new is not None:
            renames[value] = port.template.format(base + new)
    taken = {value.name for value in _named(graph) if value not in renames}
    for value, name in renames.items():
        if name in taken:
            raise NameCollision(f"KV name {name!r}, needed for {value.name!r}, is in use.", "Rename it in the graph.")
    changed = {value.name or "": name for value, name in renames.items() if value.name != name}
    for value, name in renames.items():
        value.name = name
    return changed


def _named(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs


def prune_if_outputs(model: ir.Model, names: set[str]) -> None:
    """Drops graph outputs ``names`` from the model and from the ``If`` that makes them.

    Requires:
        the branch graphs have lost the outputs at the same positions already.
    """
    graph = model.graph
    node = next(value.producer() for value in graph.outputs if value.name in names)
    assert node is not None
    kept = [value for value in node.outputs if value.name not in names]
    attributes = list(node.attributes.values())
    condition = node.inputs[0]
    replacement = ir.Node(node.domain, node.op_type, [condition], attributes, num_outputs=len(kept), name=node.name)
    replacement.metadata_props.update(node.metadata_props)
    graph.insert_before(node, replacement)
    for old, new in zip(kept, replacement.outputs, strict=True):
        new.name, new.type, new.shape = old.name, old.type, old.shape
        for use in old.uses():
            use.node.replace_input_with(use.idx, new)
    twins = dict(zip(kept, replacement.outputs, strict=True))
    graph.outputs[:] = [twins.get(value, value) for value in graph.outputs if value.name not in names]
    graph.remove(node, safe=True)
