"""Surgery from file to file: find every boundary, refuse or cut and splice, renumber the KV cache, save."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from ghostexport.errors import BoundaryNotFound, RecipeError, SurgeryError
from ghostexport.files import atomic_path
from ghostexport.new_weights import NewWeight
from ghostexport.onnxfile import (
    DTYPES,
    copy_data,
    external_tensors,
    load_graph,
    save_graph,
    strip_metadata,
    weight_bytes,
)
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import Boundary, PrunePlan
from ghostexport.surgery import content, cut, kept_weights, kv_cache, operated, refusals
from ghostexport.surgery.body import find_bodies
from ghostexport.surgery.layout import DecoderLayout, find_layout
from ghostexport.surgery.stream import StreamType, stream_type
from ghostexport.surgery.surgery_report import BoundaryReport, SurgeryReport


def operate(
    dense: Path,
    plan: PrunePlan | None,
    operators: OperatorSet | None,
    output: Path,
    *,
    drop: bool = False,
    self_contained: bool = False,
    operator_dtype: str | None = None,
    kv_pattern: str | Sequence[str] | None = None,
    dry_run: bool = False,
) -> SurgeryReport:
    """Removes the blocks of ``plan`` from an exported decoder graph and puts ``operators`` at the cuts.

    A graph that was cut before is cut further: see :func:`ghostexport.surgery.operated.compose`.

    Args:
        dense: an ONNX file of any producer; its weights are not read.
        plan: removed blocks; empty with no operators: the output is a byte-for-byte copy of the graph. None: those
            that are gone from the graph already.
        operators: repair of the same plan; None for a bare cut.
        drop: take the operators of earlier surgery out.
        output: the new ONNX file. New weights go to ``<output>.data``; in the source's folder all other weights stay
            where they are, in the source's data file. Another folder gets one compact data file of its own: references
            must not leave a folder, and ``onnx.load`` refuses hard links.
        self_contained: write the compact data file in the source's folder too.
        operator_dtype: ``float32``, ``float16`` or ``bfloat16``; default: see :meth:`OperatorSet.dtype_in`.
        kv_pattern: templates of the KV names, a list or comma separated, where they are unusual
            (``cache_k_{},cache_v_{}``; ``cache_{2b},cache_{2b+1}`` where they count tensors).
        dry_run: do everything but write.

    Returns:
        what was changed, by name.

    Raises:
        SurgeryError: the graph cannot be cut as asked (its subclasses say why); nothing was written.
        RecipeError: plan and operators do not belong together, or the dtype does not exist.
        RunFolderError: the output cannot be written.
    """
    _check_arguments(dense, plan, operators, output, operator_dtype)
    if plan is not None and not plan.removed and not drop and (operators is None or not operators.weights):
        return _identity(dense, plan, output, dry_run)
    model = load_graph(dense)
    before = weight_bytes(model)
    changes = cut_model(model, plan, operators, drop=drop, operator_dtype=operator_dtype, kv_pattern=kv_pattern)
    own = self_contained or output.parent.resolve() != dense.parent.resolve()
    written, files = (0, []) if dry_run else save_graph(model, output, changes.new, self_contained=own)
    return SurgeryReport(
        source=dense.name,
        path=output,
        identity=False,
        nodes_after=sum(1 for _ in model.graph.all_nodes()),
        weight_bytes_before=before,
        weight_bytes_after=weight_bytes(model),
        bytes_written=written,
        data_files=tuple(files),
        **changes.as_fields(),
    )


@dataclass
class Changes:
    """What :func:`cut_model` did, in fields of :class:`SurgeryReport`, and the new weights."""

    blocks_before: int = 0
    blocks_after: int = 0
    nodes_before: int = 0
    boundaries: list[BoundaryReport] = field(default_factory=list)
    kv_inputs_removed: list[str] = field(default_factory=list)
    kv_outputs_removed: list[str] = field(default_factory=list)
    kv_renamed: dict[str, str] = field(default_factory=dict)
    shape_anchors: dict[str, str] = field(default_factory=dict)
    weights_replaced: dict[str, str] = field(default_factory=dict)
    initializers_dropped: list[str] = field(default_factory=list)
    new: list[ir.Value] = field(default_factory=list)

    def as_fields(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name != "new"}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}


def cut_model(
    model: ir.Model,
    plan: PrunePlan | None,
    operators: OperatorSet | None,
    *,
    drop: bool = False,
    operator_dtype: str | None = None,
    kv_pattern: str | Sequence[str] | None = None,
) -> Changes:
    """The in-memory half of :func:`operate`: changes ``model`` in place, which a refusal leaves half changed."""
    changes = Changes(nodes_before=sum(1 for _ in model.graph.all_nodes()))
    earlier = operated.read(model)
    operated.take_out(model)
    layouts = find_layouts(model, kv_pattern)
    step = operated.compose(earlier, layouts[0].num_blocks, plan, operators, drop)
    operated.renumber(model, step)
    refusals.refuse_names(model, refusals.operator_names(operators))
    streams = []
    for layout in layouts:
        refusals.refuse_plan(layout, step.now)
        streams.append(stream_type(layout))
        _check_operators(step.operators, streams[-1])
        stored = next((name for name, dtype in DTYPES.items() if dtype == streams[-1].dtype), None)
        if operator_dtype is None and operators is not None and stored is not None:
            operator_dtype, _ = operators.dtype_in(stored)
    changes.blocks_before, changes.blocks_after = step.now.num_blocks, len(step.now.kept)
    for layout, stream in zip(layouts, streams, strict=True):
        _cut_body(model, layout, stream, step, operator_dtype, changes)
    _remove_kv(model, layouts, step.now, changes)
    changes.initializers_dropped = [v.name or "" for v in cut.drop_unused_initializers(model.graph)]
    operated.record(model, step)
    strip_metadata(model)
    return changes


def find_layouts(model: ir.Model, kv_pattern: str | Sequence[str] | None = None) -> list[DecoderLayout]:
    """Finds and checks the decoder of every body; functions are inlined first.

    Raises:
        SurgeryError: see :func:`ghostexport.surgery.layout.find_layout` and :mod:`ghostexport.surgery.refusals`.
    """
    if model.functions:
        InlinePass()(model)
    layouts = [find_layout(body) for body in find_bodies(model, kv_pattern)]
    for layout in layouts:
        refusals.refuse_sharing(layout)
        kv_cache.require_pairs(layout)
        refusals.cross_check_names(layout)
    counts = {layout.num_blocks for layout in layouts}
    if len(counts) > 1:
        raise BoundaryNotFound(f"The branches of the graph have different numbers of blocks: {sorted(counts)}.")
    return layouts


def kept_of(
    graph: Path, weights: Mapping[str, NewWeight], what: str, kv_pattern: str | Sequence[str] | None = None
) -> tuple[int, tuple[int, ...]]:
    """How many blocks a graph has, and which of them a cut and tuned checkpoint kept: see :func:`content.find_kept`."""
    model = load_graph(graph)
    operated.take_out(model)
    layout = find_layouts(model, kv_pattern)[0]
    return layout.num_blocks, content.find_kept(model.graph, layout, weights, what)


def _cut_body(
    model: ir.Model,
    layout: DecoderLayout,
    stream: StreamType,
    step: operated.Step,
    operator_dtype: str | None,
    changes: Changes,
) -> None:
    graph, plan = layout.body.graph, step.now
    replaced = content.replace_weights(model.graph, layout, step.weights)
    for name, value in replaced.values():
        _register(model.graph, [value], changes)
        changes.weights_replaced[value.name or ""] = name
    known = step.operators.operators
    folded = [_fold(model.graph, layout, operator, step, changes) for operator in known]
    scales = [operator.scale for operator in known]
    for old, new in kept_weights.scale_blocks(layout, step.plan, scales, step.at).items():
        _register(model.graph, new, changes)
        folded[0][old] = ", ".join(value.name or "" for value in new)
    layout = kept_weights.with_new_addends(layout)
    done: list[cut.CutResult] = []
    for boundary, operator in zip(step.plan.boundaries, known, strict=True):
        dtype = step.dtypes.get(boundary.index, stream.dtype if operator_dtype is None else DTYPES[operator_dtype])
        done.append(cut.cut(layout, step.place(boundary), operator, stream.dtype, dtype))
        _register(model.graph, list(done[-1].weights), changes)
    removed_outputs = {port.value for port in kv_cache.removed_outputs(layout, plan)}
    outputs = [value for value in graph.outputs if value not in removed_outputs]
    changes.shape_anchors |= kv_cache.repoint_shapes(layout, plan, cut.live_nodes(graph, outputs))
    live = cut.live_nodes(graph, outputs)
    _require_gone(layout, plan, live)
    removed = set(graph) - set(live)
    for boundary, operator in zip(step.plan.boundaries, known, strict=True):
        place = step.place(boundary)
        inside = sum(place.start <= k < place.stop for node in removed if (k := _block(layout, node)) is not None)
        b = boundary.index
        changes.boundaries.append(_report(layout, boundary, place, operator, done[b], folded[b], inside))
    graph.outputs[:] = outputs
    cut.remove_dead(graph, live)


def _fold(
    graph: ir.Graph, layout: DecoderLayout, operator: Operator, step: operated.Step, changes: Changes
) -> dict[str, str]:
    """Replaces the weights that an operator folds; new names by old."""
    folded: dict[str, str] = {}
    for item in operator.folds:
        old, new = kept_weights.fold(layout, item, step.at[item.block])
        folded[old] = new[0].name or ""
        _register(graph, new, changes)
    return folded


def _register(graph: ir.Graph, values: Sequence[ir.Value], changes: Changes) -> None:
    """Adds new weights; the second body of a merged decoder reuses those of the first."""
    for value in values:
        known = graph.initializers.get(value.name or "")
        if known in changes.new:
            assert known is not None
            value.replace_all_uses_with(known)
            continue
        while known is not None:  # of earlier surgery, and about to be replaced
            known.name = f"{known.name}.before"
            known = graph.initializers.get(value.name or "")
        graph.register_initializer(value)
        changes.new.append(value)


def _block(layout: DecoderLayout, node: ir.Node) -> int | None:
    vertex = layout.flow.index(node)
    return None if vertex is None else layout.block_of(vertex)


def _require_gone(layout: DecoderLayout, plan: PrunePlan, live: dict[ir.Node, None]) -> None:
    ports = {port.value for port in layout.body.past if kv_cache.is_removed(port, layout, plan)}
    for node in live:
        block = _block(layout, node)
        span = next((s for s in plan.removed if block is not None and block in s), None)
        ends = [layout.points[s.stop].node for s in plan.removed]
        if span is not None and node not in ends:
            raise SurgeryError(
                f"{node.op_type} {node.name!r} of removed block {block} is still needed after the cut.",
                "Report this graph: blocks share more than the residual stream.",
            )
        if any(value in ports for value in node.inputs):
            raise SurgeryError(f"{node.op_type} {node.name!r} still reads the cache of a removed block.")


def _report(
    layout: DecoderLayout,
    boundary: Boundary,
    place: cut.Place,
    operator: Operator,
    result: cut.CutResult,
    folded: dict[str, str],
    removed: int,
) -> BoundaryReport:
    return BoundaryReport(
        boundary=boundary.index,
        span=(boundary.span.start, boundary.span.stop),
        kind=operator.kind,
        site=operator.site,
        stream_in=layout.points[place.start].name,
        stream_out=layout.points[place.stop].name,
        consumers_rewired=result.consumers,
        nodes_removed=removed,
        nodes_added=result.nodes_added,
        initializers_added=tuple(value.name or "" for value in result.weights),
        weights_folded=folded,
    )


def _remove_kv(model: ir.Model, layouts: list[DecoderLayout], plan: PrunePlan, changes: Changes) -> None:
    layout = layouts[0]
    if len(layouts) > 1:
        kv_cache.prune_if_outputs(model, {port.name for port in kv_cache.removed_outputs(layout, plan)})
    ports = [port for port in layout.body.past if kv_cache.is_removed(port, layout, plan)]
    for port in ports:
        if port.value.uses():
            users = ", ".join(use.node.name or use.node.op_type for use in port.value.uses())
            raise SurgeryError(f"KV input {port.name!r} of a removed block is still read by {users}.")
    gone = {port.value for port in ports}
    model.graph.inputs[:] = [value for value in model.graph.inputs if value not in gone]
    changes.kv_inputs_removed = [port.name for port in ports]
    changes.kv_outputs_removed = [port.name for port in kv_cache.removed_outputs(layout, plan)]
    changes.kv_renamed = kv_cache.renumber(model.graph, layouts, plan)


def _check_arguments(
    dense: Path, plan: PrunePlan | None, operators: OperatorSet | None, output: Path, operator_dtype: str | None
) -> None:
    if operator_dtype is not None and operator_dtype not in DTYPES:
        raise RecipeError(f"Unknown operator dtype {operator_dtype!r}.", f"Valid: {', '.join(DTYPES)}.")
    if operators is not None and plan is not None:
        operators.require_plan(plan)
    if output.exists() and dense.exists() and output.samefile(dense):
        raise SurgeryError(f"{output} is the source graph.", "Choose another output.")


def _check_operators(operators: OperatorSet, stream: StreamType) -> None:
    for operator in operators.operators:
        size = operator.hidden_size
        if size is not None and size != stream.hidden_size:
            raise SurgeryError(
                f"Operator {operator.boundary.index} has hidden size {size}; the residual stream of the graph has "
                f"{stream.hidden_size}.",
                "Fit the operator on the model that this graph was exported from.",
            )


def _identity(dense: Path, plan: PrunePlan, output: Path, dry_run: bool) -> SurgeryReport:
    model = load_graph(dense)
    files = sorted({str(tensor.location) for tensor in external_tensors(model)})
    if not dry_run:
        for name in files:
            if dense.parent.resolve() != output.parent.resolve():
                copy_data(dense.parent / name, output.parent / name)
        with atomic_path(output) as temporary:
            shutil.copyfile(dense, temporary)
    nodes, size = sum(1 for _ in model.graph.all_nodes()), weight_bytes(model)
    return SurgeryReport(
        source=dense.name,
        path=output,
        identity=True,
        blocks_before=plan.num_blocks,
        blocks_after=plan.num_blocks,
        nodes_before=nodes,
        nodes_after=nodes,
        weight_bytes_before=size,
        weight_bytes_after=size,
        bytes_written=0 if dry_run else dense.stat().st_size,
        data_files=tuple(files),
    )
