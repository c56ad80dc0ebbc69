"""ONNX files with external data: load without reading weights, save without copying them.

A variant refers to the data file of the graph it came from; only new weights are written, into ``<name>.onnx.data``
(format: raw little-endian tensors, in the order of the initializers, each at a multiple of 64 bytes).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, EncodeError
from onnx_ir import external_data as ir_external

from ghostexport.errors import RunFolderError, SurgeryError
from ghostexport.files import atomic_path, require_space
from ghostexport.surgery.hostile import check_external, check_proto

_ALIGN = 64
_ALIGN_LARGE, _LARGE = 65536, 1 << 20  # large tensors start on a page, so that runtimes can map them
_CHUNK = 16 << 20


def load_graph(path: Path) -> ir.Model:
    """Reads the graph; weights in external files stay on disk.

    Raises:
        SurgeryError: no such file, not ONNX, malformed, or its external data is missing, truncated or elsewhere.
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
            f"{path} is not an ONNX file: {error}", "The file is truncated or of another format."
        ) from error
    del data
    check_proto(proto, path)
    try:
        model = ir.from_proto(proto)
    except Exception as error:
        root: BaseException = error
        while root.__cause__ is not None:  # onnx-ir wraps the reason once per nesting level
            root = root.__cause__
        raise SurgeryError(f"{path} is not a valid ONNX graph: {root}", "Export the model again.") from error
    ir_external.set_base_dir(model.graph, path.parent)
    try:
        model.graph.sort()
    except ValueError as error:
        raise SurgeryError(f"{path}: the graph has a cycle.", "Export the model again.") from error
    check_external(external_tensors(model), path.parent)
    return model


def external_tensors(model: ir.Model) -> list[ir.ExternalTensor]:
    """Every tensor of the model that lives in an external file: initializers and node attributes, inner graphs too."""
    return [t for t in _tensors(model) if isinstance(t, ir.ExternalTensor)]


def _tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    graphs = [model.graph, *model.graph.subgraphs()]
    for function in model.functions.values():
        graphs += [function.graph, *function.graph.subgraphs()]
    for graph in graphs:
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.TENSOR:
                    yield attribute.as_tensor()
                elif attribute.type == ir.AttributeType.TENSORS:
                    yield from attribute.as_tensors()


def save_graph(model: ir.Model, output: Path, new: list[ir.Value], *, self_contained: bool) -> tuple[int, list[str]]:
    """Writes ``output`` and, where there are new weights, ``<output>.data``; both or neither.

    Args:
        new: initializers whose data is in memory and goes into the data file.
        self_contained: write all external data into one compact file instead of referring to the source's.

    Returns:
        bytes of the files written, and the names of the data files the graph refers to.

    Raises:
        RunFolderError: the disk is full or the folder is not writable.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    data_path = output.with_name(_data_name(model, output))
    moved = _holders(model) if self_contained else []
    needed = sum(t.nbytes for t in {id(h.tensor): h.tensor for h in moved}.values())
    needed += sum(value.const_value.nbytes for value in new if value.const_value is not None)
    require_space(output.parent, needed + (16 << 20), f"{output.name} and its data")
    with contextlib.ExitStack() as stack:
        written = 0
        if moved or new:
            temporary = stack.enter_context(atomic_path(data_path))
            written = _write_data(temporary, data_path, moved, new, output.parent)
        else:
            data_path.unlink(missing_ok=True)  # left by an earlier run with an operator
        graph_file = stack.enter_context(atomic_path(output))
        bytes_ = _serialize(model)
        graph_file.write_bytes(bytes_)
    files = sorted({Path(t.location).as_posix() for t in external_tensors(model)})
    return written + len(bytes_), files


def _serialize(model: ir.Model) -> bytes:
    try:
        return bytes(ir.to_proto(model).SerializeToString(deterministic=True))
    except (ValueError, EncodeError) as error:
        raise SurgeryError(
            f"The graph with its weights inside exceeds the 2 GB limit of the format: {error}", "Use external data."
        ) from error


class _Holder:
    """Where a tensor sits, so that it can be replaced by one at another place on disk."""

    def __init__(self, tensor: ir.ExternalTensor, value: ir.Value | None, node: ir.Node | None, key: str) -> None:
        self.tensor, self.value, self.node, self.key = tensor, value, node, key

    def put(self, tensor: ir.ExternalTensor) -> None:
        if self.value is not None:
            self.value.const_value = tensor
        elif self.node is not None:
            self.node.attributes[self.key] = ir.AttrTensor(self.key, tensor)


def _holders(model: ir.Model) -> list[_Holder]:
    holders = []
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                holders.append(_Holder(value.const_value, value, None, ""))  # noqa: PERF401 - two kinds in one loop
        for node in graph:
            for key, attribute in node.attributes.items():
                if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                    holders.append(_Holder(attribute.value, None, node, key))
    return holders


def _write_data(temporary: Path, final: Path, moved: list[_Holder], new: list[ir.Value], folder: Path) -> int:
    places: dict[tuple[str, int, int], int] = {}
    with temporary.open("wb") as file:
        for holder in moved:
            tensor = holder.tensor
            offset, length = tensor.offset or 0, tensor.length if tensor.length is not None else tensor.nbytes
            source = (str(tensor.path), offset, length)
            if source not in places:
                places[source] = _align(file, length)
                _copy_range(Path(tensor.path), offset, length, file)
            holder.put(_external(tensor, final, places[source], length, folder))
        for value in new:
            tensor_ = value.const_value
            assert tensor_ is not None
            at = _align(file, tensor_.nbytes)
            file.write(tensor_.tobytes())
            value.const_value = _external(tensor_, final, at, tensor_.nbytes, folder)
        return file.tell()


def _external(tensor: ir.TensorProtocol, path: Path, offset: int, length: int, folder: Path) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        location=path.name,
        offset=offset,
        length=length,
        dtype=tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=tensor.name or "",
        base_dir=folder,
    )


def _align(file: BinaryIO, length: int) -> int:
    step = _ALIGN_LARGE if length >= _LARGE else _ALIGN
    padding = -file.tell() % step
    file.write(b"\0" * padding)
    return file.tell()


def _copy_range(source: Path, offset: int, length: int, target: BinaryIO) -> None:
    with source.open("rb") as file:
        file.seek(offset)
        while length > 0:
            chunk = file.read(min(length, _CHUNK))
            if not chunk:
                raise SurgeryError(f"{source} ended early.", "The data file is truncated.")
            target.write(chunk)
            length -= len(chunk)


def _data_name(model: ir.Model, output: Path) -> str:
    """``<output>.data``, or ``<output>.new.data`` when the source's data file has that name."""
    taken = {Path(tensor.location).name for tensor in external_tensors(model)}
    name = f"{output.name}.data"
    return f"{output.name}.new.data" if name in taken else name


def copy_data(source: Path, target: Path) -> None:
    """Copies a data file, unless the same one is there.

    Raises:
        RunFolderError: another file has that name, or the disk is full.
    """
    source = source.resolve()
    if target.exists():
        there, here = target.stat(), source.stat()
        if target.samefile(source) or (there.st_size == here.st_size and there.st_mtime_ns == here.st_mtime_ns):
            return
        raise RunFolderError(f"{target} exists and is not the data file {source}.", "Choose an empty output folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    require_space(target.parent, source.stat().st_size, target.name)
    with atomic_path(target) as temporary:
        shutil.copyfile(source, temporary)
        shutil.copystat(source, temporary)
