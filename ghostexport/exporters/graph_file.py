"""Writing an exported graph: one ``.onnx`` file and one data file beside it, both or none."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ghostexport.errors import ExportError, RunFolderError
from ghostexport.files import require_space, sha256_file
from ghostexport.kv_names import group_by_block, pair_kv, parse_kv_name

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
        num_blocks: decoder blocks, each with one key and one value cache.
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


def check_interface(graph: ir.Graph, num_blocks: int) -> None:
    """Checks that an export is a decoder with a full KV cache.

    Raises:
        ExportError: token ids or logits are missing, or the KV caches are not those of blocks 0 to ``num_blocks - 1``.
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
    if list(blocks) != list(range(num_blocks)) or any(len(names) != 2 for names in blocks.values()):
        raise ExportError(
            f"The exported graph has KV inputs for blocks {list(blocks)}; the model has {num_blocks} blocks, each of "
            "which needs keys and values.",
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


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def stream_dtype(graph: ir.Graph) -> str:
    """Dtype of the KV cache, which is that of the residual stream."""
    dtype = next(value.dtype for value in graph.inputs if parse_kv_name(value.name or ""))
    assert dtype is not None
    return str(dtype.numpy())


def _names(values: Sequence[ir.Value]) -> list[str]:
    return [value.name or "" for value in values]
