"""A dozen decoder families from the checkpoint to verified graphs, as ``benchmarks/architectures.py`` runs them all."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import architectures

OWN_EXPORTS = True

#: Tied head; experts; sinks; compressed attention; alibi; multipliers; parallel; post-norm; convolutions beside
#: attention; states alone.
WHOLE = [
    "llama-tied", "qwen3_moe", "gpt_oss", "deepseek_v3", "falcon-alibi", "granite", "cohere2", "gptj", "gemma3", "lfm2",
    "mamba2",
]  # fmt: skip
#: States which transformers continues otherwise, keeps elsewhere, or computes in a loop over chunks.
STATEFUL = ["jamba", "recurrent_gemma", "qwen3_next"]


def states(name, folder):
    row = architectures.Row(name, folder)
    row.run(engine=False)
    failed = {column: cell for column, cell in row.cells.items() if cell["state"] == "failed"}
    assert not failed
    return row, {column: cell["state"] for column, cell in row.cells.items() if column != "best"}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_the_whole_way(name, tmp_path):
    _, found = states(name, tmp_path)
    assert set(found.values()) == {"passed"}


@pytest.mark.slow
@pytest.mark.parametrize("name", STATEFUL)
def test_a_model_that_cannot_be_exported_is_repaired_and_saved(name, tmp_path):
    row, found = states(name, tmp_path)
    assert found["export"] == "refused" and "--to checkpoint" in row.cells["export"]["note"]
    assert {found[column] for column in ("load", "select", "ghost", "reload")} == {"passed"}
