"""A recipe to begin with: a model, a named device, and what follows from both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from ghostexport.errors import RecipeError
from ghostexport.files import write_bytes
from ghostexport.hardware import find_hardware
from ghostexport.recipe import parse_recipe

#: One block in so many is removed where nothing else is said: a start, not an optimum.
ONE_IN = 6


def write_first_recipe(path: Path, model: str, hardware: str, prune: int | None = None) -> None:
    """Writes a recipe with the reason for every choice of the device in its head.

    Args:
        prune: blocks to remove; None for a sixth of those that the model's configuration counts.

    Raises:
        RecipeError: the file exists, the device is unknown, or the blocks cannot be counted.
    """
    if path.exists():
        raise RecipeError(f"{path} exists.", "Name another file with -o, or delete it.")
    device = find_hardware(hardware)
    count = prune if prune is not None else max(1, count_blocks(model) // ONE_IN)
    own: dict[str, dict[str, Any]] = {
        "model": {"source": model},
        "select": {"prune": count},
        "recover": {"quality": "best"},
    }
    data = {name: own.get(name, {}) | device.recipe.get(name, {}) for name in (*own, *device.recipe)}
    parse_recipe(data, str(path))
    head = [*device.lines, f"  prune {count}: a start; see the quality, then go on: ghostexport explain RUN"]
    text = "".join(f"# {line}\n" for line in head) + yaml.safe_dump(data, sort_keys=False)
    write_bytes(path, text.encode())


def count_blocks(model: str) -> int:
    """Decoder blocks of a model, from its ``config.json`` (:func:`find_config`).

    Raises:
        RecipeError: there is none, or it does not say.
    """
    remedy = "Say how many to remove: --prune 5"
    path = find_config(model, remedy)
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        config = config | config.get("text_config", {})
        found = next(config[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in config)
        return int(found)
    except (OSError, ValueError, TypeError, StopIteration) as error:
        raise RecipeError(f"The blocks of {model} cannot be counted: {error}", remedy) from None


def find_config(model: str, remedy: str, revision: str | None = None) -> Path:
    """The configuration of a model: the file itself, that of a folder, a packaged model or a ``.gguf`` file,
    or of the Hub's cache or site.

    Raises:
        RecipeError: there is none; ``remedy`` is the way out.
    """
    path = Path(model)
    if path.suffix == ".json" and path.is_file():
        return path
    if path.exists():
        if (path / "config.json").exists():
            return path / "config.json"
        if path.suffix != ".gguf":
            raise RecipeError(f"{path} has no config.json.", remedy)
    if path.suffix == ".gguf" or "/" not in model:
        from ghostexport.models.sources import PACKAGED, resolve_source

        if path.suffix == ".gguf" or model in PACKAGED:
            return resolve_source(model) / "config.json"
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(model, "config.json", revision=revision))
    except Exception as error:  # whatever the Hub's client raises, the way out is the same
        raise RecipeError(f"The configuration of {model} cannot be read: {error}", remedy) from None
