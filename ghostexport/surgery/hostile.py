"""Checks on files that may be broken or malicious, before anything reads or writes data they point to."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
import onnx_ir as ir

from ghostexport.errors import SurgeryError

_EXPORT_AGAIN = "Export the model again."


def check_proto(proto: onnx.ModelProto, path: Path) -> None:
    """Opset known, every value defined once.

    Raises:
        SurgeryError: the file is not a well-formed ONNX model.
    """
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


def _check_numbers(graph: onnx.GraphProto, path: Path) -> None:
    for tensor in graph.initializer:
        for entry in tensor.external_data:
            if entry.key in ("offset", "length") and not entry.value.isdecimal():
                raise SurgeryError(
                    f"{path}: weight {_short(tensor.name)} has {entry.key} {_short(entry.value)}.", _EXPORT_AGAIN
                )


def _check_names(graph: onnx.GraphProto, path: Path, outer: set[str]) -> None:
    _check_numbers(graph, path)
    defined = set(outer)
    initializers = {t.name for t in graph.initializer}
    if len(initializers) != len(graph.initializer):
        raise SurgeryError(f"{path}: two initializers have the same name.", _EXPORT_AGAIN)
    own: set[str] = set(initializers)
    for value in graph.input:
        # up to IR version 3 initializers had to be inputs as well
        if value.name in own and value.name not in initializers:
            raise SurgeryError(f"{path}: two inputs are named {_short(value.name)}.", _EXPORT_AGAIN)
        own.add(value.name)
    for node in graph.node:
        for name in node.output:
            if name and name in own:
                raise SurgeryError(f"{path}: the value {_short(name)} is defined twice.", _EXPORT_AGAIN)
            own.add(name)
    defined |= own
    outputs = [value.name for value in graph.output]
    if len(set(outputs)) != len(outputs):
        raise SurgeryError(f"{path}: an output is listed twice.", _EXPORT_AGAIN)
    missing = [
        name for name in [*(n for node in graph.node for n in node.input), *outputs] if name and name not in defined
    ]
    if missing:
        raise SurgeryError(f"{path}: the value {_short(missing[0])} is used and never defined.", _EXPORT_AGAIN)
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]:
                _check_names(inner, path, defined)


def check_external(tensors: Iterable[ir.ExternalTensor], folder: Path) -> None:
    """Every external tensor lies inside ``folder``, inside its file, and overlaps no other.

    Raises:
        SurgeryError: location absolute, with ``..`` or through a link out of the folder; file missing or truncated;
            offset negative; length not that of the tensor; two tensors overlap without being the same.
    """
    root = folder.resolve()
    sizes: dict[str, int] = {}
    ranges: dict[str, set[tuple[int, int, str]]] = {}
    for tensor in tensors:
        location = str(tensor.location)
        if location not in sizes:
            sizes[location] = _file_size(location, tensor, folder, root)
        offset = tensor.offset or 0
        length = tensor.nbytes if tensor.length is None else tensor.length
        name = _short(tensor.name or "?")
        if offset < 0 or length < 0 or length != tensor.nbytes:
            raise SurgeryError(
                f"Weight {name}: offset {offset} and length {length} do not fit {tensor.nbytes} bytes of data.",
                _EXPORT_AGAIN,
            )
        if offset + length > sizes[location]:
            raise SurgeryError(
                f"Weight {name} ends at byte {offset + length} of {location!r}, which has {sizes[location]} bytes.",
                "The data file is truncated or belongs to another graph.",
            )
        if length:
            ranges.setdefault(location, set()).add((offset, offset + length, name))
    for location, spans in ranges.items():
        for first, second in _neighbours(spans):
            if second[0] < first[1] and second[:2] != first[:2]:
                raise SurgeryError(f"Weights {first[2]} and {second[2]} overlap in {location!r}.", _EXPORT_AGAIN)


def _neighbours(spans: set[tuple[int, int, str]]) -> Iterator[tuple[tuple[int, int, str], tuple[int, int, str]]]:
    ordered = sorted(spans)
    return itertools.pairwise(ordered)


def _file_size(location: str, tensor: ir.ExternalTensor, folder: Path, root: Path) -> int:
    windows, posix = PureWindowsPath(location), PurePosixPath(location)
    if (
        posix.is_absolute()
        or windows.drive
        or windows.root
        or ".." in (*posix.parts, *windows.parts)
        or "\0" in location
    ):
        raise SurgeryError(
            f"Weight {_short(tensor.name or '?')} points outside the model's folder: {_short(location)}.",
            "External data must be a file beside the graph.",
        )
    path = folder / location
    try:
        inside = path.resolve().is_relative_to(root)
        size = path.stat().st_size if path.is_file() else None
    except OSError as error:
        raise SurgeryError(f"Data file {_short(location)} cannot be read: {error.strerror}.") from error
    if size is None:
        raise SurgeryError(f"Data file {_short(location)} is missing in {folder}.", "Keep it beside the .onnx file.")
    if not inside:
        raise SurgeryError(
            f"Data file {_short(location)} is a link that leaves {folder}.", "Copy graph and data into one folder."
        )
    return size


def _short(name: str) -> str:
    return repr(name if len(name) <= 120 else f"{name[:60]}...{name[-40:]}")
