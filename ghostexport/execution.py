"""How to run (device, memory, display): never hashed, never changes an artefact. What to do is a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Talk:
    """How much a command says beside its results: nothing, or every step, and where an error came from."""

    quiet: bool = False
    verbose: bool = False


#: Of this command line, set by ``--quiet`` and ``--verbose``.
talk = Talk()

#: ``progress(task, done, total)``; total None when unknown. The library never draws; the CLI's callback does.
Progress = Callable[[str, int, "int | None"], None]


@dataclass(frozen=True)
class Execution:
    """How to run: changes speed and display, never an artefact.

    Attributes:
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ... for PyTorch work; ``split`` for all devices together.
        memory: bytes of a split model that each device may hold (``0``, ``1``, ... and ``cpu``); None for all there is.
        streaming: whether a model's weights stay in the files they are mapped from, passes going through it block by
            block; None: where memory does not hold them.
        timing_cache: file of measured kernel timings that builds read and extend; None keeps none.
        scratch: folder in which long work keeps what it needs to go on after an interruption; None for nowhere.
        progress: called as ``progress(task, done, total)``; behind `` · `` in ``task`` stands how it is going.
        say: called with a line worth telling the user (a choice made and its reason).
        table: called with columns and ``(label, cells)`` rows whenever figures of a running benchmark change.
    """

    device: str = "auto"
    memory: Mapping[int | str, int] | None = None
    streaming: bool | None = None
    timing_cache: Path | None = None
    scratch: Path | None = None
    progress: Progress = field(default=lambda task, done, total: None)
    say: Callable[[str], None] = field(default=lambda line: None)
    table: Callable[[Sequence[str], Sequence[tuple[str, list[str]]]], None] = field(default=lambda columns, rows: None)
