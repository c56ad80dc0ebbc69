"""Quality words, refits and plain checkpoints through the command line, on a tiny model."""

import importlib
import json

import numpy as np
import pytest
import torch
import transformers

from ghostexport import models
from ghostexport.commands.flags import FLAGS
from ghostexport.errors import RecipeError
from ghostexport.operators import load_operators
from ghostexport.plan import PrunePlan
from ghostexport.recipe import QUALITIES, parse_recipe

MODEL = {"model": {"source": "x"}}


def test_words_resolve_to_operators():
    for word, operators in QUALITIES.items():
        recipe = parse_recipe(MODEL | {"recover": {"quality": word, "operators": ["ghost-zero"]}})
        assert recipe.recover.operators == operators
        assert parse_recipe(json.loads(recipe.model_dump_json())) == recipe
        assert f"{word} (" in FLAGS["quality"].help
    assert QUALITIES["paper"] == ("ghost",)
    recipe = parse_recipe(MODEL | {"recover": {"operators": ["ghost", "ghost-zero+refit"], "refit_downstream": True}})
    assert recipe.recover.operators == ("ghost+refit", "ghost-zero+refit")
    recipe = parse_recipe(MODEL | {"recover": {"operators": ["ghost", "ghost-zero+refit"], "refit_downstream": False}})
    assert recipe.recover.operators == ("ghost", "ghost-zero")
    assert parse_recipe(MODEL | {"recover": {"ridge": "cv", "rank": 8}}).recover.ridge == "cv"
    for wrong in ({"refit_downstream": "yes"}, {"operators": [1], "refit_downstream": True}, {"operators": "ghost"}):
        with pytest.raises(RecipeError, match="recover"):
            parse_recipe(MODEL | {"recover": wrong})
    with pytest.raises(RecipeError, match="Did you mean 'refit_downstream'"):
        parse_recipe(MODEL | {"recover": {"refit_downsteam": True}})
    with pytest.raises(RecipeError, match="Did you mean 'best'"):
        parse_recipe(MODEL | {"recover": {"quality": "bst"}})
    with pytest.raises(RecipeError, match="ghost-zero"):
        parse_recipe(MODEL | {"recover": {"operators": ["ghost-zer+refit"]}})


def test_a_zero_node_variant_is_an_ordinary_checkpoint(cli, tmp_path, tiny_model, text_file, monkeypatch):
    """Stock transformers loads it and computes what the patched model computes, with both weights of a block refitted.

    The judge of a refit, which would leave nearly every weight of a random model as it is, is told to take them all.
    """
    monkeypatch.setattr(importlib.import_module("ghostexport.recovery.refit.walk"), "surely_less", lambda *sides: True)
    run = tmp_path / "run"
    arguments = ["--plan", "[[2, 4]]", "--operator", "ghost-zero", "--refit-downstream", "--calibration", text_file]
    code, _, err = cli("recover", tiny_model, "-o", run, *arguments, "--sequences", 16, "--length", 64)
    assert code == 0, err
    folder = run / "checkpoint" / "ghost-zero+refit"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    transformers.AutoTokenizer.from_pretrained(folder)
    operators = load_operators(run / "operators" / "ghost-zero+refit.safetensors")
    assert stock.config.num_hidden_layers == 4 and not operators.adds_nodes
    assert {fold.role for fold in operators.operators[0].folds} == {"attention_output", "mlp_output"}
    dense = models.load_model(tiny_model, "float32")
    patched = models.patch(dense, PrunePlan.from_spans(6, [[2, 4]]), operators).model
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 200, (2, 20)))
    with torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, patched(ids).logits, rtol=1e-5, atol=1e-5)
    manifest = json.loads((run / "manifest.json").read_text())
    assert any("checkpoint/" in path for path in manifest["stages"]["recover"]["outputs"])
    code, _, err = cli("recover", run, "--prune", "60")
    assert code == 2 and folder.exists(), err  # nothing was selected: the plan is the old one
    code, _, err = cli("recover", run, "--plan", "[[1, 2]]", "--operator", "ghost")
    assert code == 0 and not folder.exists(), err  # it was of the other plan


def test_two_ways_to_name_the_operators_are_one_too_many(cli, tmp_path, tiny_model):
    code, _, err = cli("recover", tiny_model, "-o", tmp_path / "run", "--quality", "best", "--operator", "ghost")
    assert code == 2 and "--quality and --operator" in err and not (tmp_path / "run").exists()
