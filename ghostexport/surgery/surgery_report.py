"""What surgery did, as plain data: for the manifest, the CLI's table and the tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class BoundaryReport:
    """One cut.

    Attributes:
        boundary: its number, the ``b`` of ``ghost.{b}.*``.
        span: removed blocks ``[start, stop)`` of the dense graph.
        kind: operator kind, ``none`` for a bare cut.
        site: ``boundary`` or ``mid``.
        stream_in: residual value that enters the removed blocks.
        stream_out: residual value that left them and has been replaced.
        consumers_rewired: nodes that read ``stream_out`` before and its replacement now.
        nodes_removed: number of nodes of the removed blocks.
        nodes_added, initializers_added: names.
        weights_folded: initializers replaced in surviving blocks, old name -> new name.
    """

    boundary: int
    span: tuple[int, int]
    kind: str
    site: str
    stream_in: str
    stream_out: str
    consumers_rewired: tuple[str, ...]
    nodes_removed: int
    nodes_added: tuple[str, ...] = ()
    initializers_added: tuple[str, ...] = ()
    weights_folded: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SurgeryReport:
    """Everything that changed.

    Attributes:
        source: file name.
        path: where the new graph was written (by a dry run: would be); in JSON ``output``, its name.
        identity: nothing was asked for; the output is the source byte for byte.
        blocks_before, blocks_after: decoder blocks.
        boundaries: one entry per removed span.
        nodes_before, nodes_after: nodes of all bodies.
        kv_inputs_removed, kv_outputs_removed: names.
        kv_renamed: old name -> new name, inputs and outputs.
        shape_anchors: ``Shape`` nodes re-pointed to a surviving block: node name -> new source value.
        weights_replaced: new weights of kept blocks, and of what is around the blocks: new name -> old name.
        initializers_dropped: weights no longer used, by name.
        weight_bytes_before, weight_bytes_after: bytes of all initializers of the graph.
        bytes_written: bytes of new files (graph and new data); shared data files count zero.
        data_files: external-data files the output refers to, by name in its folder.
    """

    source: str
    path: Path
    identity: bool
    blocks_before: int
    blocks_after: int
    boundaries: tuple[BoundaryReport, ...] = ()
    nodes_before: int = 0
    nodes_after: int = 0
    kv_inputs_removed: tuple[str, ...] = ()
    kv_outputs_removed: tuple[str, ...] = ()
    kv_renamed: Mapping[str, str] = field(default_factory=dict)
    shape_anchors: Mapping[str, str] = field(default_factory=dict)
    weights_replaced: Mapping[str, str] = field(default_factory=dict)
    initializers_dropped: tuple[str, ...] = ()
    weight_bytes_before: int = 0
    weight_bytes_after: int = 0
    bytes_written: int = 0
    data_files: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON-ready data, keys in declaration order."""
        data = {"source": self.source, "output": self.path.name} | asdict(self)
        del data["path"]
        data["boundaries"] = [
            {key: list(value) if isinstance(value, tuple) else value for key, value in boundary.items()}
            for boundary in data["boundaries"]
        ]
        return {key: list(value) if isinstance(value, tuple) else value for key, value in data.items()}
