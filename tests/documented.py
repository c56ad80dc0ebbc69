"""The fenced blocks of the documentation, in the order in which a reader meets them.

A block that is preceded by ``<!-- not run: reason -->`` is parsed only; every other one of a shell or of Python is run
by ``tests/integration/test_documented_commands.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"(?:<!-- not run: ([^\n]+) -->\n+)?^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block; ``not_run`` is the reason why it is only parsed."""

    language: str
    text: str
    not_run: str | None

    @property
    def lines(self) -> list[str]:
        """Command lines, continued ones joined."""
        return [line for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [Block(language, body, reason or None) for reason, language, body in _FENCE.findall(text)]


def reading() -> list[Path]:
    """README, then the written pages of the site in the order of its navigation, then what stands beside it."""

    def walk(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values() if isinstance(entry, dict) else entry:
                yield from walk(value)

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    written = [ROOT / "docs" / name for name in walk(nav) if (ROOT / "docs" / name).exists()]
    return [ROOT / "README.md", *written, ROOT / "recipes" / "README.md"]
