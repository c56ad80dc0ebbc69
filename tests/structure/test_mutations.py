"""The list of mutations is of this tree. ``run.py`` does the rest."""

from pathlib import Path

import pytest

from tests.mutations.run import place, read_mutations

TREE = Path(__file__).parents[2]
MUTATIONS = read_mutations()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m["what"])
def test_what_is_mutated_stands_in_the_package_once_and_its_tests_exist(mutation):
    assert place(mutation["old"], TREE).is_file()
    assert mutation["new"] != mutation["old"] and "\n" not in mutation["new"]
    for test in mutation["tests"].split():
        assert (TREE / test.partition("::")[0]).is_file()
