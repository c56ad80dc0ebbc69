"""Keeping an exporter's progress lines and version warnings off the terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet(*loggers: str) -> Iterator[None]:
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
