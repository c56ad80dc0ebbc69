"""Takes the token embedding out of a decoder graph, so that images and sound can enter as vectors beside tokens.

::

    input_ids [batch, tokens] -> embedding graph -> inputs_embeds [batch, tokens, C] -> decoder graph -> logits

What lies between the lookup and the first block (a scale, learned positions) stays in the decoder, where transformers'
models compute it behind their ``inputs_embeds``. A scale inside the embedding module (Gemma 3) belongs to it: there an
export calls the scaled value ``inputs_embeds``. Both graphs refer to the weights of the one they came from.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from ghostexport.errors import SurgeryError
from ghostexport.onnxfile import load_graph, save_graph
from ghostexport.surgery.cut import drop_unused_initializers, live_nodes, remove_dead
from ghostexport.surgery.flow import is_constant

IDS, EMBEDDINGS = "input_ids", "inputs_embeds"
_LOOKUPS = ("Gather", "GatherBlockQuantized")


def split_embedding(source: Path, decoder: Path, embedding: Path) -> None:
    """Writes a decoder that takes vectors, and the graph that makes them from token ids.

    Args:
        source: an ONNX file of a decoder, of any producer; its weights are not read. It may be cut and quantised.
        decoder: the new decoder: ``inputs_embeds [batch, tokens, C]``, in the table's dtype, in place of ``input_ids``.
        embedding: the new graph ``input_ids -> inputs_embeds``.

    Raises:
        SurgeryError: there are no token ids, or they serve more than one lookup and shapes; nothing was written.
        RunFolderError: a file cannot be written.
    """
    own = decoder.parent.resolve() != source.parent.resolve()
    rest = load_graph(source)
    ids, value = _find(rest.graph, source)
    kind, shape = _type(rest.graph, value), _shape(ids, value)
    entry = ir.Value(name=EMBEDDINGS, type=kind, shape=shape)
    value.name = f"{EMBEDDINGS}.looked_up"  # it goes with its node
    for use in list(value.uses()):
        use.node.replace_input_with(use.idx, entry)
    for node in [use.node for use in ids.uses() if use.node.op_type == "Shape"]:
        node.replace_input_with(0, entry)
        node.attributes["start"] = ir.AttrInt64("start", _axis(node, "start", 0))
        node.attributes["end"] = ir.AttrInt64("end", _axis(node, "end", 2))
    rest.graph.inputs[:] = [entry if item is ids else item for item in rest.graph.inputs]
    _drop_unused(rest.graph)
    if readers := ", ".join(f"{use.node.op_type} {use.node.name!r}" for use in ids.uses()):
        raise SurgeryError(
            f"{source}: token ids are also read by {readers}.",
            "Vectors alone do not say which tokens they are: this decoder needs the ids.",
        )
    save_graph(rest, decoder, [], self_contained=own)
    front = load_graph(source)
    ids, value = _find(front.graph, source)
    value.name, value.type, value.shape = EMBEDDINGS, kind, shape
    front.graph.inputs[:], front.graph.outputs[:] = [ids], [value]
    front.metadata_props.clear()
    _drop_unused(front.graph)
    save_graph(front, embedding, [], self_contained=own)


def _find(graph: ir.Graph, source: Path) -> tuple[ir.Value, ir.Value]:
    """The token ids and the vectors made of them."""
    ids = next((value for value in graph.inputs if value.name == IDS), None)
    if ids is None:
        raise SurgeryError(f"{source} has no input {IDS}.", "Its embedding is outside already, or it is no decoder.")
    found = lookups(ids)
    if len(found) != 1:
        raise SurgeryError(
            f"{source}: {len(found)} tables are read by token ids alone, not one.",
            "Vectors alone do not say which tokens they are: this decoder needs the ids.",
        )
    node: ir.Node | None = found[0]
    value = found[0].outputs[0]
    while node is not None and value.name != EMBEDDINGS:  # a scale and casts may stand between, nothing else
        following = list(value.uses())
        node = following[0].node if len(following) == 1 and following[0].node.op_type in ("Mul", "Cast") else None
        value = node.outputs[0] if node is not None else found[0].outputs[0]
    return ids, value


def lookups(ids: ir.Value) -> list[ir.Node]:
    """Lookups in a table of weights whose indices are made of the ids (exporters reshape them, Gemma 3 masks some)."""
    stack, seen, found = [ids], {ids}, dict[ir.Node, None]()
    while stack:
        value = stack.pop()
        for node in (use.node for use in value.uses() if use.node.op_type != "Shape"):
            table = node.inputs[0]
            if node.op_type in _LOOKUPS and node.inputs[1] is value and table is not None and is_constant(table):
                found[node] = None
            else:
                stack.extend(made for made in node.outputs if made not in seen)
                seen.update(node.outputs)
    return list(found)


def _shape(ids: ir.Value, value: ir.Value) -> ir.Shape:
    """``[batch, tokens, C]``; C is the table's where the graph has no shapes inside."""
    lookup = lookups(ids)[0]
    table = lookup.inputs[0] if lookup.op_type == "Gather" else None
    shape = value.shape or (table.shape if table is not None else None)
    return ir.Shape([*(ids.shape or ("batch", "tokens")), shape[-1] if shape else "hidden"])


def _type(graph: ir.Graph, value: ir.Value) -> ir.TensorType:
    """The value's own, or that of the cache, where the graph has no types inside."""
    kinds = [value.dtype, *(entry.dtype for entry in graph.inputs)]
    return ir.TensorType(next(kind for kind in kinds if kind is not None and kind.is_floating_point()))


def _axis(node: ir.Node, name: str, default: int) -> int:
    """An end of a ``Shape`` of ``[batch, tokens]``, counted from the front."""
    given = node.attributes.get_int(name, default)
    return max(0, min(2, given + 2 if given < 0 else given))


def _drop_unused(graph: ir.Graph) -> None:
    remove_dead(graph, live_nodes(graph, graph.outputs))
    drop_unused_initializers(graph)
