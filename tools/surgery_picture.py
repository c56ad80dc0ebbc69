"""Draws what surgery did to a real graph: ``docs/pictures/surgery.svg``, from the texts in ``graphs/transformers``.

python tools/surgery_picture.py
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
GRAPHS = ROOT / "graphs" / "transformers"
PICTURE = ROOT / "docs" / "pictures" / "surgery.svg"
STEP, TOP, LEFT, WIDTH, GAP = 58, 60, 60, 250, 330
_NODE = re.compile(r"^node    (.+?) = ([\w.]+)\(([^)]*)\).*?(?:# (\d+))?$")


@dataclass(frozen=True)
class Step:
    """A stretch of the stream: a block (its dense number) or one node, and the value it hands on."""

    label: str
    nodes: int
    block: int | None
    value: str


def steps(text: str) -> list[Step]:
    """The stream of a text graph, from the embedding to the logits."""
    nodes = [(m[1].split(", ")[0], m[2], m[3].split(", "), m[4]) for m in map(_NODE.match, text.splitlines()) if m]
    home = {value: block if block is not None else value for value, _, _, block in nodes}
    kinds = {value: kind for value, kind, _, _ in nodes}
    blocks = [block for *_, block in nodes if block is not None]
    counts = Counter(blocks)
    crossing = {
        home[read]: read
        for value, _, reads, block in nodes
        for read in reads
        if kinds.get(read) == "Add" and home[read] != home[value]
    }
    found = [Step("embedding", 1, None, "embedding")]
    for value, kind, _, block in nodes:
        if value.startswith("ghost."):
            found.append(Step(f"{value}  ({kind})", 1, None, value))
        elif block is not None and found[-1].block != int(block):
            found.append(Step(f"block {block}", counts[block], int(block), crossing[block]))
    return [*found, Step("norm, head: logits", 0, None, "")]


def draw(dense: list[Step], ghost: list[Step]) -> str:
    """The two streams beside each other, what went and what came in colour."""
    kept = {step.block for step in ghost}
    height = TOP + STEP * max(len(dense), len(ghost)) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * LEFT + WIDTH + GAP + 40} {height}" '
        'font-family="sans-serif" font-size="14">',
        "<style>text{fill:#222}.small{font-size:11px;font-family:monospace;fill:#555}"
        ".kept{fill:#e8eef7;stroke:#4472b0}.gone{fill:#fbeae8;stroke:#c0392b;stroke-dasharray:5 4}"
        ".new{fill:#e6f4ea;stroke:#2e8b57}path{stroke:#888;fill:none}</style>",
        f'<rect width="100%" height="100%" fill="#fff"/><text x="{LEFT}" y="30">dense.txt</text>'
        f'<text x="{LEFT + GAP}" y="30">ghost.txt: blocks [1, 2) and [3, 5) removed, repaired</text>',
    ]
    for column, stream in enumerate((dense, ghost)):
        x = LEFT + column * GAP
        for row, step in enumerate(stream):
            y = TOP + row * STEP
            gone = step.block is not None and step.block not in kept
            kind = "gone" if gone else "new" if step.value.startswith("ghost.") else "kept"
            what = f"{step.label}, {step.nodes} nodes" if step.block is not None else step.label
            lines.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{WIDTH}" height="32" rx="5"/>')
            lines.append(f'<text x="{x + 10}" y="{y + 21}">{escape(what)}</text>')
            if step.label.endswith("(MatMul)"):  # the addition behind it reads the stream, too
                lines.append(f'<path d="M{x + 30} {y - 6}H{x + WIDTH + 20}V{y + STEP + 16}H{x + WIDTH}"/>')
            if step.value:
                lines.append(f'<path d="M{x + 30} {y + 32}v{STEP - 32}"/>')
                lines.append(f'<text class="small" x="{x + 38}" y="{y + 49}">{escape(step.value)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def picture() -> str:
    """The picture of the committed graphs."""
    return draw(*(steps((GRAPHS / f"{name}.txt").read_text(encoding="utf-8")) for name in ("dense", "ghost")))


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(), encoding="utf-8")
