"""The data-flow DAG of a graph and its post-dominator tree. Knows ONNX edges, knows nothing of decoders.

Vertices are the nodes of the graph plus one source per value that enters it from outside (graph inputs; for the body
of an ``If``, values captured from the enclosing graph). ``Shape`` and ``Size`` read no data, so edges into them are
left out; values that an inner graph captures count as inputs of the node that holds it. Weights are no vertices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

SHAPE_OPS = frozenset({"Shape", "Size"})


class DataFlow:
    """Vertices reachable backwards from ``target``, in topological order, with post-dominators toward it.

    Attributes:
        vertices: ``ir.Node`` or source ``ir.Value``; a smaller index is earlier in topological order.
        preds, succs: data edges between vertex indices.
        exit: index of the vertex that produces the target.
    """

    def __init__(self, graph: ir.Graph, target: ir.Value) -> None:
        self.graph = graph
        self.vertices: list[ir.Node | ir.Value] = []
        self.preds: list[list[int]] = []
        self._index: dict[ir.Node | ir.Value, int] = {}
        self._collect(target)
        self.succs: list[list[int]] = [[] for _ in self.vertices]
        for vertex, preds in enumerate(self.preds):
            for pred in preds:
                self.succs[pred].append(vertex)
        self.exit = self._index[_vertex_of(target, graph)]
        self._post_dominators()

    def index(self, item: ir.Node | ir.Value | None) -> int | None:
        """Vertex of a node, or of the node or source that gives a value; None when it does not reach the target."""
        if isinstance(item, ir.Value):
            item = _vertex_of(item, self.graph)
        return None if item is None else self._index.get(item)

    def chain(self, vertex: int) -> list[int]:
        """``vertex`` and its post-dominators up to the exit: what every path to the target passes, in order."""
        result = [vertex]
        while result[-1] != self.exit:
            result.append(self.ipdom[result[-1]])
        return result

    def descendants(self, start: Iterable[int]) -> set[int]:
        """Vertices that depend on the data of ``start``, ``start`` included."""
        return _closure(start, self.succs)

    def ancestors(self, start: Iterable[int]) -> set[int]:
        """Vertices whose data ``start`` depends on, ``start`` included."""
        return _closure(start, self.preds)

    def _collect(self, target: ir.Value) -> None:
        # iterative depth-first search from the target; a vertex is emitted after all it depends on
        start = _vertex_of(target, self.graph)
        stack: list[tuple[ir.Node | ir.Value, Iterator[ir.Node | ir.Value]]] = [(start, iter(self._before(start)))]
        open_: set[ir.Node | ir.Value] = {start}
        while stack:
            vertex, remaining = stack[-1]
            nxt = next(remaining, None)
            if nxt is None:
                stack.pop()
                self._index[vertex] = len(self.vertices)
                self.vertices.append(vertex)
                self.preds.append(sorted({self._index[p] for p in self._before(vertex)}))
            elif nxt not in open_:
                open_.add(nxt)
                stack.append((nxt, iter(self._before(nxt))))

    def _before(self, vertex: ir.Node | ir.Value) -> list[ir.Node | ir.Value]:
        if isinstance(vertex, ir.Value) or vertex.op_type in SHAPE_OPS:
            return []
        return [_vertex_of(v, self.graph) for v in data_inputs(vertex) if not is_weight(v)]

    def _post_dominators(self) -> None:
        # immediate post-dominator = lowest common ancestor of all successors; ancestor jumps make it O(log n)
        size = len(self.vertices)
        self.ipdom = [self.exit] * size
        self._depth = [0] * size
        self._jump = [self.exit] * size
        for vertex in range(size - 1, -1, -1):
            if vertex == self.exit:
                continue
            common = self.succs[vertex][0]
            for succ in self.succs[vertex][1:]:
                common = self._common(common, succ)
            self.ipdom[vertex] = common
            self._depth[vertex] = self._depth[common] + 1
            jump = self._jump[common]
            # skew-binary jump pointers: equal step lengths merge into one longer step
            even = self._depth[common] - self._depth[jump] == self._depth[jump] - self._depth[self._jump[jump]]
            self._jump[vertex] = self._jump[jump] if even else common

    def _common(self, a: int, b: int) -> int:
        if self._depth[a] < self._depth[b]:
            a, b = b, a
        while self._depth[a] > self._depth[b]:
            a = self._jump[a] if self._depth[self._jump[a]] >= self._depth[b] else self.ipdom[a]
        while a != b:
            if self._jump[a] != self._jump[b]:
                a, b = self._jump[a], self._jump[b]
            else:
                a, b = self.ipdom[a], self.ipdom[b]
        return a


def is_weight(value: ir.Value) -> bool:
    """An initializer, or the output of a ``Constant`` node: data known without any input."""
    producer = value.producer()
    return value.is_initializer() or (producer is not None and producer.op_type == "Constant")


def is_constant(value: ir.Value) -> bool:
    """A weight, or computed from weights alone (Transpose, DequantizeLinear, Cast of an initializer)."""
    stack, seen = [value], {value}
    while stack:
        current = stack.pop()
        if is_weight(current):
            continue
        producer = current.producer()
        if producer is None or len(seen) > 64:
            return False
        for source in producer.inputs:
            if source is not None and source not in seen:
                seen.add(source)
                stack.append(source)
    return True


def data_inputs(node: ir.Node) -> Iterator[ir.Value]:
    """Values whose data ``node`` reads: its inputs (none for Shape and Size) and what its inner graphs capture."""
    if node.op_type not in SHAPE_OPS:
        yield from (value for value in node.inputs if value is not None)
    yield from captures(node)


def captures(node: ir.Node) -> Iterator[ir.Value]:
    """Values of enclosing graphs that the inner graphs of ``node`` use (data or shape)."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            graphs = [attribute.as_graph()]
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs = list(attribute.as_graphs())
        else:
            continue
        for graph in graphs:
            inner = {graph, *graph.subgraphs()}
            used = [value for child in graph.all_nodes() for value in child.inputs]
            used += [value for g in inner for value in g.outputs]
            yield from (value for value in used if value is not None and _graph_of(value) not in inner)


def _graph_of(value: ir.Value) -> ir.Graph | None:
    graph = value.graph
    return graph if isinstance(graph, ir.Graph) else None


def _vertex_of(value: ir.Value, graph: ir.Graph) -> ir.Node | ir.Value:
    producer = value.producer()
    return producer if producer is not None and producer.graph is graph else value


def _closure(start: Iterable[int], edges: list[list[int]]) -> set[int]:
    seen = set(start)
    stack = list(seen)
    while stack:
        for other in edges[stack.pop()]:
            if other not in seen:
                seen.add(other)
                stack.append(other)
    return seen
