import pytest
import yaml

from ghostexport.errors import RecipeError
from ghostexport.recipe import (
    BenchSection,
    BuildSection,
    CalibrationSection,
    ModelSection,
    Recipe,
    RecoverSection,
    SelectSection,
    is_repaired,
    parse_recipe,
    read_recipe,
    require_name,
)

MINIMAL = {"model": {"source": "smollm2"}, "select": {"prune": 7}}


def test_yaml_round_trip_reproduces_the_recipe_with_every_default_written_out():
    recipe = parse_recipe(MINIMAL)
    written = yaml.safe_load(recipe.to_yaml())
    assert set(written) == set(Recipe.model_fields)
    assert written["calibration"]["sequences"] == 128
    assert parse_recipe(written) == recipe and parse_recipe(written).sha256 == recipe.sha256


def test_hash_follows_only_the_sections_named():
    a = parse_recipe(MINIMAL)
    b = parse_recipe(MINIMAL | {"select": {"prune": 5}})
    assert a.section_sha256(["model"]) == b.section_sha256(["model"])
    assert a.section_sha256(["select"]) != b.section_sha256(["select"])


def test_variants_are_dense_pruned_and_the_operators():
    assert parse_recipe(MINIMAL).variants == ("dense", "pruned", "ghost", "linearpatch-rotate")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"model": {"source": "x"}, "selekt": {}}, "unknown key 'selekt'. Did you mean 'select'"),
        ({"model": {"source": "x"}, "select": {"criterium": "x"}}, "'select.criterium'. Did you mean 'criterion'"),
        ({"model": {"source": "x"}, "select": {"criterion": "streamlin"}}, "Did you mean 'streamline'"),
        ({"model": {"source": "x"}, "recover": {"operators": ["gost"]}}, "Did you mean 'ghost'"),
        ({"model": {"source": "x"}, "recover": {"operators": ["ghost", "ghost"]}}, "named twice"),
        ({"model": {"source": "x"}, "build": {"runtimes": ["onnxruntine"]}}, "Did you mean 'onnxruntime'"),
        ({"model": {"source": "x"}, "select": {"prune": 0}}, "select.prune"),
        ({"model": {"source": "x", "dtype": "int8"}}, "model.dtype"),
        ({"model": {"source": "x"}, "calibration": {"sequences": "many"}}, "calibration.sequences"),
        ({}, "model: Field required"),
        ({"model": {"source": "x"}, "recover": {"ridge": "cvv"}}, "recover.ridge: Input should be 'cv' (got 'cvv')"),
    ],
)
def test_a_bad_recipe_names_the_field_and_the_nearest_name(data, says):
    with pytest.raises(RecipeError) as caught:
        parse_recipe(data)
    assert says in str(caught.value)


def test_a_recipe_file_must_be_readable_yaml(tmp_path):
    with pytest.raises(RecipeError, match="does not exist"):
        read_recipe(tmp_path / "none.yaml")
    for content in (b"[1, 2]", b"\xff\xfe\x00", b"a: [", b""):
        path = tmp_path / "bad.yaml"
        path.write_bytes(content)
        with pytest.raises(RecipeError, match=r"bad\.yaml"):
            read_recipe(path)


def test_unknown_names_list_the_valid_ones():
    with pytest.raises(RecipeError, match="Valid: a, b"):
        require_name("zzz", ("a", "b"), "thing")


@pytest.mark.parametrize(
    ("section", "keys", "says"),
    [
        (RecoverSection, {"operators": ("gost",)}, "Unknown operator 'gost'.\nDid you mean 'ghost'?"),
        (RecoverSection, {"operators": ["ghost", "ghost"]}, "named twice"),
        (RecoverSection, {"operatos": ["ghost"]}, "RecoverSection: unknown key 'operatos'. Did you mean 'operators'?"),
        (RecoverSection, {"ridge": -1.0}, "RecoverSection: ridge: "),
        (RecoverSection, {"quality": "bets"}, "Did you mean 'best'?"),
        (SelectSection, {"criterion": "streamlin"}, "Unknown criterion 'streamlin'.\nDid you mean 'streamline'?"),
        (SelectSection, {"spans": [[1, 2], [3]]}, "SelectSection: spans.1.1: "),
        (BuildSection, {"runtimes": ["tensorrt_rtx"]}, "Did you mean 'tensorrt-rtx'?"),
        (BuildSection, {"max_bach": 2}, "Did you mean 'max_batch'?"),
        (BenchSection, {"preset": "quik"}, "BenchSection: preset: "),
        (CalibrationSection, {"sequences": "many"}, "CalibrationSection: sequences: "),
        (ModelSection, {"source": "x", "dtype": "int8"}, "ModelSection: dtype: "),
        (
            Recipe,
            {"model": ModelSection(source="x"), "selekt": {}},
            "Recipe: unknown key 'selekt'. Did you mean 'select'",
        ),
    ],
)
def test_a_section_made_in_python_is_refused_as_a_recipe_is(section, keys, says):
    with pytest.raises(RecipeError) as caught:
        section(**keys)
    assert says in str(caught.value)


def test_lists_count_as_tuples_and_give_the_section_that_yaml_gives():
    sections = {
        "select": {"spans": [[4, 6], [1, 2]]},
        "recover": {"operators": ["ghost", "none"]},
        "build": {"runtimes": ["onnxruntime"], "token_points": [8, 16]},
        "bench": {"preset": "quick", "batches": [1, 2], "request": [8, 4]},
    }
    recipe = parse_recipe({"model": {"source": "x"}} | sections)
    made = [SelectSection, RecoverSection, BuildSection, BenchSection]
    for (name, keys), section in zip(sections.items(), made, strict=True):
        assert section(**keys) == getattr(recipe, name)
    assert BenchSection(preset="quick", batches=[1, 2]).repeats == 5  # what is not given is the preset's
    assert SelectSection(spans=[[4, 6]]).spans == ((4, 6),)
    assert RecoverSection(operators=["ghost"], refit_downstream=True).operators == ("ghost+refit",)


def test_quantised_variants_are_repaired_when_their_source_is():
    found = {name: is_repaired(name) for name in ("dense", "pruned", "ghost", "dense.int4", "ghost.int4")}
    assert found == {"dense": False, "pruned": False, "ghost": True, "dense.int4": False, "ghost.int4": True}
