"""What is in a graph, and whether it could be cut: for people, and for scripts as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ghostexport.errors import SurgeryError
from ghostexport.onnxfile import load_graph
from ghostexport.surgery import refusals
from ghostexport.surgery.body import find_bodies
from ghostexport.surgery.flow import captures
from ghostexport.surgery.layout import DecoderLayout
from ghostexport.surgery.operation import find_layouts
from ghostexport.surgery.stream import stream_type


@dataclass(frozen=True)
class GraphReport:
    """One graph.

    Attributes:
        path, producer, opset, ir_version, nodes: the file. ``producer`` is our name for who made it.
        dtype, hidden_size, rank: of the residual stream; None when not found.
        blocks: per block its index, KV number, residual values in and out, and number of residual sums.
        kv_inputs, kv_outputs: name templates with ``{}`` for the block number.
        shared_initializers: weights that several blocks (or a block and the head) use: name -> blocks.
        quantised: quantised weight operators, with their counts.
        blocker: why surgery would refuse this graph whatever the plan; None when it would not.
        remarks: what restricts some plans (taps, features from outside).
    """

    path: str
    producer: str
    opset: Mapping[str, int]
    ir_version: int
    nodes: int
    dtype: str | None = None
    hidden_size: int | None = None
    rank: int | None = None
    blocks: tuple[Mapping[str, Any], ...] = ()
    kv_inputs: tuple[str, ...] = ()
    kv_outputs: tuple[str, ...] = ()
    shared_initializers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    quantised: Mapping[str, int] = field(default_factory=dict)
    blocker: str | None = None
    remarks: tuple[str, ...] = ()

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON-ready data, keys in declaration order."""
        return {"num_blocks": self.num_blocks, **asdict(self)}


def inspect_graph(path: Path, kv_pattern: str | Sequence[str] | None = None) -> GraphReport:
    """Reads a graph and finds its blocks; a graph that cannot be cut is reported, not raised.

    Raises:
        SurgeryError: the file itself is unreadable, malformed or hostile.
    """
    model = load_graph(path)
    base: dict[str, Any] = {
        "path": str(path),
        "producer": producer(model),
        "opset": dict(sorted(model.opset_imports.items())),
        "ir_version": int(model.ir_version),
        "nodes": sum(1 for _ in model.graph.all_nodes()),
        "quantised": _quantised(model),
    }
    try:
        layouts = find_layouts(model, kv_pattern)
        refusals.refuse_spliced(model, set())
        layout = layouts[-1]
        stream = stream_type(layout)
    except SurgeryError as error:
        return GraphReport(**base, blocker=error.message)
    return GraphReport(
        **base,
        dtype=stream.dtype.name.lower(),
        hidden_size=stream.hidden_size,
        rank=stream.rank,
        blocks=tuple(_block(layout, k) for k in range(layout.num_blocks)),
        kv_inputs=tuple(dict.fromkeys(port.template for port in layout.body.past)),
        kv_outputs=tuple(dict.fromkeys(port.template for port in layout.body.present)),
        shared_initializers=_shared(layout),
        remarks=tuple(_remarks(layout)),
    )


def producer(model: ir.Model) -> str:
    """Who made the graph: ``transformers``, ``optimum``, ``genai``, ``edge-llm``, ``torch`` or what the file says."""
    domains = {node.domain for node in model.graph.all_nodes()}
    names = [value.name or "" for value in model.graph.inputs]
    if domains & {"trt", "trt_edgellm"}:
        return "edge-llm"
    if model.producer_name == "onnxruntime-genai":
        return "genai"
    if any(name.startswith(("past_key_values.layers.", "input.cache.layers.")) for name in names):
        return "transformers"
    if model.producer_name == "pytorch":
        return "optimum" if any((node.name or "").startswith("/") for node in model.graph) else "torch"
    return model.producer_name or "unknown"


def _block(layout: DecoderLayout, k: int) -> dict[str, Any]:
    return {
        "block": k,
        "kv_number": layout.numbers[k],
        "stream_in": layout.points[k].name,
        "stream_out": layout.points[k + 1].name,
        "sums": len(layout.sums[k]),
    }


def _shared(layout: DecoderLayout) -> dict[str, tuple[int, ...]]:
    users: dict[ir.Value, set[int]] = {}
    for vertex in layout.stream:
        node, block = layout.flow.vertices[vertex], layout.block_of(vertex)
        if isinstance(node, ir.Node) and block is not None:
            for value in (*node.inputs, *captures(node)):
                if value is not None and value.is_initializer():
                    users.setdefault(value, set()).add(block)
    shared = {v.name or "": tuple(sorted(blocks)) for v, blocks in users.items() if len(blocks) > 1 and _is_large(v)}
    return dict(sorted(shared.items()))


def _is_large(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.size > 1


def _quantised(model: ir.Model) -> dict[str, int]:
    ops = ("MatMulNBits", "GatherBlockQuantized", "DequantizeLinear", "QLinearMatMul", "MatMulInteger")
    counts = {op: sum(node.op_type == op for node in model.graph.all_nodes()) for op in ops}
    return {op: count for op, count in counts.items() if count}


def _remarks(layout: DecoderLayout) -> list[str]:
    remarks = [
        f"output {name!r} is no KV output: blocks before it cannot all be removed" for name, _ in layout.body.taps
    ]
    remarks += [
        f"input {source!r} is added to the stream in block {layout.block_of(vertex)}: that block cannot be removed"
        for vertex, source in refusals.injections(layout)
    ]
    return remarks


__all__ = ["GraphReport", "find_bodies", "inspect_graph", "producer"]
