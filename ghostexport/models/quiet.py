"""Keeping Hugging Face's own progress bars off the terminal while it reads and writes local files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def hidden_progress_bars() -> Iterator[None]:
    """Inside the block transformers draws no bars; its setting is restored afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
