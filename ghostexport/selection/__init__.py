"""Criteria: which decoder blocks to remove. One file per criterion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ghostexport.calibration import CalibrationSet
from ghostexport.execution import Execution
from ghostexport.models import LoadedModel
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection, require_name
from ghostexport.selection.angular import angular
from ghostexport.selection.channelwise import shortgpt_channelwise, streamline_channelwise
from ghostexport.selection.eligibility import require_prunable
from ghostexport.selection.lorp import lorp
from ghostexport.selection.magnitude import magnitude
from ghostexport.selection.perplexity import perplexity
from ghostexport.selection.prune_and_comp import BASES, prune_and_comp
from ghostexport.selection.residual import residual
from ghostexport.selection.residual_greedy import residual_greedy
from ghostexport.selection.shortgpt import shortgpt
from ghostexport.selection.sleb import sleb
from ghostexport.selection.streamline import Watch, streamline, unwatched
from ghostexport.selection.taylor import taylor

#: ``choose(loaded, calibration, section, execution)``; where it is watchable, also ``watch``.
Choose = Callable[..., PrunePlan]


@dataclass(frozen=True)
class Criterion:
    """A way to choose blocks.

    Attributes:
        choose: from a model and calibration tokens to a plan.
        protect: first and last blocks that the published method never removes; the recipe's numbers win.
        watchable: it reads every residual value ``x_0`` to ``x_L`` in one plain pass, and others can look on.
    """

    choose: Choose
    protect: tuple[int, int] = (0, 0)
    watchable: bool = False


CRITERIA: dict[str, Criterion] = {
    "streamline": Criterion(streamline, watchable=True),
    "streamline-channelwise": Criterion(streamline_channelwise, protect=(1, 1), watchable=True),
    "shortgpt": Criterion(shortgpt, watchable=True),
    "shortgpt-channelwise": Criterion(shortgpt_channelwise, protect=(0, 1), watchable=True),
    "angular": Criterion(angular, protect=(1, 0), watchable=True),
    "taylor": Criterion(taylor, protect=(4, 2)),
    "magnitude": Criterion(magnitude, protect=(4, 2)),
    "perplexity": Criterion(perplexity, protect=(4, 2)),
    "sleb": Criterion(sleb, protect=(1, 1)),
    "prune-and-comp": Criterion(prune_and_comp),
    "lorp": Criterion(lorp, protect=(1, 1)),
    "residual": Criterion(residual),
    "residual-greedy": Criterion(residual_greedy),
}


def select(
    loaded: LoadedModel,
    calibration: CalibrationSet,
    section: SelectSection,
    execution: Execution | None = None,
    watch: Watch = unwatched,
) -> PrunePlan:
    """Chooses the blocks to remove: the recipe's own spans where given, else by its criterion.

    ``watch`` sees the residual values of the criterion's pass, where it is watchable.

    Raises:
        RecipeError: unknown criterion; spans or number of blocks that do not suit the model.
        CalibrationError: calibration tokens that do not suit the model, or non-finite activations.
    """
    if section.spans is not None:
        return PrunePlan.from_spans(loaded.num_blocks, section.spans)
    require_name(section.criterion, CRITERIA, "criterion")
    require_prunable(loaded.num_blocks, section.prune or 0)
    calibration.require_fits(loaded.vocab_size, loaded.max_length)
    criterion = CRITERIA[section.criterion]
    options = {"watch": watch} if criterion.watchable else {}
    section = _protected(criterion, section)
    return criterion.choose(loaded, calibration, section, execution or Execution(), **options)


def _protected(criterion: Criterion, section: SelectSection) -> SelectSection:
    """The section with the criterion's published protection where the recipe leaves it open."""
    first, last = criterion.protect
    if section.criterion == "prune-and-comp":
        require_name(section.base, BASES, "base score")
        first, last = BASES[section.base][1]
    open_keys = {"protect_first": first, "protect_last": last}
    return section.model_copy(update={k: v for k, v in open_keys.items() if getattr(section, k) is None})
