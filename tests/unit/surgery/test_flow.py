"""Post-dominators of random graphs against their definition: removing the vertex cuts every path to the target."""

from __future__ import annotations

import onnx_ir as ir
from hypothesis import given, settings
from hypothesis import strategies as st

from ghostexport.surgery.cut import live_nodes
from ghostexport.surgery.flow import DataFlow
from tests.unit.surgery.toy import Builder


def _reaches(flow: DataFlow, start: int, without: int) -> bool:
    if start == without:
        return False
    stack, seen = [start], {start}
    while stack:
        vertex = stack.pop()
        if vertex == flow.exit:
            return True
        for succ in flow.succs[vertex]:
            if succ != without and succ not in seen:
                seen.add(succ)
                stack.append(succ)
    return False


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=25))
def test_the_chain_is_exactly_what_every_path_passes(edges: list[tuple[int, int]]) -> None:
    b = Builder()
    values = [b.input("x", ir.DataType.FLOAT, ["n"])]
    for first, second in edges:
        values.append(b.op("Add", values[first % len(values)], values[second % len(values)]))
    b.output(values[-1], "logits", ["n"])
    flow = DataFlow(b.model().graph, values[-1])
    for vertex in range(len(flow.vertices)):
        dominators = [v for v in range(len(flow.vertices)) if not _reaches(flow, vertex, v)]
        assert flow.chain(vertex) == dominators


def test_shape_reads_no_data_and_inner_graphs_capture() -> None:
    b = Builder()
    x, flag = b.input("x", ir.DataType.FLOAT, ["n"]), b.input("flag", ir.DataType.BOOL, [1])
    hidden = b.op("Sigmoid", x)
    size = b.op("Shape", hidden)
    inner = ir.Node("", "Mul", [hidden, hidden], name="inner")
    inner.outputs[0].name = "inner"
    branches = [ir.Graph([], [inner.outputs[0]], nodes=[inner], name="then")]
    other = ir.Node("", "Neg", [hidden], name="other")
    other.outputs[0].name = "other"
    branches.append(ir.Graph([], [other.outputs[0]], nodes=[other], name="else"))
    chosen = b.op("If", flag, then_branch=branches[0], else_branch=branches[1])
    target = b.op("Reshape", chosen, size)
    b.output(target, "logits", ["n"])
    graph = b.model().graph
    assert {node.op_type for node in live_nodes(graph, [chosen])} == {"If", "Sigmoid"}  # captured, so needed
    flow = DataFlow(graph, target)
    start = flow.index(size)
    assert start is not None and flow.preds[start] == []
    source = flow.index(x)
    assert source is not None and start not in flow.descendants([source])
    assert flow.index(chosen) in flow.descendants([source])
