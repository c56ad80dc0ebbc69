"""A fresh export: brought into canonical form, checked, and written with its data file, both or none.

Canonical form has no machine paths, integer dims as integers, four named symbols. The dynamo exporter writes a stack
trace with absolute paths on every node, writes static KV dims as the strings ``"2"`` and ``"16"`` (TensorRT would read
them as dynamic), and gives every KV input a length symbol of its own. Canonical names::

    input_ids       [batch, tokens]              past KV      [batch, heads, past, head_dim]
    attention_mask  [batch, past + tokens]       present KV   [batch, heads, past + tokens, head_dim]
    position_ids    [batch, tokens]              logits       [batch, tokens, vocabulary]
                                                 states       [batch, ...], in and out: nothing counts tokens
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ghostexport.errors import ExportError, RunFolderError
from ghostexport.files import require_space, sha256_file
from ghostexport.kv_names import group_by_block, pair_kv, parse_kv_name
from ghostexport.onnxfile import strip_metadata, weight_bytes

BATCH, TOKENS, PAST = "batch", "tokens", "past"
TOTAL = f"{PAST} + {TOKENS}"
_SYMBOL = re.compile(r"[A-Za-z_]\w*")
_PACKAGES = {"transformers": "transformers", "optimum": "optimum-onnx"}


@dataclass(frozen=True)
class OnnxGraphFile:
    """An exported decoder on disk.

    Attributes:
        path: the graph; its weights are in ``data_path``.
        producer: ``transformers`` or ``optimum``.
        opset: ONNX operator set.
        dtype: of weights and residual stream: ``float32``, ``float16`` or ``bfloat16``.
        hidden_size: ``C``.
        num_blocks: decoder blocks.
        graph_sha256, data_sha256: of the two files.
        bytes: of both files together.
    """

    path: Path
    producer: str
    opset: int
    dtype: str
    hidden_size: int
    num_blocks: int
    graph_sha256: str
    data_sha256: str
    bytes: int

    @property
    def data_path(self) -> Path:
        return data_path(self.path)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"path": self.path.name}


def data_path(graph: Path) -> Path:
    """Where the weights of ``graph`` lie: ``dense.onnx.data`` for ``dense.onnx``."""
    return graph.with_name(f"{graph.name}.data")


def canonicalise(model: ir.Model) -> ir.Model:
    """Brings a fresh export into canonical form, in place, and returns it.

    Ensures:
        no stack traces or exporter internals in any ``metadata_props`` or doc string; every dim is an integer or a
        symbolic expression, never a number in quotes; batch, tokens, past and total lengths carry one name each in
        inputs, outputs and intermediate values.
    """
    strip_metadata(model)
    renames = _symbol_names(model.graph)
    for value in _values(model.graph):
        if value.shape is not None:
            value.shape = ir.Shape([_canonical_dim(dim, renames) for dim in value.shape])
    for value in model.graph.outputs:
        kv = parse_kv_name(value.name or "", output=True)
        if kv and not kv.is_state and value.shape is not None and len(value.shape) == 4:
            value.shape = ir.Shape([TOTAL if _is_total(dim) else dim for dim in value.shape])
    return model


def check_interface(graph: ir.Graph, kept: Mapping[int, int]) -> None:
    """Checks that an export is a decoder that carries everything which the model keeps from step to step.

    Args:
        graph: the export.
        kept: block -> number of its caches: keys, values and states.

    Raises:
        ExportError: token ids or logits are missing, or the caches are not those of the blocks.
    """
    inputs, outputs = _names(graph.inputs), _names(graph.outputs)
    missing = [name for name, have in (("input_ids", inputs), ("logits", outputs)) if name not in have]
    if missing:
        raise ExportError(f"The exported graph has no {' and no '.join(missing)}.", "Use a decoder-only causal LM.")
    try:
        pairs = pair_kv(inputs, outputs)
    except ValueError as error:
        raise ExportError(f"The exported KV cache is incomplete: {error}.", "Try another exporter.") from error
    blocks = group_by_block(name for name in (parse_kv_name(past) for past, _ in pairs) if name)
    found = {block: len(names) for block, names in blocks.items()}
    if found != dict(kept):
        raise ExportError(
            f"The exported graph has {found} caches by block, the model keeps {dict(kept)}.",
            "Models that share or compress their cache are not supported.",
        )


def write_graph(model: ir.Model, target: Path, *, producer: str, hidden_size: int, num_blocks: int) -> OnnxGraphFile:
    """Writes ``target`` and its data file. A killed process leaves either both files or no ``target``.

    Args:
        model: the graph with its weights in memory.
        target: final path of the graph.
        producer, hidden_size, num_blocks: as in :class:`OnnxGraphFile`.

    Raises:
        RunFolderError: no disk space, or the folder is not writable.
    """
    model.producer_name, model.producer_version = producer, importlib.metadata.version(_PACKAGES[producer])
    temporary = target.with_name(f".{target.name}.tmp")
    data = data_path(target)
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # what a killed export left
        temporary.mkdir(parents=True)
        require_space(temporary, weight_bytes(model), f"the weights of {target.name}")
        ir.save(model, temporary / target.name, external_data=data.name)
        (temporary / data.name).touch()  # a graph of small constants alone has no data file yet
        target.unlink(missing_ok=True)  # an old graph must never stand beside new weights
        (temporary / data.name).replace(data)
        (temporary / target.name).replace(target)
    except OSError as error:
        raise RunFolderError(
            f"Cannot write {target}: {error.strerror or error}.", "Check free space and permissions."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return OnnxGraphFile(
        path=target,
        producer=producer,
        opset=int(model.graph.opset_imports[""]),
        dtype=stream_dtype(model.graph),
        hidden_size=hidden_size,
        num_blocks=num_blocks,
        graph_sha256=sha256_file(target),
        data_sha256=sha256_file(data),
        bytes=target.stat().st_size + data.stat().st_size,
    )


def stream_dtype(graph: ir.Graph) -> str:
    """Dtype of the KV cache, which is that of the residual stream (a recurrent state may be wider)."""
    caches = [(kv.is_recurrent, value.dtype) for value in graph.inputs if (kv := parse_kv_name(value.name or ""))]
    dtype = min(caches, key=lambda cache: cache[0])[1]
    assert dtype is not None
    return str(dtype.numpy())


def _names(values: Sequence[ir.Value]) -> list[str]:
    return [value.name or "" for value in values]


def _symbol_names(graph: ir.Graph) -> dict[str, str]:
    """Canonical names of the exporter's symbols, read off the graph inputs."""
    names: dict[str, str] = {}
    for value in graph.inputs:
        if value.shape is None:
            continue
        if kv := parse_kv_name(value.name or ""):
            # dim 0 = batch; whatever else is symbolic is the cache length
            expected = [BATCH] + [PAST] * (0 if kv.is_state else len(value.shape) - 1)
        elif value.name == "attention_mask" and len(value.shape) == 2:
            expected = [BATCH, TOTAL]
        else:
            expected = [BATCH, TOKENS][: len(value.shape)]
        for dim, name in zip(value.shape, expected, strict=False):
            if isinstance(dim, ir.SymbolicDim) and dim.value and _SYMBOL.fullmatch(dim.value):
                names.setdefault(dim.value, name)
    return names


def _canonical_dim(dim: int | ir.SymbolicDim, names: dict[str, str]) -> int | str | None:
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    text = dim.value.strip()
    if text.lstrip("-").isdigit():
        return int(text)
    if text in names:
        return names[text]
    renamed = _SYMBOL.sub(lambda match: _operand(names.get(match.group(), match.group())), text)
    terms = sorted(term.strip() for term in renamed.split("+"))
    return TOTAL if terms == [PAST, TOKENS] else renamed


def _operand(name: str) -> str:
    return f"({name})" if " " in name else name


def _is_total(dim: int | ir.SymbolicDim) -> bool:
    return isinstance(dim, ir.SymbolicDim) and dim.value not in (BATCH, TOKENS, PAST, None)


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs
