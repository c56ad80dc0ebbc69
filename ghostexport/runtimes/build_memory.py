"""Peak host memory of a build: on a board with shared memory it decides whether an engine can be built there at all."""

from __future__ import annotations

import threading
from types import TracebackType

import psutil

_INTERVAL_SECONDS = 0.01


class PeakMemory:
    """Samples the resident memory of this process from a thread of its own while the ``with`` block runs.

    Attributes:
        nbytes: largest growth seen over the memory at the start of the block. Builders release Python's lock, so the
            thread runs beside them; a peak shorter than the 10 ms between two samples can be missed.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._process = psutil.Process()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._floor = self._process.memory_info().rss
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._done.wait(_INTERVAL_SECONDS):
            self._sample()

    def _sample(self) -> None:
        self.nbytes = max(self.nbytes, self._process.memory_info().rss - self._floor)
