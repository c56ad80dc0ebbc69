"""Deployed folders: what each target gets and refuses, its card and hashes, and a self-test that notices faults."""

import json
import shutil

import numpy as np
import pytest

from ghostexport.deploy import TARGETS, deploy, selftest
from ghostexport.deploy.selftest import FILE, GREEDY, check
from ghostexport.errors import ParityError, RecipeError, RunFolderError
from ghostexport.execution import Execution

CPU = Execution(device="cpu")


@pytest.fixture(scope="module")
def folder(built_run, tmp_path_factory):
    """The ``transformers`` folder of ``ghost``."""
    output = tmp_path_factory.mktemp("deployed") / "hf"
    assert "passed" in deploy(built_run.path, "transformers", output, "ghost", CPU)
    return output


def test_a_folder_carries_card_licence_tokenizer_hashes_and_selftest(folder):
    card = (folder / "README.md").read_text()
    for part in ("Removed decoder blocks: [", "of 6", "Repair: ghost", "Parity with PyTorch", "LICENSE", "recover:"):
        assert part in card
    names = {path.name for path in folder.iterdir()}
    assert {"LICENSE", "tokenizer.json", "chat_template.jinja", "SHA256SUMS", FILE, "modeling_ghost.py"} <= names
    test = json.loads((folder / FILE).read_text())
    assert len(test["prompts"]) == 5 and all(len(p["greedy"]) == GREEDY for p in test["prompts"])
    assert "passed" in str(selftest(folder))


def test_missing_or_altered_files_and_wrong_answers_are_found(folder, tmp_path):
    for name in ("model.safetensors", "modeling_ghost.py"):
        broken = shutil.copytree(folder, tmp_path / name)
        (broken / name).unlink()
        with pytest.raises(RunFolderError, match=f"{name} is missing"):
            selftest(broken)
        (broken / name).write_bytes(b"other")
        with pytest.raises(RunFolderError, match=f"{name} was changed"):
            selftest(broken)

    def answers(change):
        def run(place, prompts, count):
            return [change(*answer) for answer in TARGETS["transformers"].run(place, prompts, count)]

        return run

    assert check(folder, answers(lambda logits, tokens: (None, tokens))).passed
    for change in (
        lambda logits, tokens: (logits * 1.01, tokens),
        lambda logits, tokens: (np.full_like(logits, np.nan), tokens),
        lambda logits, tokens: (logits, [(t + 1) % 100 for t in tokens]),
        lambda logits, tokens: (None, tokens[:-1]),
    ):
        with pytest.raises(ParityError, match="FAILED"):
            check(folder, answers(change))


def test_a_dropped_operator_is_caught(built_run, folder, tmp_path):
    deploy(built_run.path, "transformers", tmp_path / "pruned", "pruned", CPU)
    with pytest.raises(ParityError, match="FAILED"):
        check(folder, lambda _, prompts, count: TARGETS["transformers"].run(tmp_path / "pruned", prompts, count))


def test_a_target_refuses_what_it_cannot_hold_and_names_what_fits(built_run, tmp_path):
    with pytest.raises(RecipeError, match=r"no place for an operator.*\n?.*What fits: ghost-zero\+refit"):
        deploy(built_run.path, "checkpoint", tmp_path / "out", "ghost", CPU)
    with pytest.raises(RecipeError, match="float weights, not int8"):
        deploy(built_run.path, "transformers", tmp_path / "out", "ghost.int8", CPU)
    with pytest.raises(RecipeError, match="Did you mean 'genai'"):
        deploy(built_run.path, "genei", tmp_path / "out", "ghost", CPU)
    assert not (tmp_path / "out").exists()


def test_a_folded_variant_is_an_ordinary_checkpoint(built_run, tmp_path):
    assert "passed" in deploy(built_run.path, "checkpoint", tmp_path / "out", None, CPU)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama" and config["num_hidden_layers"] == 4 and "auto_map" not in config
