"""KV-cache inputs and outputs: which belong together, and what becomes of them after a cut.

Names say which values are caches and how they are numbered; that each past reaches its present inside its own block is
proven by data flow. States of recurrent and convolutional mixers are treated alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from ghostexport.errors import NameCollision, UnsupportedSharing
from ghostexport.plan import PrunePlan
from ghostexport.surgery.body import KVPort
from ghostexport.surgery.flow import SHAPE_OPS, captures
from ghostexport.surgery.layout import DecoderLayout


def require_pairs(layout: DecoderLayout) -> None:
    """Proves that every past reaches the present of its own block, before the block's result joins the stream.

    Raises:
        UnsupportedSharing: a cache input reaches no output of its block, or an output of another one; an output comes
            from an input that is not named as a cache, or is not named so itself.
    """
    body, flow = layout.body, layout.flow
    stops = {flow.vertices[v] for v in flow.chain(layout.entry)}
    captured: dict[ir.Value, list[ir.Node]] = {}
    for node in body.graph:
        for value in captures(node):
            captured.setdefault(value, []).append(node)
    present = {port.value: port for port in body.present}
    outputs = {*present, *(value for _, value in body.taps)}
    known = {port.value: port for port in body.past}
    free = [v for v in flow.vertices if isinstance(v, ir.Value) and v not in known and flow.index(v) != layout.entry]
    reached: dict[ir.Value, set[ir.Value]] = {}
    for value in (*known, *(v for v in free if v.dtype is not None and v.dtype.is_floating_point())):
        made = _reached(value, stops, captured, body.graph)
        blocks = {layout.block_of(vertex) for v in made if (vertex := flow.index(v)) is not None} - {None}
        if value in known or len(blocks) == 1:  # what several blocks read is no cache: rotary tables, masks
            reached[value] = made & outputs
    for value, found in reached.items():
        port, own = known.get(value), {present[v].block for v in found if v in present}
        unnamed = sorted(v.name or "?" for v in found if v not in present)
        if port is None and not found:
            continue
        if port is None or unnamed or (own != {port.block} and (own or any(reached[k] for k in known))):
            names = ", ".join(sorted(v.name or "?" for v in found)) or "no cache output"
            known_as = "which is not named as a cache" if port is None else f"a cache of block {port.block} by its name"
            raise UnsupportedSharing(
                f"By data flow input {value.name!r}, {known_as}, reaches {names}.", _patterns(reached, present, known)
            )
    missing = present.keys() - set().union(*reached.values())
    if any(reached[value] for value in known) and missing:
        names = ", ".join(sorted(v.name or "?" for v in missing))
        raise UnsupportedSharing(
            f"No cache input reaches the cache outputs {names}.", "Name the caches with --kv-pattern."
        )
    _require_roles({known[v]: present[next(iter(found))] for v, found in reached.items() if len(found) == 1})


def _require_roles(pairs: Mapping[KVPort, KVPort]) -> None:
    roles: dict[str, str] = {}
    for past, now in pairs.items():
        if roles.setdefault(past.template, now.template) != now.template:
            raise UnsupportedSharing(
                f"By data flow input {past.name!r} becomes {now.name!r}, in other blocks {roles[past.template]!r}.",
                "Give every block the same names, or list them with --kv-pattern.",
            )


def _reached(
    value: ir.Value, stops: set[ir.Node | ir.Value], captured: Mapping[ir.Value, list[ir.Node]], graph: ir.Graph
) -> set[ir.Value]:
    """Everything computed from ``value`` by nodes that are not on the residual stream; shapes do not count."""
    found, stack = {value}, [value]
    while stack:
        current = stack.pop()
        readers = [use.node for use in current.uses() if use.node.graph is graph] + captured.get(current, [])
        for node in readers:
            if node not in stops and node.op_type not in SHAPE_OPS:
                stack += [out for out in node.outputs if out not in found]
                found.update(node.outputs)
    return found


def _patterns(
    reached: Mapping[ir.Value, set[ir.Value]], present: Mapping[ir.Value, KVPort], known: Mapping[ir.Value, KVPort]
) -> str:
    """A remedy: the KV names of the graph as patterns, numbers replaced."""
    names = dict.fromkeys(v.name or "" for value, found in reached.items() if found for v in (value, *found))
    templates = {re.sub(r"\d+", "{}", name, count=1) for name in names} | {p.template for p in present.values()}
    templates |= {port.template for port in known.values()}
    return f"Name the caches with --kv-pattern, perhaps {','.join(sorted(templates))!r}."


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
            renames[value] = port.kv.renumbered(base + new)
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
