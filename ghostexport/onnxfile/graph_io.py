"""Loads graphs without reading weights and saves them without copying weights.

A variant refers to the data file of the graph it came from; only new weights are written, into ``<name>.onnx.data``
(format: raw little-endian tensors, in the order of the initializers, each at a multiple of 64 bytes).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
from google.protobuf.message import EncodeError
from numpy.typing import NDArray
from onnx_ir import external_data as ir_external

from ghostexport.errors import RunFolderError, SurgeryError
from ghostexport.files import atomic_path, require_space, sha256_file
from ghostexport.onnxfile.gate import read_bytes_of, read_model

#: Our names of the dtypes that weights and streams have; numpy's are ``DTYPES[name].numpy()``.
DTYPES = {
    "float32": ir.DataType.FLOAT,
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
}

_ALIGN = 64
_ALIGN_LARGE, _LARGE = 65536, 1 << 20  # large tensors start on a page, so that runtimes can map them
# What exporters write on nodes that only repeats or leaks (stack traces have absolute paths); name_scopes, namespace
# and folded_from tell where a node or weight came from and stay.
_NOISE = (
    "pkg.torch.onnx.stack_trace",
    "pkg.torch.onnx.fx_node",
    "pkg.torch.onnx.class_hierarchy",
    "pkg.torch.export.ExportedProgram.graph_signature",
    "pkg.torch.export.ExportedProgram.range_constraints",
    "pkg.torch.export.graph_signature.InputSpec.kind",
    "pkg.torch.export.graph_signature.InputSpec.persistent",
    "pkg.torch.export.graph_signature.OutputSpec.kind",
    "pkg.torch.onnx.original_node_name",
)


def load_graph(path: Path) -> ir.Model:
    """Reads the graph; weights in external files stay on disk.

    Raises:
        SurgeryError: as :func:`ghostexport.onnxfile.read_model`; also where the graph has a cycle or is malformed.
    """
    proto = read_model(path)
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
    return model


def external_tensors(model: ir.Model) -> list[ir.ExternalTensor]:
    """Every tensor of the model that lives in an external file: initializers and node attributes, inner graphs too."""
    return [tensor for tensor, _ in _places(model)]


def initializer(tensor: ir.TensorProtocol) -> ir.Value:
    """A value that holds ``tensor``, of its name, shape and dtype; to be registered in a graph."""
    shape = ir.Shape(tensor.shape.numpy())
    return ir.Value(name=tensor.name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)


def values(tensor: ir.TensorProtocol) -> NDArray[Any]:
    """The numbers of a weight. onnx-ir reads no data file that is a link or has a second name; checked ones may be."""
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor.numpy()
    shape, kind = tensor.shape.numpy(), tensor.dtype.numpy()
    count = int(np.prod(shape))
    if tensor.dtype.bitwidth == 4:  # two to a byte, the first in the low half
        packed = np.fromfile(tensor.path, np.uint8, (count + 1) // 2, offset=tensor.offset or 0)
        halves = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)[:count]
        signed = (halves ^ 8).astype(np.int8) - 8 if tensor.dtype == ir.DataType.INT4 else halves
        return (signed.astype(kind) if tensor.dtype.is_integer() else halves.view(kind)).reshape(shape)
    return np.fromfile(tensor.path, kind, count, offset=tensor.offset or 0).reshape(shape)


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers of the main graph."""
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)


def strip_metadata(model: ir.Model) -> None:
    """Removes stack traces (absolute paths) and exporter internals; keeps name scopes and weight origins."""
    holders: list[Any] = [model, *model.functions.values()]
    for graph in _graphs(model):
        nodes = list(graph.all_nodes())
        for node in nodes:
            node.doc_string = None
        values = [*graph.inputs, *graph.initializers.values(), *(v for node in nodes for v in node.outputs)]
        holders += [graph, *nodes, *values]
    for holder in holders:
        for key in _NOISE:
            holder.metadata_props.pop(key, None)


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
    moved = list(_places(model)) if self_contained else []
    needed = sum(t.nbytes for t in {id(tensor): tensor for tensor, _ in moved}.values())
    needed += sum(value.const_value.nbytes for value in new if value.const_value is not None)
    require_space(output.parent, needed + (16 << 20), f"{output.name} and its data")
    with contextlib.ExitStack() as stack:
        written = 0
        if moved or new:
            temporary = stack.enter_context(atomic_path(data_path))
            written = _write_data(temporary, data_path, moved, new)
        else:
            data_path.unlink(missing_ok=True)  # left by an earlier run with an operator
        graph_file = stack.enter_context(atomic_path(output))
        bytes_ = _serialize(model)
        graph_file.write_bytes(bytes_)
    files = sorted({Path(t.location).as_posix() for t in external_tensors(model)})
    return written + len(bytes_), files


def copy_data(source: Path, target: Path, *, replace: bool = False) -> None:
    """Copies a data file, unless the same one is there. Not a link: ``onnx.load`` refuses linked data files.

    Args:
        replace: another file of that name is overwritten.

    Raises:
        RunFolderError: another file has that name, or the disk is full.
    """
    source = source.resolve()
    if target.exists():
        there, here = target.stat(), source.stat()
        alike = there.st_size == here.st_size
        if target.samefile(source) or (alike and there.st_mtime_ns == here.st_mtime_ns):
            return
        if alike and sha256_file(target) == sha256_file(source):
            return
        if not replace:
            raise RunFolderError(
                f"{target} exists and is not the data file {source}.", "Choose an empty output folder."
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    require_space(target.parent, source.stat().st_size, target.name)
    with atomic_path(target) as temporary:
        shutil.copyfile(source, temporary)
        shutil.copystat(source, temporary)


def _graphs(model: ir.Model) -> Iterator[ir.Graph]:
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        yield graph
        yield from graph.subgraphs()


def _places(model: ir.Model) -> Iterator[tuple[ir.ExternalTensor, Callable[[ir.TensorProtocol], None]]]:
    """Every external tensor, and how another one is put in its place."""
    for graph in _graphs(model):
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value.const_value, _setter(value)
        for node in graph:
            for key, attribute in list(node.attributes.items()):
                if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                    yield attribute.value, _attribute_setter(node, key)


def _setter(value: ir.Value) -> Callable[[ir.TensorProtocol], None]:
    return lambda tensor: setattr(value, "const_value", tensor)


def _attribute_setter(node: ir.Node, key: str) -> Callable[[ir.TensorProtocol], None]:
    return lambda tensor: node.attributes.update({key: ir.AttrTensor(key, tensor)})


def _serialize(model: ir.Model) -> bytes:
    try:
        return bytes(ir.to_proto(model).SerializeToString(deterministic=True))
    except (ValueError, EncodeError) as error:
        raise SurgeryError(
            f"The graph with its weights inside exceeds the 2 GB limit of the format: {error}", "Use external data."
        ) from error


def _write_data(temporary: Path, final: Path, moved: list[tuple[Any, Any]], new: list[ir.Value]) -> int:
    places: dict[tuple[str, int, int], int] = {}
    with temporary.open("wb") as file:
        for tensor, put in moved:
            offset, length = tensor.offset or 0, tensor.length if tensor.length is not None else tensor.nbytes
            source = (str(tensor.path), offset, length)
            if source not in places:
                places[source] = _align(file, length)
                file.writelines(read_bytes_of(Path(tensor.path), offset, length))
            put(_external(tensor, final, places[source], length))
        for value in new:
            fresh = value.const_value
            assert fresh is not None
            at = _align(file, fresh.nbytes)
            file.write(fresh.tobytes())
            value.const_value = _external(fresh, final, at, fresh.nbytes)
        return file.tell()


def _external(tensor: ir.TensorProtocol, path: Path, offset: int, length: int) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        location=path.name,
        offset=offset,
        length=length,
        dtype=tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=tensor.name or "",
        base_dir=path.parent,
    )


def _align(file: BinaryIO, length: int) -> int:
    step = _ALIGN_LARGE if length >= _LARGE else _ALIGN
    file.write(b"\0" * (-file.tell() % step))
    return file.tell()


def _data_name(model: ir.Model, output: Path) -> str:
    """``<output>.data``, or ``<output>.new.data`` when the source's data file has that name."""
    name = f"{output.name}.data"
    return f"{output.name}.new.data" if name in {Path(t.location).name for t in external_tensors(model)} else name
