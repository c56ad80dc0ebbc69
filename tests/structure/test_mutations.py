"""The list of mutations is of this tree, and the committed results are of the list. ``run.py`` does the rest."""

from pathlib import Path

import pytest

from tests.mutations.run import key, place, read_mutations, read_results

TREE = Path(__file__).parents[2]
MUTATIONS = read_mutations()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m["what"])
def test_what_is_mutated_stands_in_the_package_once_and_its_tests_exist(mutation):
    assert place(mutation["old"], TREE).is_file()
    assert mutation["new"] != mutation["old"] and "\n" not in mutation["new"]
    for test in mutation["tests"].split():
        assert (TREE / test.partition("::")[0]).is_file()


def test_the_committed_results_are_of_this_list_and_at_most_three_survive():
    results = read_results()
    assert [key(result) for result in results] == [key(mutation) for mutation in MUTATIONS]
    assert len(results) >= 60 and sum(not result["killed"] for result in results) <= 3
