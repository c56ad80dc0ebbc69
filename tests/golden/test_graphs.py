"""The text graphs in graphs/ are current, and an operator changes exactly what it must."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.golden.regenerate import GOLDEN, golden_texts

GRAPHS = Path(__file__).parent.parent.parent / "graphs"


@pytest.mark.parametrize("producer", GOLDEN)
def test_the_reviewed_graphs_are_current(producer: str) -> None:
    for variant, text in golden_texts(producer).items():
        reviewed = (GRAPHS / producer / f"{variant}.txt").read_text(encoding="utf-8")
        assert text == reviewed, f"{producer}/{variant} changed: python tools/regenerate_graphs.py --text"


@pytest.mark.parametrize("producer", GOLDEN)
def test_an_operator_adds_its_nodes_its_weights_and_rewires_the_boundary(producer: str) -> None:
    pruned, ghost = (
        (GRAPHS / producer / f"{v}.txt").read_text(encoding="utf-8").splitlines() for v in ("pruned", "ghost")
    )
    added = [line for line in ghost if line not in set(pruned)]
    removed = [line for line in pruned if line not in set(ghost)]
    new = [line for line in added if line.startswith("weight") or re.match(r"node +ghost\.\d\.", line)]
    assert [line.split("  ")[1].strip() for line in new if line.startswith("weight")] == [
        "ghost.0.delta",
        "ghost.1.delta",
    ]
    fused = producer == "genai"  # the skip-norm performs the addition; the stream is made a value first
    parts = ("stream", "matmul") if fused else ("matmul", "add")
    assert {re.split(r" +", line)[1] for line in new if line.startswith("node")} == {
        f"ghost.{b}.{part}" for b in (0, 1) for part in parts
    }
    rewired = [line for line in added if line not in new]
    assert len(rewired) == len(removed)
    for before, after in zip(removed, rewired, strict=True):
        a, b = re.split(r"[ (),]+", before), re.split(r"[ (),]+", after)
        assert len(a) == len(b) and a[:4] == b[:4]
        changed = [y for x, y in zip(a, b, strict=True) if x != y]
        assert changed and all(y.startswith("ghost.") for y in changed)


@pytest.mark.parametrize("producer", GOLDEN)
def test_operators_of_the_same_shape_give_the_same_graph(producer: str) -> None:
    ghost, patch = ((GRAPHS / producer / f"{v}.txt").read_text(encoding="utf-8") for v in ("ghost", "linearpatch"))
    assert ghost == patch


@pytest.mark.parametrize("producer", GOLDEN)
def test_nothing_of_a_removed_block_is_left(producer: str) -> None:
    text = (GRAPHS / producer / "pruned.txt").read_text(encoding="utf-8")
    ports = {int(n) for n in re.findall(r"^(?:input|output) +\S*?\.(\d+)\.", text, re.MULTILINE)}
    assert ports in (set(), {0, 1, 2})
