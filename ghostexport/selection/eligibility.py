"""Which blocks a criterion may remove."""

from __future__ import annotations

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
    """Blocks outside the protected first and last ones."""
    return range(section.protect_first, max(section.protect_first, num_blocks - section.protect_last))


def eligible_starts(num_blocks: int, count: int, section: SelectSection) -> range:
    """Starts ``s`` of the windows ``[s, s + count)`` inside the eligible blocks.

    Raises:
        RecipeError: no window of that length is left.
    """
    blocks = eligible_blocks(num_blocks, section)
    if len(blocks) < count:
        raise RecipeError(
            f"select: {count} blocks cannot be removed from {num_blocks} when the first {section.protect_first} and "
            f"the last {section.protect_last} are protected.",
            "Remove fewer blocks or protect fewer.",
        )
    return range(blocks.start, blocks.stop - count + 1)
