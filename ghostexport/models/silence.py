"""Keeping other libraries' progress bars, warnings and prints off the terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def hidden_progress_bars() -> Iterator[None]:
    """Inside the block transformers draws no bars; its setting is restored afterwards.

    Its GGUF reader has a bar of its own that no setting reaches: bars are dropped on their way to stderr.
    """
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(_WithoutBars(sys.stderr)):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def silenced(*loggers: str) -> Iterator[None]:
    """Inside the block: nothing on stdout, no Python warnings, only errors from ``loggers``. Restored afterwards."""
    silenced = [logging.getLogger(name) for name in loggers]
    levels = [logger.level for logger in silenced]
    try:
        for logger in silenced:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(silenced, levels, strict=True):
            logger.setLevel(level)


class _WithoutBars(io.TextIOBase):
    """Hands on everything but bars, which begin with a carriage return and end with a line feed of their own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._in_line = False  # a line was handed on whose end is still to come

    def write(self, text: str) -> int:
        if "\r" not in text and (self._in_line or text.strip()):
            self._stream.write(text)
            self._in_line = not text.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()
