"""The gate that every ONNX file passes before anything reads or writes data it points to: it may be broken or hostile.

External data must lie in the graph's folder. One kind of link may leave it, the one of the Hugging Face cache::

    <repo>/snapshots/<revision>/model.onnx.data -> <repo>/blobs/<hash>
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from ghostexport.errors import SurgeryError

_EXPORT_AGAIN = "Export the model again."
_CHUNK = 16 << 20


@dataclass(frozen=True)
class External:
    """Where the bytes of a tensor lie: a file, relative to the graph's folder, and a range of bytes in it."""

    location: str
    offset: int
    length: int


def read_model(path: Path) -> onnx.ModelProto:
    """Reads the graph, its weights in external files unread but checked.

    Raises:
        SurgeryError: no such file, not ONNX, of an unknown opset, a value defined twice or never; external data is
            missing, truncated, overlapping, or at a location that is absolute, has ``..`` or is a link elsewhere.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SurgeryError(f"{path} cannot be read: {error.strerror}.", "Give the path of an .onnx file.") from error
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise SurgeryError(
            f"{path} is not an ONNX model: {error}", "The file is truncated or of another format."
        ) from error
    if not proto.graph.node or not proto.graph.output:
        raise SurgeryError(f"{path} has no nodes or no outputs: it is not an ONNX model.", "Give an .onnx file.")
    versions = {o.domain: o.version for o in proto.opset_import}
    opset = versions.get("", versions.get("ai.onnx"))
    newest = onnx.defs.onnx_opset_version()
    if opset is None or not 1 <= opset <= newest:
        raise SurgeryError(
            f"{path} uses opset {opset}; known here: 1 to {newest}.",
            "Update the onnx package or export with an older opset.",
        )
    _check_names(proto.graph, path, set())
    nodes = itertools.chain(proto.graph.node, *(function.node for function in proto.functions))
    _check_external(itertools.chain(proto.graph.initializer, _tensors(nodes)), path)
    return proto


def external(tensor: onnx.TensorProto) -> External | None:
    """Where the bytes of a tensor lie; None when they are in the model file.

    Raises:
        SurgeryError: offset or length are no numbers, or the tensor has no size in bytes.
    """
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return None
    entries = {entry.key: entry.value for entry in tensor.external_data}
    for key in ("offset", "length"):
        if not entries.get(key, "0").isdecimal():
            raise SurgeryError(f"Weight {_short(tensor.name)} has {key} {_short(entries[key])}.", _EXPORT_AGAIN)
    length = int(entries["length"]) if "length" in entries else _nbytes(tensor)
    return External(entries.get("location", ""), int(entries.get("offset", 0)), length)


def refer(tensor: onnx.TensorProto, where: External) -> None:
    """Makes ``where`` the place of the tensor's bytes."""
    del tensor.external_data[:]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key in ("location", "offset", "length"):
        tensor.external_data.add(key=key, value=str(getattr(where, key)))


def read_bytes_of(path: Path, offset: int, length: int) -> Iterator[bytes]:
    """A range of a data file, in chunks.

    Raises:
        SurgeryError: the file ends inside it.
    """
    with path.open("rb") as file:
        file.seek(offset)
        while length > 0:
            chunk = file.read(min(length, _CHUNK))
            if not chunk:
                raise SurgeryError(f"{path} ended early.", "The data file is truncated.")
            length -= len(chunk)
            yield chunk


def _check_names(graph: onnx.GraphProto, path: Path, outer: set[str]) -> None:
    own = {t.name for t in graph.initializer}
    if len(own) != len(graph.initializer):
        raise SurgeryError(f"{path}: two initializers have the same name.", _EXPORT_AGAIN)
    inputs = [value.name for value in graph.input]
    if len(set(inputs)) != len(inputs):
        raise SurgeryError(f"{path}: two inputs have the same name.", _EXPORT_AGAIN)
    own.update(inputs)  # up to IR version 3 initializers had to be inputs as well
    for node in graph.node:
        for name in node.output:
            if name and name in own:
                raise SurgeryError(f"{path}: the value {_short(name)} is defined twice.", _EXPORT_AGAIN)
            own.add(name)
    defined = outer | own
    outputs = [value.name for value in graph.output]
    if len(set(outputs)) != len(outputs):
        raise SurgeryError(f"{path}: an output is listed twice.", _EXPORT_AGAIN)
    for name in (*(name for node in graph.node for name in node.input), *outputs):
        if name and name not in defined:
            raise SurgeryError(f"{path}: the value {_short(name)} is used and never defined.", _EXPORT_AGAIN)
    for node in graph.node:
        for inner in _inner_graphs(node):
            _check_names(inner, path, defined)


def _inner_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    """Tensors in the attributes of nodes and everywhere in their inner graphs."""
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
        for inner in _inner_graphs(node):
            yield from inner.initializer
            yield from _tensors(inner.node)


def _nbytes(tensor: onnx.TensorProto) -> int:
    try:
        return math.ceil(float(ir.DataType(tensor.data_type).itemsize * math.prod(tensor.dims)))
    except (ValueError, TypeError) as error:
        raise SurgeryError(f"Weight {_short(tensor.name)} cannot lie outside: {error}.", _EXPORT_AGAIN) from error


def _check_external(tensors: Iterable[onnx.TensorProto], path: Path) -> None:
    sizes: dict[str, int] = {}
    ranges: dict[str, set[tuple[int, int, str]]] = {}
    for tensor in tensors:
        where = external(tensor)
        if where is None:
            continue
        if where.location not in sizes:
            sizes[where.location] = _file_size(where.location, tensor.name, path)
        name, needed, end = _short(tensor.name), _nbytes(tensor), where.offset + where.length
        if where.length != needed:
            raise SurgeryError(
                f"Weight {name}: offset {where.offset} and length {where.length} do not fit {needed} bytes of data.",
                _EXPORT_AGAIN,
            )
        if end > sizes[where.location]:
            raise SurgeryError(
                f"External data {where.location} of {path.name} has {sizes[where.location]} of at least {end} bytes: "
                f"weight {name} ends there.",
                "The data file is truncated or belongs to another graph.",
            )
        if where.length:
            ranges.setdefault(where.location, set()).add((where.offset, end, name))
    for location, spans in ranges.items():
        for first, second in itertools.pairwise(sorted(spans)):
            if second[0] < first[1] and second[:2] != first[:2]:
                raise SurgeryError(f"Weights {first[2]} and {second[2]} overlap in {location!r}.", _EXPORT_AGAIN)


def _file_size(location: str, weight: str, graph: Path) -> int:
    windows, posix = PureWindowsPath(location), PurePosixPath(location)
    anchored = posix.is_absolute() or windows.drive or windows.root
    if anchored or ".." in (*posix.parts, *windows.parts) or "\0" in location:
        raise SurgeryError(
            f"Weight {_short(weight)} points outside the model's folder: {_short(location)}.",
            "External data must be a file beside the graph.",
        )
    path, folder = graph.parent / location, graph.parent.resolve()
    try:
        target = path.resolve()
        size = path.stat().st_size if path.is_file() else None
    except OSError as error:
        raise SurgeryError(f"Data file {_short(location)} cannot be read: {error.strerror}.") from error
    if size is None:
        raise SurgeryError(
            f"External data {_short(location)[1:-1]} of {graph.name} is missing in {graph.parent}.",
            "Keep both together, or export again.",
        )
    if not target.is_relative_to(folder) and not _is_blob(target, folder):
        raise SurgeryError(
            f"Data file {_short(location)} is a link that leaves {graph.parent}.",
            "Copy graph and data into one folder.",
        )
    return size


def _is_blob(target: Path, folder: Path) -> bool:
    """Whether ``target`` is a blob of the Hugging Face repository one of whose snapshots ``folder`` is (or is in)."""
    for revision in (folder, *folder.parents):
        if revision.parent.name == "snapshots":
            blobs = revision.parent.parent / "blobs"
            return target.parent == blobs and not blobs.is_symlink()
    return False


def _short(name: str) -> str:
    return repr(name if len(name) <= 120 else f"{name[:60]}...{name[-40:]}")
