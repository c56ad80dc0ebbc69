"""One part of the report's page, as the template reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ghostexport.benchmarking.table import Row


@dataclass
class Section:
    """One part of the page.

    Attributes:
        id, title: of the heading.
        intro: one or two sentences.
        tables: ``(caption, column names, rows)``; a table of one column holds text.
        plots: SVG texts.
        sentences: results in words.
        pre: preformatted text.
        cuts: drawings of the graph around each boundary.
        missing: why the section is empty and which command fills it.
    """

    id: str
    title: str
    intro: str = ""
    tables: list[tuple[str, list[str], list[Row]]] = field(default_factory=list)
    plots: list[str] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    pre: str = ""
    cuts: list[dict[str, Any]] = field(default_factory=list)
    missing: str = ""


def number_rows(columns: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """One row per key that holds a plain number anywhere, one cell per column."""
    numbers = {n: {k: v for k, v in c.items() if type(v) in (int, float)} for n, c in columns.items()}
    keys = dict.fromkeys(k for c in numbers.values() for k in c)
    return [(k.replace("_", " "), [number(c.get(k)) for c in numbers.values()]) for k in keys]


def number(value: float | None) -> str:
    """Four digits, or an integer in full; empty for None."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
