"""Which blocks a criterion may remove."""

from __future__ import annotations

from collections.abc import Sequence

from ghostexport.errors import RecipeError
from ghostexport.recipe import SelectSection


def require_prunable(num_blocks: int, count: int) -> None:
    """Raises RecipeError unless ``1 <= count < num_blocks``."""
    if not 1 <= count < num_blocks:
        raise RecipeError(
            f"select.prune: {count} of {num_blocks} decoder blocks cannot be removed.",
            f"Choose 1 to {num_blocks - 1}.",
        )


def eligible_blocks(num_blocks: int, section: SelectSection) -> range:
    """Blocks outside the protected first and last ones (0 where the section leaves them open)."""
    first = section.protect_first or 0
    return range(first, max(first, num_blocks - (section.protect_last or 0)))


def require_eligible(blocks: Sequence[int], num_blocks: int, section: SelectSection) -> None:
    """Raises RecipeError when fewer than ``section.prune`` blocks are eligible."""
    if len(blocks) < (section.prune or 0):
        raise RecipeError(
            f"select: {section.prune} blocks cannot be removed from {num_blocks} when the first "
            f"{section.protect_first or 0} and the last {section.protect_last or 0} are protected.",
            "Remove fewer blocks or protect fewer (--protect-first, --protect-last).",
        )


def eligible_starts(num_blocks: int, count: int, section: SelectSection) -> range:
    """Starts ``s`` of the windows ``[s, s + count)`` inside the eligible blocks.

    Raises:
        RecipeError: no window of that length is left.
    """
    blocks = eligible_blocks(num_blocks, section)
    require_eligible(blocks, num_blocks, section)
    return range(blocks.start, blocks.stop - count + 1)
