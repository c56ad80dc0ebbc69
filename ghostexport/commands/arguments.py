"""What the arguments of a command describe: the recipe, its run folder, and spans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghostexport.commands.flags import merged
from ghostexport.errors import RecipeError

if TYPE_CHECKING:
    from ghostexport.recipe import Recipe
    from ghostexport.runfolder import RunFolder


def resolve(
    target: str, output: Path | None, recipe_file: Path | None, flags: dict[str, Any]
) -> tuple[Recipe, RunFolder]:
    """The recipe and run folder that the arguments describe: flags > recipe file > run folder > defaults.

    Raises:
        RecipeError: something is missing or invalid.
        RunFolderError: the folder belongs to another model.
    """
    from ghostexport.recipe import parse_recipe, read_recipe
    from ghostexport.runfolder import RunFolder

    if target.endswith(".zip"):
        from ghostexport.packing import unpack

        target, output = str(unpack(Path(target), output)), None
    is_run = RunFolder(target).recipe_path.is_file()
    if not is_run and output is None:
        raise RecipeError(
            f"{target} is not a run folder (it has no recipe.yaml).",
            "To start from a model, name the run folder to create: -o RUN. To continue a run, give its folder.",
        )
    folder = RunFolder(output if output is not None else Path(target))
    stored = read_recipe(folder.recipe_path) if folder.recipe_path.is_file() else {}
    data = read_recipe(recipe_file) if recipe_file is not None else stored
    if not is_run:
        data = merged(data, {"model": {"source": target}})
        folder.require_model(stored, target)
    if flags.get("select", {}).get("spans") is not None:
        data = merged(data, {"select": {"prune": None}}, keep_none=True)
    elif flags.get("select", {}).get("prune") is not None:
        data = merged(data, {"select": {"spans": None}}, keep_none=True)
    if flags.get("bench", {}).get("preset") is not None:
        data = {**data, "bench": {}}  # a stored recipe has every key written out and would hide the preset
    return parse_recipe(merged(data, flags), str(recipe_file or "recipe")), folder


def spans_of(plan: str | None) -> list[list[int]] | None:
    """``--plan``: JSON text, or a file holding it (a list of spans, or a plan.json)."""
    if plan is None:
        return None
    import json

    path = Path(plan)
    try:
        data = json.loads(path.read_text(encoding="utf-8") if path.is_file() else plan)
    except (ValueError, OSError) as error:
        raise RecipeError(
            f"--plan {plan!r} is neither JSON nor a readable file: {error}", "Example: --plan '[[10, 17]]'"
        ) from None
    spans = data.get("removed") if isinstance(data, dict) else data
    if not isinstance(spans, list):
        raise RecipeError(f"--plan {plan!r} holds no list of spans.", "Example: --plan '[[10, 17]]'")
    return spans
