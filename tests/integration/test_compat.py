"""Every ``--compat`` set is a valid recipe, reaches the recipe from the command line, and yields to flags."""

import pytest
import yaml

from ghostexport.commands.flags import COMPAT, merged
from ghostexport.recipe import parse_recipe

MODEL = {"model": {"source": "smollm2"}, "select": {"prune": 7}}


@pytest.mark.parametrize("name", COMPAT)
def test_is_a_valid_recipe(name):
    recipe = parse_recipe(merged(COMPAT[name], MODEL))
    for section, values in COMPAT[name].items():
        for key, value in values.items():
            found = getattr(getattr(recipe, section), key)
            assert (list(found) if isinstance(found, tuple) else found) == value
    assert recipe.select.prune == 7 and recipe.recover.rank is None


def test_the_published_switches():
    ghosted, linearpatch, replaceme = (parse_recipe(merged(COMPAT[n], MODEL)) for n in COMPAT)
    assert ghosted.calibration.sequences == 32 and not ghosted.calibration.bos and ghosted.recover.per_block
    assert ghosted.select.criterion == linearpatch.select.criterion == "streamline-channelwise"
    assert linearpatch.calibration.sequences == 128 and linearpatch.recover.ratio == "mean-of-ratios"
    assert replaceme.recover.ridge == 0 and replaceme.select.criterion == "angular"


def test_the_command_line_writes_it_and_flags_win(cli, tiny_model, text_file, tmp_path):
    code, _, err = cli(
        "calibrate", tiny_model, "-o", tmp_path / "run", "--compat", "ghosted-v2", "--prune", 2,
        "--calibration", text_file, "--sequences", 6, "--length", 64,
    )  # fmt: skip
    assert code == 0, err
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert recipe["calibration"]["sequences"] == 6 and recipe["calibration"]["bos"] is False
    assert recipe["recover"]["per_block"] is True and recipe["recover"]["operators"] == ["ghost"]
    code, _, err = cli("calibrate", tiny_model, "-o", tmp_path / "other", "--compat", "ghosted", "--prune", 2)
    assert code == 2 and "Did you mean 'ghosted-v2'" in err
