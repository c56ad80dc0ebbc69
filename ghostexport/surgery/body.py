"""The graph (or graphs) that hold a decoder, and the roles of what goes in and out. Names of roles only, no data flow.

Usually the main graph is the one body. The old "merged" decoders of optimum keep two bodies, with and without cache,
in the branches of an ``If``: the branches share the weights and must be cut alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ghostexport.errors import BoundaryAmbiguous, BoundaryNotFound
from ghostexport.kv_names import parse_kv_name

_PASS_THROUGH = frozenset({"Identity", "Cast"})


@dataclass(frozen=True)
class KVPort:
    """One KV input or output.

    Attributes:
        name: name of the graph input or output of the model.
        block: number in its name.
        template: the name with ``{}`` for the number.
        value: the value inside the body.
    """

    name: str
    block: int
    template: str
    value: ir.Value


@dataclass(frozen=True)
class Body:
    """One decoder.

    Attributes:
        graph: where its nodes are.
        logits: the value the blocks work toward.
        past, present: KV inputs and outputs in graph order.
        taps: further outputs, by name: hidden states and the like.
    """

    graph: ir.Graph
    logits: ir.Value
    past: tuple[KVPort, ...]
    present: tuple[KVPort, ...]
    taps: tuple[tuple[str, ir.Value], ...]


def find_bodies(model: ir.Model, kv_pattern: str | None = None) -> list[Body]:
    """Finds the decoder bodies of a model.

    Args:
        kv_pattern: templates of KV names with one ``{}`` each, comma separated; they replace the known ones.

    Raises:
        BoundaryNotFound: no output can be the logits.
        BoundaryAmbiguous: several outputs can be the logits.
    """
    graph = model.graph
    past = [port for value in graph.inputs if (port := _port(value.name or "", value, False, kv_pattern))]
    logits_index = _logits_index(graph, kv_pattern)
    branches = _branches(graph.outputs[logits_index])
    if not branches:
        return [_body(graph, [v.name or "" for v in graph.outputs], graph.outputs, logits_index, past, kv_pattern)]
    node = graph.outputs[logits_index].producer()
    assert node is not None
    names: list[str] = []
    positions: list[int] = []
    for value in graph.outputs:
        if value.producer() is node:
            names.append(value.name or "")
            positions.append(value.index() or 0)
    logits_position = names.index(graph.outputs[logits_index].name or "")
    return [
        _body(branch, names, [branch.outputs[p] for p in positions], logits_position, past, kv_pattern)
        for branch in branches
    ]


def _body(
    graph: ir.Graph,
    names: list[str],
    outputs: Sequence[ir.Value],
    logits_index: int,
    past: list[KVPort],
    kv_pattern: str | None,
) -> Body:
    present: list[KVPort] = []
    taps: list[tuple[str, ir.Value]] = []
    for position, (name, value) in enumerate(zip(names, outputs, strict=True)):
        port = _port(name, value, True, kv_pattern)
        if port is not None:
            present.append(port)
        elif position != logits_index:
            taps.append((name, value))
    return Body(graph, outputs[logits_index], tuple(past), tuple(present), tuple(taps))


def _port(name: str, value: ir.Value, output: bool, kv_pattern: str | None) -> KVPort | None:
    patterns: list[str | None] = [None] if kv_pattern is None else [p.strip() for p in kv_pattern.split(",")]
    for pattern in patterns:
        parsed = parse_kv_name(name, output=output, pattern=pattern)
        if parsed is not None:
            return KVPort(name, parsed.block, parsed.template, value)
    return None


def _logits_index(graph: ir.Graph, kv_pattern: str | None) -> int:
    others = [
        index for index, value in enumerate(graph.outputs) if not _port(value.name or "", value, True, kv_pattern)
    ]
    named = [index for index in others if graph.outputs[index].name == "logits"]
    candidates = named or others
    if not candidates:
        raise BoundaryNotFound(
            "The graph has no output besides KV-cache outputs.", "Export the model with its language-model head."
        )
    if len(candidates) > 1:
        names = ", ".join(str(graph.outputs[index].name) for index in candidates)
        raise BoundaryAmbiguous(f"Several outputs can be the logits: {names}.", "Name that output 'logits'.")
    return candidates[0]


def _branches(logits: ir.Value) -> list[ir.Graph]:
    node = logits.producer()
    if node is None or node.op_type != "If":
        return []
    return [attribute.as_graph() for attribute in node.attributes.values() if attribute.type == ir.AttributeType.GRAPH]
