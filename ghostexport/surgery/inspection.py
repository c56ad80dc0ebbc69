"""What is in a graph, and whether it could be cut: for people, and for scripts as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ghostexport.errors import SurgeryError
from ghostexport.onnxfile import load_graph
from ghostexport.operators import OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.quantization.forms import UNPACK, UNPACK_MX
from ghostexport.surgery import operated, refusals
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
        blocks: per block its index, its index in the dense graph, KV number, residual values in and out, and number of
            residual sums.
        dense_blocks: blocks of the dense graph.
        cuts: what surgery removed and put there: boundary, removed blocks of the dense graph, position, operator, its
            site, dtype and nodes and weights, and what of it is folded into weights.
        weights_replaced: parameters that have new weights.
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
    dense_blocks: int | None = None
    cuts: tuple[Mapping[str, Any], ...] = ()
    weights_replaced: tuple[str, ...] = ()
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
        earlier = operated.read(model)
        operated.take_out(model)
        layout = find_layouts(model, kv_pattern)[-1]
        plan = None if earlier.operators is None and earlier.found else earlier.plan_of(layout.num_blocks)
        stream = stream_type(layout)
    except SurgeryError as error:
        return GraphReport(**base, blocker=error.message)
    return GraphReport(
        **base,
        dtype=stream.dtype.name.lower(),
        hidden_size=stream.hidden_size,
        rank=stream.rank,
        blocks=tuple(_block(layout, k, plan) for k in range(layout.num_blocks)),
        dense_blocks=None if plan is None else plan.num_blocks,
        cuts=tuple(_cuts(earlier)),
        weights_replaced=earlier.replaced,
        kv_inputs=tuple(dict.fromkeys(port.template for port in layout.body.past)),
        kv_outputs=tuple(dict.fromkeys(port.template for port in layout.body.present)),
        shared_initializers=_shared(layout),
        remarks=tuple(_remarks(layout)),
    )


def read_operators(path: Path) -> OperatorSet:
    """Reads the operators out of a graph that surgery put them into, with the plan they repair.

    They have the numbers that the graph has: rounded where it holds them in half precision.

    Raises:
        SurgeryError: it has none, no record of them, or part of them is in weights and cannot be told from those.
    """
    earlier = operated.read(load_graph(path))
    if earlier.operators is None or not any(operator.adds_nodes for operator in earlier.operators.operators):
        what = "no record of its operator's cuts" if earlier.found else "no operator"
        raise SurgeryError(f"{path} has {what}.", "Give a graph that ghostexport surgery put an operator into.")
    left = [*(name for names in earlier.folded for name in names), *earlier.replaced]
    if left:
        raise SurgeryError(
            f"The operators of {path} are partly in its weights ({', '.join(left[:4])}): these cannot be read out.",
            "Use the operator file that the graph was made with.",
        )
    return earlier.operators


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


def _block(layout: DecoderLayout, k: int, plan: PrunePlan | None) -> dict[str, Any]:
    return {
        "block": k,
        "dense_block": None if plan is None else plan.kept[k],
        "kv_number": layout.numbers[k],
        "stream_in": layout.points[k].name,
        "stream_out": layout.points[k + 1].name,
        "sums": len(layout.sums[k]),
    }


def _cuts(earlier: operated.Earlier) -> Iterator[dict[str, Any]]:
    recorded = earlier.operators.operators if earlier.operators is not None else ()
    for b in sorted({*earlier.found, *range(len(recorded))}):
        operator = recorded[b] if b < len(recorded) else None
        dtype = earlier.dtypes.get(b)
        yield {
            "boundary": b,
            "removed": None if operator is None else [operator.boundary.span.start, operator.boundary.span.stop],
            "position": None if operator is None else operator.boundary.position,
            "operator": "unknown" if operator is None else operator.kind,
            "site": None if operator is None else operator.site,
            "dtype": None if dtype is None else dtype.name.lower(),
            "names": list(earlier.found.get(b, ())),
            "folded": list(earlier.folded[b]) if operator is not None else [],
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
    ops = ("MatMulNBits", "GatherBlockQuantized", UNPACK, UNPACK_MX, "QLinearMatMul", "MatMulInteger")
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


__all__ = ["GraphReport", "find_bodies", "inspect_graph", "producer", "read_operators"]
