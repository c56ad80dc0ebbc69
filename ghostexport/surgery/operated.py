"""Graphs that surgery changed before: what it wrote down, and its operators read out of the graph and taken out of it.

Further surgery is the one-step surgery again: all operators are read and taken out, which leaves a bare cut; blocks go
from that, and operators, old or new, are spliced in at every boundary of both cuts together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from ghostexport.composing import product
from ghostexport.errors import AlreadySpliced, RecipeError, SurgeryError
from ghostexport.new_weights import NewWeight
from ghostexport.onnxfile import values
from ghostexport.operators import FloatArray, Operator, OperatorSet, parse_operators
from ghostexport.plan import Boundary, PrunePlan
from ghostexport.surgery.cut import Place, live_nodes, remove_dead, set_addends, without_sum
from ghostexport.surgery.layout import SKIP_NORMS

#: Metadata of the model in which surgery writes down its plan and operators: an operator file's header.
RECORD = "ghostexport.operators"

_OURS = re.compile(r"ghost\.(\d+)\.(\w+)")
_FIRST = ("cast_in", "matmul", "matmul_u", "mul", "network_matmul1", "add")
_LAST_OF_NETWORK = ("cast_out", "network_add2")
_LAST_OF_BRANCH = ("cast_out", "add_bias", "matmul_v", "mul", "matmul")
_RESTORE = "Start again from the dense graph."


@dataclass(frozen=True)
class Earlier:
    """What is known of a graph's earlier surgery.

    Attributes:
        operators: its operators and plan, in blocks of the dense graph; None without a record.
        folded: per boundary, what of its operator went into weights: ``5.mlp_output``, or ``scale``.
        dtypes: boundary -> dtype of its operator's weights in the graph.
        replaced: names of parameters that have new weights.
        found: boundary -> names of its operator's nodes and weights in the graph.
    """

    operators: OperatorSet | None = None
    folded: tuple[tuple[str, ...], ...] = ()
    replaced: tuple[str, ...] = ()
    dtypes: Mapping[int, ir.DataType] = field(default_factory=dict)
    found: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def plan_of(self, num_blocks: int) -> PrunePlan:
        """What was cut so far from a graph that has ``num_blocks`` blocks left.

        Raises:
            AlreadySpliced: there are operators, and no record of the cuts they repair.
            SurgeryError: the record is of another graph.
        """
        if self.operators is None:
            if self.found:
                names = ", ".join(name for part in self.found.values() for name in part[:4])
                raise AlreadySpliced(f"The graph carries an operator ({names}) but no record of its cuts.", _RESTORE)
            return PrunePlan(num_blocks)
        plan = self.operators.plan
        if len(plan.kept) != num_blocks:
            raise SurgeryError(
                f"The graph records {plan} as removed, but has {num_blocks} blocks instead of {len(plan.kept)}.",
                f"Something else changed it since. {_RESTORE}",
            )
        return plan


def read(model: ir.Model) -> Earlier:
    """Reads the record of earlier surgery and the weights of its operators; the graph is not changed.

    Raises:
        SurgeryError: the record contradicts the graph.
    """
    found: dict[int, tuple[str, ...]] = {}
    arrays: dict[str, FloatArray] = {}
    dtypes: dict[int, ir.DataType] = {}
    for node in model.graph.all_nodes():
        if (match := _OURS.fullmatch(node.name or "")) and not match[2].startswith("stream"):
            found[int(match[1])] = (*found.get(int(match[1]), ()), match[0])
    for name, value in model.graph.initializers.items():
        if (match := _OURS.fullmatch(name)) and value.const_value is not None and value.dtype is not None:
            found[int(match[1])] = (*found.get(int(match[1]), ()), name)
            arrays[name] = values(value.const_value).astype(np.float32)
            dtypes[int(match[1])] = value.dtype
    text = model.metadata_props.get(RECORD)
    if text is None:
        return Earlier(found=found)
    try:
        header = json.loads(text)
        operators = parse_operators(header, arrays)
        folded = tuple(tuple(entry["folded"]) for entry in header["operators"])
        replaced = tuple(header["replaced"])
    except (KeyError, IndexError, TypeError, ValueError, RecipeError) as error:
        raise SurgeryError(f"The graph's record of its cuts is damaged: {error}", _RESTORE) from error
    return Earlier(operators, folded, replaced, dtypes, found)


def record(model: ir.Model, step: Step) -> None:
    """Writes the plan and what was put at its boundaries into the model's metadata."""
    header = step.operators.header | {"replaced": sorted({*step.operators.weights, *step.replaced})}
    del header["plan"]["criterion"]  # who chose the cut does not change the graph
    for entry, operator, before in zip(header["operators"], step.operators.operators, step.folded, strict=True):
        entry["folded"] = sorted({*before, *_folds_of(operator)})
    model.metadata_props[RECORD] = json.dumps(header, sort_keys=True)


def take_out(model: ir.Model) -> None:
    """Takes every operator out, in all bodies; what is left is a bare cut. Folded weights stay.

    Raises:
        SurgeryError: the nodes of an operator are not as surgery makes them.
    """
    for graph in (model.graph, *model.graph.subgraphs()):
        parts: dict[int, dict[str, ir.Node]] = {}
        for node in graph:
            if match := _OURS.fullmatch(node.name or ""):
                parts.setdefault(int(match[1]), {})[match[2]] = node
        for b, nodes in parts.items():
            if any(name in nodes for name in _FIRST):
                _take_out(graph, b, nodes)
        if parts:
            remove_dead(graph, live_nodes(graph, graph.outputs))
    for name in [
        name for name, value in model.graph.initializers.items() if _OURS.fullmatch(name) and not value.uses()
    ]:
        del model.graph.initializers[name]


def renumber(model: ir.Model, step: Step) -> None:
    """Gives sums of the stream that earlier cuts made the numbers that their boundaries have now."""
    for node in model.graph.all_nodes():
        match = _OURS.fullmatch(node.name or "")
        if match and match[2].startswith("stream"):
            start = step.before.boundaries[int(match[1])].span.start
            b = next(boundary.index for boundary in step.plan.boundaries if start in boundary.span)
            node.name = node.outputs[0].name = f"ghost.{b}.{match[2]}"


def _take_out(graph: ir.Graph, b: int, nodes: Mapping[str, ir.Node]) -> None:
    x = next(nodes[name] for name in _FIRST if name in nodes).inputs[0]
    assert x is not None
    whole = ("add", *(_LAST_OF_NETWORK if "network_add2" in nodes else ()))
    last = next((nodes[name] for name in whole if name in nodes), None)
    if last is not None:
        ir.convenience.replace_all_uses_with(last.outputs[0], x, replace_graph_outputs=True)
        return
    branch = next(nodes[name] for name in _LAST_OF_BRANCH if name in nodes).outputs[0]
    readers = [use.node for use in branch.uses()]
    if len(readers) != 1 or readers[0].op_type not in SKIP_NORMS:
        names = ", ".join(node.name or node.op_type for node in readers) or "nothing"
        raise SurgeryError(f"The result of operator {b} is read by {names}, not by one sum.", _RESTORE)
    addends = _addends(x)
    if len(addends) > 1:
        set_addends(readers[0], tuple(addends))
    else:
        without_sum(graph, readers[0], x)


def _addends(x: ir.Value) -> Sequence[ir.Value | None]:
    """What surgery summed to ``x`` where a fused skip-norm had summed it; ``x`` itself elsewhere."""
    node = x.producer()
    if node is None or not re.fullmatch(r"ghost\.\d+\.stream", node.name or ""):
        return (x,)
    biased = None if node.inputs[1] is None else node.inputs[1].producer()
    if biased is not None and (biased.name or "").endswith(".stream_bias"):
        return (node.inputs[0], *biased.inputs)
    return node.inputs


@dataclass(frozen=True)
class Step:
    """One surgery on the graph at hand, which may have been cut before.

    Attributes:
        plan: everything that is gone afterwards, in blocks of the dense graph.
        now: what goes now, in blocks of the graph at hand.
        before: what was gone already, in blocks of the dense graph.
        operators: what stands at each boundary of ``plan`` afterwards, and folds that are new.
        dtypes: boundary -> dtype of an operator that the graph had already.
        folded: per boundary, what went into weights before and is still there.
        replaced: names of parameters that got new weights before.
    """

    plan: PrunePlan
    now: PrunePlan
    before: PrunePlan
    operators: OperatorSet
    dtypes: Mapping[int, ir.DataType]
    folded: tuple[tuple[str, ...], ...]
    replaced: tuple[str, ...]

    @property
    def at(self) -> dict[int, int]:
        """Block of the dense graph -> block of the graph at hand."""
        return {block: k for k, block in enumerate(self.before.kept)}

    @property
    def weights(self) -> dict[str, NewWeight]:
        """New weights, in blocks of the graph at hand."""
        own = self.operators.weights.items()
        return {name: w if w.block is None else replace(w, block=self.at[w.block]) for name, w in own}

    def place(self, boundary: Boundary) -> Place:
        """Where a boundary lies in the graph at hand."""
        start, stop = boundary.span.start, boundary.span.stop
        kept = self.before.kept
        return Place(boundary.index, sum(k < start for k in kept), sum(k < stop for k in kept))


def compose(
    earlier: Earlier, num_blocks: int, plan: PrunePlan | None, operators: OperatorSet | None, drop: bool
) -> Step:
    """What a plan and operators ask of a graph with ``num_blocks`` blocks left.

    A plan counts in the blocks of the dense graph (all its cuts, the earlier ones too), or in those of the graph at
    hand (further cuts). Operators of the first kind take the place of every earlier one; else, and with a bare plan,
    earlier operators stay where they are, one after the other where cuts meet.

    Args:
        plan: None for the cuts that were made.
        drop: earlier operators go.

    Raises:
        SurgeryError: the plan is of another graph, or a folded weight would have to be given back.
    """
    before = earlier.plan_of(num_blocks)
    if drop and not earlier.found:
        raise SurgeryError("The graph has no operator to take out.", "Leave --drop out.")
    plan = plan or before
    further = plan.num_blocks == num_blocks and plan.num_blocks != before.num_blocks
    if not further and plan.num_blocks != before.num_blocks:
        of = "" if num_blocks == before.num_blocks else f" of {before.num_blocks}"
        raise SurgeryError(
            f"The plan is for {plan.num_blocks} blocks; the graph has {num_blocks}{of}.",
            "Make the plan for this graph: spans are counted in its decoder blocks, from 0.",
        )
    whole = before.then(plan) if further else plan
    now = whole.after(before)
    keeps = not drop and (operators is None or further)
    kept = _within(earlier, whole) if keeps else [[] for _ in whole.boundaries]
    singles = [_put(boundary, kept[boundary.index]) for boundary in whole.boundaries]
    name, weights = earlier.operators.name if earlier.operators is not None and any(kept) else "pruned", {}
    if operators is not None:
        name, weights = operators.name, dict(operators.weights)
        if further:
            weights = {n: w if w.block is None else replace(w, block=before.kept[w.block]) for n, w in weights.items()}
        for operator in operators.operators:
            moved = _moved(operator, whole, before) if further else operator
            _require_free(moved, singles[moved.boundary.index])
            singles[moved.boundary.index] = moved
    folded = _still_folded(earlier, whole)
    if not keeps:
        _require_unfolded(earlier, whole, singles)
    source = operators or (earlier.operators if any(kept) else None)
    calibration = source.calibration_sha256 if source is not None else ""
    dtypes = {
        b: earlier.dtypes[olds[0].boundary.index]
        for b, olds in enumerate(kept)
        if olds and olds[0].boundary.index in earlier.dtypes
    }
    new = OperatorSet(name, tuple(singles), whole, calibration, weights)
    return Step(whole, now, before, new, dtypes, folded, earlier.replaced)


def _within(earlier: Earlier, whole: PrunePlan) -> list[list[Operator]]:
    """Per boundary, the earlier operators inside its span, in depth order."""
    olds = [o for o in (earlier.operators.operators if earlier.operators else ()) if o.adds_nodes]
    spans = [boundary.span for boundary in whole.boundaries]
    return [[o for o in olds if s.start <= o.boundary.span.start and o.boundary.span.stop <= s.stop] for s in spans]


def _put(boundary: Boundary, olds: list[Operator]) -> Operator:
    """The earlier operators of one boundary as one, in its place."""
    if not olds:
        return Operator(boundary, "none")
    if len(olds) == 1 and (olds[0].site == "boundary" or olds[0].boundary.span.start == boundary.span.start):
        return replace(olds[0], boundary=boundary)
    if any(o.matrix is None or o.site != "boundary" for o in olds):
        raise SurgeryError(
            f"The cut {boundary.span} would join operators ({', '.join(o.kind for o in olds)}) that do not combine.",
            "Take them out first (--drop), or give operators for the whole cut.",
        )
    wide = [replace(o, delta=o.matrix, factors=None, diagonal=None, bias=_bias(o)) for o in olds]
    made = product(boundary, wide)
    return made if any(o.bias is not None for o in olds) else replace(made, bias=None)


def _bias(operator: Operator) -> FloatArray:
    assert operator.hidden_size is not None
    return np.zeros(operator.hidden_size, np.float32) if operator.bias is None else operator.bias


def _moved(operator: Operator, whole: PrunePlan, before: PrunePlan) -> Operator:
    """An operator fitted on the graph at hand, in blocks of the dense graph."""
    first = before.kept[operator.boundary.span.start]
    boundary = next(b for b in whole.boundaries if first in b.span)
    folds = tuple(replace(fold, block=before.kept[fold.block]) for fold in operator.folds)
    return replace(operator, boundary=boundary, folds=folds)


def _require_free(operator: Operator, there: Operator) -> None:
    if there.adds_nodes:
        raise SurgeryError(
            f"The cut {operator.boundary.span} meets an earlier one, which has an operator ({there.kind}).",
            "Take that out first (--drop), or fit operators for all cuts of the dense model.",
        )


def _still_folded(earlier: Earlier, whole: PrunePlan) -> tuple[tuple[str, ...], ...]:
    result: list[list[str]] = [[] for _ in whole.boundaries]
    for old, names in zip(earlier.operators.operators if earlier.operators else (), earlier.folded, strict=True):
        b = next(b.index for b in whole.boundaries if old.boundary.span.start in b.span)
        result[b] += [name for name in names if name == "scale" or int(name.split(".")[0]) in whole.kept]
    return tuple(tuple(names) for names in result)


def _require_unfolded(earlier: Earlier, whole: PrunePlan, singles: list[Operator]) -> None:
    new = {name for operator in singles for name in _folds_of(operator)} - {"scale"}
    left = [*sorted({n for names in _still_folded(earlier, whole) for n in names} - new), *earlier.replaced]
    if left:
        raise SurgeryError(
            f"The operators of this graph are partly in its weights ({', '.join(left[:4])}); the old ones are gone.",
            _RESTORE,
        )


def _folds_of(operator: Operator) -> tuple[str, ...]:
    """What of an operator goes into weights of kept blocks."""
    scale = () if operator.scale is None else ("scale",)
    return (*(f"{fold.block}.{fold.role}" for fold in operator.folds), *scale)
