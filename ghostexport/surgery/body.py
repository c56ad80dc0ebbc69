"""The graph (or graphs) that hold a decoder, and the roles of what goes in and out. Names of roles only, no data flow.

Usually the main graph is the one body. The old "merged" decoders of optimum keep two bodies, with and without cache,
in the branches of an ``If``: the branches share the weights and must be cut alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ghostexport.errors import BoundaryAmbiguous, BoundaryNotFound
from ghostexport.kv_names import KVName, parse_kv_name

_PASS_THROUGH = frozenset({"Identity", "Cast"})


@dataclass(frozen=True)
class KVPort:
    """One KV input or output.

    Attributes:
        name: name of the graph input or output of the model.
        kv: its block number and role.
        value: the value inside the body.
    """

    name: str
    kv: KVName
    value: ir.Value

    @property
    def block(self) -> int:
        return self.kv.block

    @property
    def template(self) -> str:
        return self.kv.template


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


def find_bodies(model: ir.Model, kv_pattern: str | Sequence[str] | None = None) -> list[Body]:
    """Finds the decoder bodies of a model.

    Args:
        kv_pattern: templates of KV names (see :func:`parse_kv_name`), a list or comma separated; they replace the known
            ones.

    Raises:
        BoundaryNotFound: no output can be the logits.
        BoundaryAmbiguous: several outputs can be the logits.
    """
    patterns = [None] if kv_pattern is None else _split(kv_pattern)
    graph = model.graph
    past = [port for value in graph.inputs if (port := _port(value.name or "", value, False, patterns))]
    logits_index = _logits_index(graph, patterns)
    branches = _branches(graph.outputs[logits_index])
    if not branches:
        return [_body(graph, [v.name or "" for v in graph.outputs], graph.outputs, logits_index, past, patterns)]
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
        _body(branch, names, [branch.outputs[p] for p in positions], logits_position, past, patterns)
        for branch in branches
    ]


def _body(
    graph: ir.Graph,
    names: list[str],
    outputs: Sequence[ir.Value],
    logits_index: int,
    past: list[KVPort],
    patterns: Sequence[str | None],
) -> Body:
    present: list[KVPort] = []
    taps: list[tuple[str, ir.Value]] = []
    for position, (name, value) in enumerate(zip(names, outputs, strict=True)):
        port = _port(name, value, True, patterns)
        if port is not None:
            present.append(port)
        elif position != logits_index:
            taps.append((name, value))
    return Body(graph, outputs[logits_index], tuple(past), tuple(present), tuple(taps))


def _split(kv_pattern: str | Sequence[str]) -> list[str]:
    listed = [kv_pattern] if isinstance(kv_pattern, str) else kv_pattern
    return [pattern.strip() for item in listed for pattern in item.split(",")]


def _port(name: str, value: ir.Value, output: bool, patterns: Sequence[str | None]) -> KVPort | None:
    for pattern in patterns:
        parsed = parse_kv_name(name, output=output, pattern=pattern)
        if parsed is not None:
            return KVPort(name, parsed, value)
    return None


def _logits_index(graph: ir.Graph, patterns: Sequence[str | None]) -> int:
    others = [index for index, value in enumerate(graph.outputs) if not _port(value.name or "", value, True, patterns)]
    named = [index for index in others if graph.outputs[index].name == "logits"]
    candidates = named or others
    if not candidates:
        raise BoundaryNotFound(
            "The graph has no output besides KV-cache outputs.", "Export the model with its language-model head."
        )
    if len(candidates) > 1:
        names = ", ".join(str(graph.outputs[index].name) for index in candidates)
        raise BoundaryAmbiguous(
            f"Several outputs can be the logits: {names}.",
            "Name that output 'logits', or the KV outputs with --kv-pattern.",
        )
    return candidates[0]


def _branches(logits: ir.Value) -> list[ir.Graph]:
    node = logits.producer()
    if node is None or node.op_type != "If":
        return []
    return [attribute.as_graph() for attribute in node.attributes.values() if attribute.type == ir.AttributeType.GRAPH]
