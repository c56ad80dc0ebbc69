"""Which decoder blocks are removed: pure integers. All re-indexing of the toolchain lives here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ghostexport.errors import RecipeError


@dataclass(frozen=True, order=True)
class BlockSpan:
    """A run of removed decoder blocks, half-open ``[start, stop)``, in indices of the dense model."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise RecipeError(
                f"Span {self} is empty, negative or reversed.",
                "A span is half-open [start, stop) with 0 <= start < stop: [10, 17) removes blocks 10 to 16.",
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, block: object) -> bool:
        return isinstance(block, int) and self.start <= block < self.stop

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


@dataclass(frozen=True)
class Boundary:
    """Where a span was cut.

    Attributes:
        index: number of the boundary in depth order, 0-based; the ``b`` of ``ghost.{b}.matmul``.
        span: the removed span in indices of the dense model.
        position: number of kept blocks before the cut = index in the pruned model of the first block after it.
    """

    index: int
    span: BlockSpan
    position: int


@dataclass(frozen=True)
class PrunePlan:
    """Removed blocks of a model as maximal spans; an empty plan is the dense model.

    Attributes:
        num_blocks: decoder blocks of the dense model.
        removed: sorted, disjoint, never adjacent spans (adjacent ones are merged by :meth:`from_spans`).
        criterion: name of the criterion that chose them, or ``"manual"``.
        scores: everything the criterion computed, as JSON-ready data.
    """

    num_blocks: int
    removed: tuple[BlockSpan, ...] = ()
    criterion: str = "manual"
    scores: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(a.stop >= b.start for a, b in zip(self.removed, self.removed[1:], strict=False)):
            raise RecipeError(
                f"Spans {_spans(self.removed)} overlap, touch or are not sorted.", "Use PrunePlan.from_spans."
            )
        if self.removed and self.removed[-1].stop > self.num_blocks:
            raise RecipeError(
                f"Span {self.removed[-1]} reaches past the model, which has {self.num_blocks} decoder blocks.",
                f"Valid spans lie inside [0, {self.num_blocks}).",
            )
        if self.num_removed >= self.num_blocks:
            raise RecipeError(
                f"The plan removes all {self.num_blocks} decoder blocks.", "Keep at least one block: remove fewer."
            )

    @classmethod
    def from_spans(
        cls,
        num_blocks: int,
        spans: Iterable[Sequence[int] | BlockSpan],
        criterion: str = "manual",
        scores: Mapping[str, Any] | None = None,
    ) -> PrunePlan:
        """Builds a plan from half-open ``(start, stop)`` pairs in any order; adjacent spans are merged.

        Raises:
            RecipeError: a span is malformed, out of range or overlaps another.
        """
        parsed = sorted(s if isinstance(s, BlockSpan) else _span(s) for s in spans)
        maximal: list[BlockSpan] = []
        for span in parsed:
            if maximal and span.start < maximal[-1].stop:
                raise RecipeError(f"Spans {maximal[-1]} and {span} overlap.", "Name every removed block once.")
            if maximal and span.start == maximal[-1].stop:
                maximal[-1] = BlockSpan(maximal[-1].start, span.stop)
            else:
                maximal.append(span)
        return cls(num_blocks, tuple(maximal), criterion, dict(scores or {}))

    @classmethod
    def from_blocks(
        cls, num_blocks: int, blocks: Iterable[int], criterion: str = "manual", scores: Mapping[str, Any] | None = None
    ) -> PrunePlan:
        """Builds a plan from single block indices in any order."""
        return cls.from_spans(num_blocks, [(b, b + 1) for b in blocks], criterion, scores)

    @property
    def num_removed(self) -> int:
        return sum(len(span) for span in self.removed)

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """Dense indices of the surviving blocks, in order; position in this tuple = index in the pruned model."""
        return tuple(b for b in range(self.num_blocks) if not any(b in span for span in self.removed))

    @cached_property
    def boundaries(self) -> tuple[Boundary, ...]:
        """One boundary per removed span, in depth order."""
        before = 0
        result = []
        for index, span in enumerate(self.removed):
            result.append(Boundary(index, span, span.start - before))
            before += len(span)
        return tuple(result)

    def new_index(self, block: int) -> int | None:
        """Index in the pruned model of dense block ``block``; None when it is removed."""
        return self.kept.index(block) if block in self.kept else None

    def then(self, later: PrunePlan) -> PrunePlan:
        """Both cuts as one, in blocks of the dense model: ``later`` counts the blocks that this plan keeps."""
        gone = set(range(self.num_blocks)) - {self.kept[k] for k in later.kept}
        return PrunePlan.from_blocks(self.num_blocks, gone, later.criterion)

    def after(self, earlier: PrunePlan) -> PrunePlan:
        """What this plan removes beyond ``earlier``, counted in the blocks that ``earlier`` keeps.

        Raises:
            RecipeError: this plan keeps a block that ``earlier`` removed.
        """
        gone = sorted(set(self.kept) - set(earlier.kept))
        if gone:
            raise RecipeError(
                f"The plan keeps blocks {gone} of {self.num_blocks}, which were removed before.",
                f"Start from the dense graph, or remove at least {_spans(earlier.removed)} too.",
            )
        later = [k for k, block in enumerate(earlier.kept) if block not in self.kept]
        return PrunePlan.from_blocks(len(earlier.kept), later, self.criterion)

    def to_json(self) -> dict[str, Any]:
        return {
            "num_blocks": self.num_blocks,
            "removed": [[span.start, span.stop] for span in self.removed],
            "criterion": self.criterion,
            "scores": dict(self.scores),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PrunePlan:
        return cls.from_spans(
            data["num_blocks"], data["removed"], data.get("criterion", "manual"), data.get("scores", {})
        )

    @cached_property
    def sha256(self) -> str:
        """Identity of the cut itself: block count and spans, not who chose them."""
        cut = json.dumps([self.num_blocks, [[s.start, s.stop] for s in self.removed]])
        return hashlib.sha256(cut.encode()).hexdigest()

    def __str__(self) -> str:
        return f"{_spans(self.removed) or 'nothing'} of {self.num_blocks} blocks"


def _span(pair: Sequence[int]) -> BlockSpan:
    if isinstance(pair, str) or len(pair) != 2 or not all(type(i) is int for i in pair):
        raise RecipeError(f"{pair!r} is not a span.", "Write a span as two integers [start, stop), such as [10, 17].")
    return BlockSpan(pair[0], pair[1])


def _spans(spans: Iterable[BlockSpan]) -> str:
    return ", ".join(str(span) for span in spans)
