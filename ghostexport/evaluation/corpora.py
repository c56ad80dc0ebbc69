"""Whole texts to measure perplexity on, as the papers do (LinearPatch, Ghosted Layers, SLEB).

A text is tokenized in one piece and cut into windows one behind the other; what is left at the end is dropped. Only the
first window begins with a BOS token. Perplexity is the exponential of the mean loss over all windows.

==========  ==================================================================================
wikitext2   test split, rows joined by blank lines
ptb         validation split, sentences joined by blank lines
c4          first 1100 validation documents joined by spaces, 256 windows of them (SLEB's choice; other papers draw
            their windows from the training split, each in its own way, so C4 figures differ between papers)
a file      its passages in their order, joined by blank lines
==========  ==================================================================================
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ghostexport.calibration import CalibrationSet
from ghostexport.errors import CalibrationError
from ghostexport.texts import whole_text

#: Windows of a corpus, at most, where it is cut off.
MOST_WINDOWS = {"c4": 256}


def corpus_windows(source: str, tokenizer: Any, length: int) -> CalibrationSet:
    """All windows ``[N, length]`` of a corpus.

    Args:
        source: ``wikitext2``, ``ptb``, ``c4``, ``demo:DOMAIN``, or a ``.txt``, ``.jsonl`` or ``.parquet`` file.

    Raises:
        CalibrationError: no tokenizer, an unusable source, or less than one window of text.
        RuntimeUnavailableError: a package is missing.
    """
    if tokenizer is None:
        raise CalibrationError("The model's source has no tokenizer.", "Add tokenizer files to the model's folder.")
    ids = tokenizer(whole_text(source), verbose=False)["input_ids"]
    count = min(len(ids) // length, MOST_WINDOWS.get(source, len(ids)))
    if not count:
        raise CalibrationError(
            f"eval: {source} has {len(ids)} tokens, less than one window of {length}.",
            f"Use a longer text, or --corpus-length {max(2, len(ids))} or less.",
        )
    windows = np.asarray(ids[: count * length], dtype=np.int64).reshape(count, length)
    return CalibrationSet.from_tokens(windows, source=source, length=length)
