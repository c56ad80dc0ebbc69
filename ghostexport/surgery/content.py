"""Finds parameters in a graph by what they hold, not by name, and replaces them.

::

    parameter p of block b  =  initializer read in block b with the same numbers:  p,  p reshaped,  p with its last two
                               axes swapped,  1 + p (a gain folded by the exporter),  or p beside others (fused q, k, v)

An initializer that several blocks share, because exporters merge equal ones, is replaced where its own block reads it;
equal ones of a block are told apart by the order in which they are read. No node is added, except where a constant
Transpose or Cast is itself shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ghostexport.errors import SurgeryError
from ghostexport.new_weights import NEAR, NewWeight, kept_blocks, places
from ghostexport.onnxfile import values
from ghostexport.operators import FloatArray
from ghostexport.surgery.flow import is_constant
from ghostexport.surgery.layout import SKIP_NORMS, DecoderLayout, bias_index
from ghostexport.surgery.splice import weight as new_initializer

_SHOWN = 4

#: Numbers that are compared at every place where a fused initializer could hold a parameter.
_TRIED = 24


@dataclass(frozen=True)
class Reading:
    """Where a graph reads an initializer.

    Attributes:
        value: the initializer.
        chain: nodes between it and its reader that compute with constants alone (Transpose, Cast).
        node, index: the reader and the input.
        block: block of the reader; None before, behind and beside the blocks.
        order: topological.
    """

    value: ir.Value
    chain: tuple[ir.Node, ...]
    node: ir.Node
    index: int
    block: int | None
    order: int


@dataclass(frozen=True)
class Form:
    """How an initializer holds a parameter.

    Attributes:
        swapped: the last two axes are swapped.
        shift: what is added to its numbers.
        offset: where along its first axis the parameter's begins, in an initializer that holds others beside it.
    """

    swapped: bool = False
    shift: int = 0
    offset: int | None = None

    def positions(self, shape: Sequence[int], held: Sequence[int]) -> NDArray[np.int64]:
        """Flat indices, in an initializer ``held``, of the numbers at :func:`places` of a parameter ``shape``."""
        indices = [*np.unravel_index(places(shape), shape)]
        if self.offset is None:
            held = (*shape[:-2], shape[-1], shape[-2]) if self.swapped else shape
        else:
            indices[0] = indices[0] + self.offset
        if self.swapped:
            indices[-2:] = indices[:-3:-1]
        return np.array(np.ravel_multi_index(tuple(indices), tuple(held)), np.int64)

    def put(self, value: FloatArray, old: FloatArray) -> FloatArray:
        """What the initializer holds with the parameter's new value in the place of its old one."""
        rows = len(value)
        value = np.swapaxes(value, -1, -2) if self.swapped else value
        if self.offset is None:
            return np.asarray(np.ascontiguousarray(value).reshape(old.shape) + np.asarray(self.shift, value.dtype))
        new = old.copy()
        part = slice(self.offset, self.offset + rows)
        new[(..., part) if self.swapped else (part, ...)] = value
        return new


def replace_weights(
    graph: ir.Graph, layout: DecoderLayout, weights: Mapping[str, NewWeight]
) -> dict[str, tuple[str, ir.Value]]:
    """Puts new weights in place of those of the graph, once every one of them is found.

    Args:
        graph: holds the initializers.
        layout: the decoder that reads them, before anything is cut.
        weights: by name, in the order in which they are read.

    Returns:
        By new name ``ghost.weight.<name>`` the old name and the new initializer, where numbers change.

    Raises:
        SurgeryError: one is not found, or it is not clear where; nothing was changed.
    """
    if not weights:
        return {}
    everywhere = readings(graph, layout)
    found = _assign(everywhere, weights)
    groups: dict[tuple[ir.Value, str | None, int], list[tuple[str, Form, list[Reading]]]] = {}
    for name, targets in found.items():
        held: dict[ir.Value, tuple[Form, list[Reading]]] = {}  # a tied parameter may be held both ways round
        for target, form in targets:
            held.setdefault(target.value, (form, []))[1].append(target)
        for index, (old, (form, mine)) in enumerate(held.items()):
            key = (old, name, index) if form.offset is None else (old, None, 0)
            groups.setdefault(key, []).append((name, form, mine))
    done: dict[str, tuple[str, ir.Value]] = {}
    for (old, _, index), parts in groups.items():
        suffix = f".{index}" if index else ""
        new = _made(f"ghost.weight.{parts[0][0]}{suffix}", old, [(weights[name], form) for name, form, _ in parts])
        if new is not None:
            done[new.name or ""] = old.name or "?", new
            for target in parts[0][2]:
                _redirect(target, new, _is_shared(target, parts[0][2], everywhere))
    return done


def find_kept(graph: ir.Graph, layout: DecoderLayout, weights: Mapping[str, NewWeight], what: str) -> tuple[int, ...]:
    """The blocks of a graph that those of a cut and tuned checkpoint were, by what their matrices hold.

    Args:
        weights: all of the checkpoint, their ``block`` counted in the checkpoint.
        what: the checkpoint, for messages.

    Raises:
        ModelLayoutError: it was made from another model.
    """
    tensors: dict[int, dict[ir.Value, ir.TensorProtocol]] = {}
    for reading in readings(graph, layout):
        if reading.block is not None and reading.value.const_value is not None:
            tensors.setdefault(reading.block, {})[reading.value] = reading.value.const_value
    count = 1 + max((w.block for w in weights.values() if w.block is not None), default=-1)
    rows: list[list[list[float]]] = [[] for _ in range(count)]
    for weight in weights.values():
        if weight.block is None or weight.value.ndim < 2:
            continue
        near = [
            min((d[0] for t in tensors.get(b, {}).values() if (d := distance(weight, t)) is not None), default=np.inf)
            for b in range(layout.num_blocks)
        ]
        if min(near) < np.inf:  # else fused with others
            rows[weight.block].append(near)
    nowhere = [[np.inf] * layout.num_blocks]
    return kept_blocks(np.array([np.mean(row or nowhere, axis=0) for row in rows]), what)


def readings(graph: ir.Graph, layout: DecoderLayout) -> list[Reading]:
    """Every place where the layout's body reads an initializer of the graph or of itself."""
    own = layout.body.graph
    held = [*graph.initializers.values(), *(own.initializers.values() if own is not graph else ())]
    return sorted((r for value in held for r in _readers(layout, value, value, ())), key=lambda r: r.order)


def _readers(layout: DecoderLayout, source: ir.Value, value: ir.Value, chain: tuple[ir.Node, ...]) -> Iterator[Reading]:
    for use in value.uses():
        node = use.node
        if all(v is None or is_constant(v) for v in node.inputs):
            for output in node.outputs:
                yield from _readers(layout, source, output, (*chain, node))
            continue
        vertex = layout.flow.index(node) if node.graph is layout.body.graph else None
        if vertex is None:
            continue
        block = layout.block_of(vertex)
        if node.op_type in SKIP_NORMS and use.idx in (2, 3) and use.idx != bias_index(node):  # its gain reads the sum
            block = next((b for b, point in enumerate(layout.points) if point.node is node), block)
        inside = block is not None and 0 <= block < layout.num_blocks
        yield Reading(source, chain, node, use.idx, block if inside else None, vertex)


def distance(weight: NewWeight, tensor: ir.TensorProtocol, fused: bool = False) -> tuple[float, Form] | None:
    """How far an initializer is from the known numbers, relative, in the form nearest to them; 0: the same.

    None where it has not the size; of ``fused`` ones, no side that holds the parameter beside others.
    """
    shape, held = weight.value.shape, tuple(tensor.shape.numpy())
    if fused:
        forms = _fused(weight, tensor, held)
    elif int(np.prod(held)) == weight.value.size:
        forms = [Form(), Form(swapped=True) if len(shape) > 1 else Form(shift=1)]
    else:
        return None
    best: tuple[float, Form] | None = None
    for form in forms:
        got = _numbers(tensor, form.positions(shape, held))
        error = _error(got, (weight.known + np.float32(form.shift)), tensor)
        if best is None or error < best[0]:
            best = error, form
    return best


def _fused(weight: NewWeight, tensor: ir.TensorProtocol, held: tuple[int, ...]) -> list[Form]:
    """Where along a longer side of an initializer the parameter could be; the likeliest place of either way round."""
    shape, count = weight.value.shape, min(_TRIED, len(weight.known))
    if len(shape) != len(held) or len(shape) > 2:
        return []
    found = []
    for swapped in (False, True) if len(shape) == 2 else (False,):
        side, others = (held[-1], held[:-1]) if swapped else (held[0], held[1:])
        if side <= shape[0] or others != shape[1:]:
            continue
        at = [Form(swapped, 0, offset).positions(shape, held)[:count] for offset in (0, 1)]
        everywhere = _numbers(tensor, at[0] + np.arange(side - shape[0] + 1)[:, None] * (at[1] - at[0]))
        errors = [_error(got, weight.known[:count], tensor) for got in everywhere]
        found.append(Form(swapped, 0, int(np.argmin(errors))))
    return found


def _error(got: FloatArray, known: FloatArray, tensor: ir.TensorProtocol) -> float:
    """Relative distance of an initializer's numbers to known ones, rounded to its dtype."""
    wanted = known.astype(tensor.dtype.numpy()).astype(np.float32)
    size = max(float(np.linalg.norm(wanted)), float(np.linalg.norm(got)))
    return float(np.linalg.norm(got - wanted)) / size if size else 0.0


def _numbers(tensor: ir.TensorProtocol, at: FloatArray) -> FloatArray:
    if isinstance(tensor, ir.ExternalTensor):  # only pages that are looked at
        size = int(np.prod(tensor.shape.numpy()))
        flat = np.memmap(tensor.path, tensor.dtype.numpy(), "r", tensor.offset or 0, (size,))
        return np.asarray(flat[at]).astype(np.float32)
    return tensor.numpy().reshape(-1)[at].astype(np.float32)


def _assign(found: list[Reading], weights: Mapping[str, NewWeight]) -> dict[str, list[tuple[Reading, Form]]]:
    by_block: dict[int | None, list[Reading]] = {}
    for reading in found:
        by_block.setdefault(reading.block, []).append(reading)
    matched: dict[str, list[tuple[Reading, Form]]] = {}
    lost = []
    for name, weight in weights.items():
        candidates = by_block.get(weight.block, [])
        for fused in (False, True):
            if nearest := _nearest(weight, candidates, fused):
                matched[name] = nearest
                break
        else:
            lost.append(name)
    if lost:
        raise SurgeryError(
            f"{len(lost)} of {len(weights)} new weights replace nothing that the graph holds: "
            f"{', '.join(lost[:_SHOWN])}{' ...' if len(lost) > _SHOWN else ''}.",
            "They belong to another model than the graph, or its exporter fused or quantised them: use the graph that "
            "ghostexport exports of the model itself.",
        )
    return {name: _own(name, weights, matched) for name in matched}


def _nearest(weight: NewWeight, candidates: list[Reading], fused: bool) -> list[tuple[Reading, Form]]:
    """The readings that hold the known numbers, or of a near weight those nearest to them; none where all are far."""
    measured = {}
    for value in {r.value: None for r in candidates}:
        if value.const_value is not None and (found := distance(weight, value.const_value, fused)) is not None:
            measured[value] = found
    least = min((error for error, _ in measured.values()), default=np.inf)
    if least > (NEAR if weight.near else 0):
        return []
    return [(r, measured[r.value][1]) for r in candidates if r.value in measured and measured[r.value][0] == least]


def _own(
    name: str, weights: Mapping[str, NewWeight], matched: Mapping[str, list[tuple[Reading, Form]]]
) -> list[tuple[Reading, Form]]:
    """The readings of one weight among those of all that held the same numbers."""
    weight, same = weights[name], matched[name]
    twin, twins = weight.twin, weight.twins
    if weight.near:  # what held the same numbers is not known: what finds the same readings
        alike = [other for other, readings in matched.items() if readings == same]
        twin, twins = alike.index(name), len(alike)
    if twins == 1:
        return same
    if len(same) != twins:
        raise SurgeryError(
            f"{name} held the same numbers as {twins - 1} other weights of its block, which the graph reads in "
            f"{len(same)} places: it is not clear which is which.",
            "Use the graph that ghostexport exports of the model itself.",
        )
    return [same[twin]]


def _is_shared(target: Reading, mine: list[Reading], everywhere: list[Reading]) -> bool:
    """Whether others read the initializer through the same constant node."""
    if not target.chain:
        return False
    return any(r.chain and r.chain[0] is target.chain[0] and r not in mine for r in everywhere)


def _made(name: str, old: ir.Value, parts: list[tuple[NewWeight, Form]]) -> ir.Value | None:
    """The new initializer; None where the graph holds its numbers already."""
    tensor = old.const_value
    assert tensor is not None
    before = values(tensor)
    array = before.astype(np.float32) if before.dtype != np.float64 else before
    for weight, form in parts:
        array = form.put(weight.value.astype(array.dtype), array)
    new = new_initializer(name, array, tensor.dtype)
    assert new.const_value is not None
    return None if np.array_equal(new.const_value.numpy(), before) else new


def _redirect(target: Reading, new: ir.Value, shared: bool) -> None:
    """Makes one reading that of the new weight, with a chain of its own where others read the old one through it."""
    if not target.chain:
        target.node.replace_input_with(target.index, new)
        return
    if not shared:
        first = target.chain[0]
        for index, value in enumerate(first.inputs):
            if value is target.value:
                first.replace_input_with(index, new)
        return
    old, made = target.value, new
    graph = target.chain[0].graph
    for step, node in enumerate(target.chain):
        inputs = [made if value is old else value for value in node.inputs]
        copy = ir.Node(node.domain, node.op_type, inputs, node.attributes.values(), name=f"{new.name}.{step}")
        out = copy.outputs[0]
        out.name, out.type, out.shape = f"{new.name}.{step}", node.outputs[0].type, node.outputs[0].shape
        assert isinstance(graph, ir.Graph)
        graph.insert_after(node, copy)
        old, made = node.outputs[0], out
    target.node.replace_input_with(target.index, made)
