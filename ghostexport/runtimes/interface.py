"""What a decoder graph takes and gives: its bindings with the role of every dim, KV pairs and weight bytes.

Exported symbols are not linked to each other (the mask's length is its own symbol), so roles come from this table::

    input_ids, position_ids   [batch, tokens]
    attention_mask            [batch, total]                total = past + tokens
    inputs_embeds             [batch, tokens, C]
    KV input                  [batch, heads, past, head_dim]   (or past at axis 1, when that is the symbolic one)
    logits                    [batch, tokens, V]
    KV output                 as its input, with total in place of past
    state, in and out         [batch, ...]                  of recurrent and convolutional blocks; fixed numbers
    write_indices             [batch]                       past, for a cache that is updated in place
    nonpad_kv_seqlen          [batch]                       total, likewise

A cache that the graph updates in place (``TensorScatter``, ``TRT_KVCacheUpdate``) has a fixed capacity in place of
past and total. A dim that is a number stays a number; a symbol spelled as a number (``"16"``) is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ghostexport.errors import BuildError, SurgeryError
from ghostexport.kv_names import pair_kv, parse_kv_name
from ghostexport.onnxfile import external, read_model
from ghostexport.operators import Operator, OperatorSet
from ghostexport.runtimes.base import Tensor

if TYPE_CHECKING:
    import onnx

_ROLES: dict[str, tuple[str, ...]] = {
    "input_ids": ("batch", "tokens"),
    "position_ids": ("batch", "tokens"),
    "attention_mask": ("batch", "total"),
    "inputs_embeds": ("batch", "tokens", "hidden"),
    "logits": ("batch", "tokens", "vocabulary"),
    "write_indices": ("batch",),
    "nonpad_kv_seqlen": ("batch",),
}

#: Operators whose output is their first input with rows overwritten: the two share one buffer in an engine.
_IN_PLACE = ("TensorScatter", "TRT_KVCacheUpdate")

_COMPUTE = ("MatMul", "Mul", "Add")


@dataclass(frozen=True)
class Interface:
    """A decoder graph seen from outside.

    Attributes:
        inputs, outputs: in graph order.
        kv: ``(past input, present output)`` names.
        capacity: tokens that a cache updated in place holds; None where the cache grows with every call.
        weight_bytes: bytes of all initializers.
        data_files: external data files, absolute.
        operators: distinct ``domain::op_type`` of the nodes.
        weight_types: distinct ONNX types of the initializers (``FLOAT``, ``INT4``, ...).
        spliced: operator initializers ``ghost.{b}.*``: name -> shape.
        spliced_nodes: names of the operator's nodes that compute (casts and constants aside).
        metadata: the model's metadata, such as what surgery recorded.
        opset: version of the default operator set.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    kv: tuple[tuple[str, str], ...]
    capacity: int | None
    weight_bytes: int
    data_files: tuple[Path, ...]
    operators: frozenset[str]
    weight_types: frozenset[str]
    spliced: dict[str, tuple[int, ...]]
    spliced_nodes: tuple[str, ...]
    metadata: dict[str, str]
    opset: int

    @property
    def dtype(self) -> str:
        """Dtype of the KV cache, which is that of the residual stream; of the logits when there is no cache."""
        kv = [(name.is_recurrent, t.dtype) for t in self.inputs if (name := parse_kv_name(t.name))]
        return min(kv, key=lambda cache: cache[0])[1] if kv else self.outputs[0].dtype


def read_interface(path: Path) -> Interface:
    """Reads the interface of an ONNX decoder without loading its weights.

    Raises:
        BuildError: the file is not a readable ONNX model, its external data is missing or outside its folder, an
            input has a role this project does not know, or only a part of the cache is updated in place.
    """
    model = load_graph(path)
    graph = model.graph
    try:
        kv = tuple(pair_kv([v.name for v in graph.input], [v.name for v in graph.output]))
    except ValueError as error:
        raise BuildError(f"{path}: {error}.", "Renumber the cache densely: ghostexport surgery does.") from None
    outside = {i.name: where for i in graph.initializer if (where := external(i))}
    updated = {(n.input[0], n.output[0]) for n in graph.node if n.op_type in _IN_PLACE}
    in_place = bool(kv) and updated >= set(kv)
    inputs = tuple(_tensor(path, value, output=False, in_place=in_place) for value in graph.input)
    outputs = tuple(_tensor(path, value, output=True, in_place=in_place) for value in graph.output)
    return Interface(
        inputs=inputs,
        outputs=outputs,
        kv=kv,
        capacity=_capacity(path, inputs, {past for past, _ in kv}) if in_place else None,
        weight_bytes=sum(outside[i.name].length if i.name in outside else i.ByteSize() for i in graph.initializer),
        data_files=tuple(dict.fromkeys(path.parent / where.location for where in outside.values())),
        operators=frozenset(f"{node.domain or 'ai.onnx'}::{node.op_type}" for node in graph.node),
        weight_types=frozenset(ir.DataType(i.data_type).name for i in graph.initializer),
        spliced={i.name: tuple(i.dims) for i in graph.initializer if i.name.startswith("ghost.")},
        spliced_nodes=tuple(n.name for n in graph.node if n.name.startswith("ghost.") and n.op_type in _COMPUTE),
        metadata={entry.key: entry.value for entry in model.metadata_props},
        opset=next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0),
    )


def decoder_feeds(
    input_ids: NDArray[np.int64], past: int, attention_mask: NDArray[np.int64] | None = None
) -> dict[str, NDArray[np.int64]]:
    """Every input of one call beside the KV cache, by name; a graph takes those it has.

    A position counts the attended tokens before it, so rows may be padded on either side; padding has position 0.

    Args:
        input_ids: ``(B, T)``.
        past: tokens in the cache.
        attention_mask: ``(B, past + T)`` of 0 and 1; all ones when None.

    Raises:
        ValueError: the mask has another shape.
    """
    batch, tokens = input_ids.shape
    total = past + tokens
    mask = np.ones((batch, total), np.int64) if attention_mask is None else attention_mask.astype(np.int64)
    if mask.shape != (batch, total):
        raise ValueError(f"the attention mask is {mask.shape}, {tokens} tokens after {past} need {(batch, total)}")
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "position_ids": np.maximum(mask.cumsum(-1) - 1, 0)[:, past:],
        "write_indices": np.full(batch, past),
        "nonpad_kv_seqlen": np.full(batch, total),
    }


def load_graph(path: Path) -> onnx.ModelProto:
    """The ONNX model without its external data.

    Raises:
        BuildError: missing or not ONNX, or its external data is missing or outside its folder.
    """
    if not path.exists():
        raise BuildError(f"{path} does not exist.", "Make it with: ghostexport surgery RUN")
    try:
        return read_model(path)
    except SurgeryError as error:
        raise BuildError(error.message, error.remedy) from error


def _capacity(path: Path, inputs: tuple[Tensor, ...], kv: set[str]) -> int:
    # [batch, heads, capacity, head_dim]: both operators update axis -2
    found = {t.dims[2] for t in inputs if t.name in kv and len(t.dims) == 4}
    capacity = next(iter(found), None)
    if len(found) != 1 or not isinstance(capacity, int):
        raise BuildError(
            f"{path}: the cache is updated in place, but its capacity is not one fixed number: "
            f"{sorted(map(str, found))}.",
            "Export with a static cache of one length.",
        )
    return capacity


def _tensor(path: Path, value: Any, *, output: bool, in_place: bool) -> Tensor:
    kind = value.type.tensor_type
    # dim_value of a dim without value and symbol reads 0: an anonymous symbol
    raw = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in kind.shape.dim]
    dims = tuple(int(d) if isinstance(d, str) and d.isdigit() else d for d in raw)
    name = str(ir.DataType(kind.elem_type).numpy())
    return Tensor(value.name, name, _roles(path, value.name, dims, output=output, in_place=in_place))


def _roles(
    path: Path, name: str, dims: tuple[int | str, ...], *, output: bool, in_place: bool
) -> tuple[int | str, ...]:
    kv = parse_kv_name(name, output=output)
    is_kv = kv is not None
    if kv is not None and kv.is_state:
        table: tuple[str, ...] = ("batch", *["state"] * (len(dims) - 1))
    elif is_kv and len(dims) == 4:
        axis = 1 if isinstance(dims[1], str) and isinstance(dims[2], int) else 2
        table = ("batch", "heads", "heads", "head_dim")
        table = (*table[:axis], "total" if output else "past", *table[axis + 1 :])
    elif name in _ROLES and len(dims) == len(_ROLES[name]):
        table = _ROLES[name]
    elif all(isinstance(d, int) or d in ("batch", "tokens", "past", "total") for d in dims) or output:
        return dims
    else:
        raise BuildError(
            f"{path}: input {name} {list(dims)} has dims of unknown role.",
            f"Known inputs: {', '.join(n for n in _ROLES if n != 'logits')} and the KV cache.",
        )
    roles = tuple(d if isinstance(d, int) else role for d, role in zip(dims, table, strict=True))
    for d, role in zip(dims, table, strict=True):
        if role in ("past", "total") and isinstance(d, int) and not output and not (is_kv and in_place):
            raise BuildError(
                f"{path}: the {role} length of input {name} {list(dims)} is baked in as {d}.",
                "Export with a dynamic cache length (two or more past tokens in the sample inputs).",
            )
    loose = [role for role in roles if role in ("heads", "head_dim", "hidden", "state")]
    if loose and not output:
        raise BuildError(f"{path}: input {name} {list(dims)} has no fixed {loose[0]}.", "Export with that dim static.")
    return roles


def operator_weights(
    spliced: Mapping[str, tuple[int, ...]], operators: OperatorSet, engine: Path
) -> dict[str, NDArray[Any]]:
    """New values of the initializers in ``spliced``, by name, in the operators' own precision.

    A dense place ``ghost.{b}.delta`` takes any operator (low-rank and diagonal ones are multiplied out); factors and a
    diagonal take only their own form; a bias the new operator lacks becomes zero.

    Args:
        spliced: operator initializers of the engine: name -> shape.
        operators: what to put there.
        engine: for messages.

    Raises:
        BuildError: the engine has no operator, or places, forms, shapes, folds or a bias do not fit.
    """
    if not spliced:
        raise BuildError(f"{engine} has no operator to swap.", "Swap an engine of a variant with operators.")
    places = {int(name.split(".")[1]) for name in spliced}
    if not places <= set(range(len(operators.operators))):
        raise BuildError(
            f"{engine} has operators at boundaries {sorted(places)}, {operators.name!r} is for {operators.plan}.",
            "Use operators of the same plan.",
        )
    weights: dict[str, NDArray[Any]] = {}
    for b, operator in enumerate(operators.operators):
        prefix, offered = f"ghost.{b}.", _forms(operator)
        own = {name.removeprefix(prefix): shape for name, shape in spliced.items() if name.startswith(prefix)}
        needed = _stored(operator)
        if operator.matrix is not None and "delta" in own:  # multiplied out
            needed = {"delta"} | needed & {"bias"}
        if operator.folds or not needed <= own.keys():
            what = "changes weights of surviving blocks" if operator.folds else f"needs {', '.join(sorted(needed))}"
            raise BuildError(
                f"Operator {operators.name!r} {what} at boundary {b}; {engine} has {', '.join(sorted(own)) or 'none'}.",
                "Build an engine of that variant.",
            )
        for key, shape in own.items():
            array = offered.get(key)
            weights[prefix + key] = np.zeros(shape, np.float32) if array is None else array
    for name, array in weights.items():
        if array.shape != tuple(spliced[name]):
            raise BuildError(
                f"{name} of {operators.name!r} has shape {list(array.shape)}, the engine's has {list(spliced[name])}.",
                "Use operators fitted on the same model, of the same rank.",
            )
    return weights


def _forms(operator: Operator) -> dict[str, NDArray[Any] | None]:
    """Every spelling of an operator by initializer suffix."""
    factor_u, factor_v = operator.factors or (None, None)
    return {
        "delta": operator.matrix,
        "factor_u": factor_u,
        "factor_v": factor_v,
        "diagonal": operator.diagonal,
        "bias": operator.bias,
    }


def _stored(operator: Operator) -> set[str]:
    """The suffixes under which the operator is stored."""
    fields = {"delta": operator.delta, "diagonal": operator.diagonal, "bias": operator.bias}
    stored = {key for key, array in fields.items() if array is not None}
    return stored | ({"factor_u", "factor_v"} if operator.factors is not None else set())
