"""What a recipe leaves open and the model or the machine decides; and the model that it names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ghostexport.execution import Execution
from ghostexport.recipe import BEST, HEAL, Recipe, base_operator

if TYPE_CHECKING:
    from ghostexport.models import LoadedModel


def source_of(recipe: Recipe, execution: Execution) -> Path:
    """The model as a local folder; converted (GGUF) or downloaded (Hub) on first use."""
    from ghostexport import models

    return models.resolve_source(recipe.model.source, recipe.model.revision, execution)


def config_of(recipe: Recipe) -> Path:
    """The model's ``config.json``, without its weights where the source allows.

    Raises:
        RecipeError: there is none.
    """
    from ghostexport.first_recipe import find_config
    from ghostexport.models.sources import PACKAGED

    source = recipe.model.source
    if source in PACKAGED or source.endswith(".gguf"):
        return source_of(recipe, Execution()) / "config.json"
    return find_config(source, "Name a model, its folder, or its config.json.", recipe.model.revision)


def loaded_of(recipe: Recipe, execution: Execution) -> LoadedModel:
    """The model, loaded as the recipe says."""
    from ghostexport import models

    section = recipe.model
    return models.load_model(
        section.source, section.dtype, execution, section.revision, trust_remote_code=section.trust_remote_code
    )


def resolve(recipe: Recipe, execution: Execution, fitting: bool, building: bool) -> tuple[Recipe, LoadedModel | None]:
    """The recipe with nothing left to choose, and the model where that had to be looked at.

    Args:
        recipe: as the user gave it.
        execution: how to run.
        fitting: operators will be fitted.
        building: engines will be built.

    Raises:
        GhostExportError: what is named does not exist or does not apply.
    """
    loaded = None
    if recipe.recover.weights is not None and recipe.select.prune is None and recipe.select.spans is None:
        from ghostexport.recovery.trained.tuned import removed_spans

        loaded = loaded_of(recipe, execution)
        spans = removed_spans(loaded, recipe.recover, execution)
        recipe = recipe.model_copy(update={"select": recipe.select.model_copy(update={"spans": spans})})
    recipe.select.require_removal()
    if fitting and {BEST, HEAL} & {*map(base_operator, recipe.recover.operators)}:
        from ghostexport.recovery.recover import resolve_best

        cuts = None if recipe.select.spans is None else [start for start, _ in recipe.select.spans]
        loaded, sequences = loaded or loaded_of(recipe, execution), recipe.calibration.sequences
        section = resolve_best(recipe.recover, loaded, cuts, sequences, execution)
        recipe = recipe.model_copy(update={"recover": section})
    return resolve_machine(recipe, execution) if building else recipe, loaded


def resolve_machine(recipe: Recipe, execution: Execution | None = None) -> Recipe:
    """The recipe with the runtime that this machine has, where it names none.

    Raises:
        RuntimeUnavailableError: it has none.
    """
    if recipe.build.runtimes:
        return recipe
    from ghostexport import runtimes

    name, reason = runtimes.default_runtime()
    (execution or Execution()).say(f"runtime: {name} ({reason})")
    return recipe.model_copy(update={"build": recipe.build.model_copy(update={"runtimes": (name,)})})
