"""Committed recipes for every named device, and the first recipe that ``init`` writes."""

import json
from pathlib import Path

import pytest

from ghostexport.commands.flags import merged
from ghostexport.errors import RecipeError
from ghostexport.first_recipe import count_blocks, write_first_recipe
from ghostexport.hardware import HARDWARE
from ghostexport.recipe import BEST, parse_recipe, read_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_resolves_for_every_device(path):
    assert len(RECIPES) >= 20
    for device in HARDWARE.values():
        recipe = parse_recipe(merged(read_recipe(path), device.recipe), path.name)
        assert recipe.recover.operators == (BEST,) and recipe.build.runtimes == (device.runtime,)
        assert recipe.quantize.format == (device.form,) and recipe.model.dtype == device.dtype
    blocks = int(path.read_text().splitlines()[1].split()[1])
    assert recipe.select.prune == blocks // 6
    assert f"| `{recipe.model.source}` | {blocks} | {recipe.select.prune} |" in (path.parent / "README.md").read_text()


@pytest.mark.parametrize("name", HARDWARE)
def test_init_writes_what_the_device_wants_with_its_reasons(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 26}}))
    path = tmp_path / "recipe.yaml"
    write_first_recipe(path, str(tmp_path), name)
    recipe = parse_recipe(read_recipe(path))
    assert recipe.select.prune == 4 and recipe.recover.operators == (BEST,)
    assert recipe == parse_recipe(
        merged(
            {"model": {"source": str(tmp_path)}, "select": {"prune": 4}, "recover": {"quality": "best"}},
            HARDWARE[name].recipe,
        )
    )
    head = path.read_text().partition("\nmodel:")[0]
    assert all(line in head for line in HARDWARE[name].lines)
    with pytest.raises(RecipeError, match="exists"):
        write_first_recipe(path, str(tmp_path), name)


def test_what_cannot_be_counted_or_built_writes_nothing(tmp_path):
    with pytest.raises(RecipeError, match="--prune 5"):
        count_blocks(str(tmp_path))
    with pytest.raises(RecipeError, match="Did you mean 'orin'"):
        write_first_recipe(tmp_path / "r.yaml", "m", "orrin", 3)
    assert not list(tmp_path.iterdir())
    write_first_recipe(tmp_path / "r.yaml", "smollm2", "cpu", 7)
    assert read_recipe(tmp_path / "r.yaml")["select"] == {"prune": 7}
    write_first_recipe(tmp_path / "s.yaml", "smollm2", "cpu")  # of the packaged model, which no Hub has
    assert read_recipe(tmp_path / "s.yaml")["select"] == {"prune": 30 // 6}
