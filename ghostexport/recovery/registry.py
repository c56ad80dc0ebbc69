"""The kinds of operators, one row each. Nothing heavy is imported: a recipe's names are checked without torch."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

#: Bases of the channels' magnitude ratios (LinearPatch).
Basis = Literal["identity", "hadamard"]

#: What a pass gathers beyond the plain moments: ``weighted`` = token-weighted moments of the stream, ``last-block`` =
#: the same of ``[x_mid, h]`` inside the last kept block, ``mlp-output`` = plain moments of that block's MLP output.
Need = Literal["weighted", "last-block", "mlp-output"]

#: Needs that look inside the last kept block.
INSIDE = frozenset({"last-block", "mlp-output"})


@dataclass(frozen=True)
class Kind:
    """How one kind of operator is made. Functions are ``module:name`` below ``ghostexport.recovery``.

    Attributes:
        fit: from what was gathered at a boundary to its operator.
        bases: of the magnitude ratios that it reads.
        needs: what else it reads besides the plain moments.
        check: asked before anything is measured; raises where the kind does not apply to a model and plan.
        train: continues from what ``fit`` found, with gradients; such a kind cannot be refitted, unless it heals.
        heals: that training changes any weights behind the first cut; it starts from cuts that were fitted one behind
            the other, refitted with ``+refit``.
        trains_inside: that training reads the inside of the last kept block.
        ranked: its matrix can be of a lower rank.
        first: also where it reads the inside of the last kept block, it applies to a cut before which nothing is kept.
        folded: it adds nothing at the cut and only changes kept weights: its variant is an ordinary checkpoint.
    """

    fit: str
    bases: frozenset[Basis] = frozenset()
    needs: frozenset[Need] = frozenset()
    check: str | None = None
    train: str | None = None
    heals: bool = False
    trains_inside: bool = False
    ranked: bool = False
    first: bool = False
    folded: bool = False

    @property
    def inside(self) -> bool:
        """Whether it reads the inside of the last kept block: a pass of the stream alone cannot serve it."""
        return bool(self.needs & INSIDE)


_IDENTITY: frozenset[Basis] = frozenset({"identity"})
_HADAMARD: frozenset[Basis] = frozenset({"hadamard"})
_WEIGHTED: frozenset[Need] = frozenset({"weighted"})
_LAST_BLOCK: frozenset[Need] = frozenset({"last-block"})
_MLP_OUTPUT: frozenset[Need] = frozenset({"mlp-output"})
_SCALABLE = "fits.magnitudes:require_scalable"
_DISTIL = "trained.distilled:distil"
_HEAL = "trained.healed:heal"

OPERATORS: dict[str, Kind] = {
    "ghost": Kind("fits.least_squares:fit_ghost", ranked=True),
    "linearpatch-diag": Kind("fits.magnitudes:fit_diag", bases=_IDENTITY),
    "linearpatch-rotate": Kind("fits.magnitudes:fit_rotate", bases=_HADAMARD),
    "ghost-weighted": Kind("fits.least_squares:fit_weighted", needs=_WEIGHTED, ranked=True),
    "ghost-affine": Kind("fits.least_squares:fit_affine", ranked=True),
    "ghost-split": Kind("fits.down_projection:fit_split", needs=_LAST_BLOCK | _WEIGHTED, ranked=True, first=True),
    "ghost-zero": Kind("fits.down_projection:fit_zero", needs=_LAST_BLOCK, folded=True),
    "none": Kind("fits.least_squares:fit_none", folded=True),
    "prune-and-comp": Kind("fits.magnitudes:fit_scale", bases=_IDENTITY, check=_SCALABLE, folded=True),
    "replaceme-lstsq": Kind("fits.down_projection:fit_replaceme", needs=_MLP_OUTPUT, folded=True),
    "replaceme-cosine": Kind(
        "fits.least_squares:fit_none", train="trained.cosine:train_cosine", trains_inside=True, folded=True
    ),
    "streamline-ffn": Kind("fits.least_squares:fit_none", train="trained.ffn:train_network"),
    "linearpatch-distilled": Kind("fits.magnitudes:fit_rotate", bases=_HADAMARD, train=_DISTIL),
    "ghost-distilled": Kind("fits.least_squares:fit_ghost", train=_DISTIL),
    "ghost-healed": Kind(
        "fits.down_projection:fit_split",
        needs=_LAST_BLOCK | _WEIGHTED,
        train=_HEAL,
        heals=True,
        ranked=True,
        first=True,
    ),
    "tuned": Kind("fits.least_squares:fit_none", train="trained.tuned:take", folded=True),
    "ghost-weighted-healed": Kind(
        "fits.least_squares:fit_weighted", needs=_WEIGHTED, train=_HEAL, heals=True, ranked=True
    ),
}


def function(place: str) -> Any:
    """The function that a row of the table names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"ghostexport.recovery.{module}"), name)
