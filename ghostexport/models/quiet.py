"""Keeping Hugging Face's own progress bars off the terminal while it reads and writes local files."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator


@contextlib.contextmanager
def hidden_progress_bars() -> Iterator[None]:
    """Inside the block transformers draws no bars; its setting is restored afterwards.

    Its GGUF reader has a bar of its own that no setting reaches: what is drawn on stderr meanwhile is dropped.
    """
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
