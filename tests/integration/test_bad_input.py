"""What a user gets wrong: one clear message, exit code 2, nothing written."""

import json

import pytest
import torch

from tests.tiny import tiny, tiny_folder

OWN_EXPORTS = True


def good(tiny_model, text_file, run):
    return ["build", "engine", tiny_model, "-o", run, "--calibration", text_file, "--sequences", "24", "--length", "64"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--prune", "0"], "select.prune"),
        (["--prune", "6"], "6 decoder blocks"),
        (["--prune", "99"], "6 decoder blocks"),
        (["--plan", "[[4, 2]]"], "reversed"),
        (["--plan", "[[2, 9]]"], "has 6 decoder blocks"),
        (["--plan", "{oops"], "neither JSON nor a readable file"),
        ([], "what to remove"),
        (["--prune", "2", "--select", "streamlin"], "Did you mean 'streamline'"),
        (["--prune", "2", "--operator", "gohst"], "Did you mean 'ghost'"),
        (["--prune", "2", "--runtime", "onnxruntim"], "Did you mean 'onnxruntime'"),
        (["--prune", "2", "--dtype", "int8"], "model.dtype"),
        (["--prune", "2", "--recipe", "/nowhere.yaml"], "does not exist"),
        (["--prune", "2", "--device", "tpu"], "device"),
    ],
)
def test_bad_flags(cli, tiny_model, text_file, tmp_path, flags, says):
    code, _, err = cli(*good(tiny_model, text_file, tmp_path / "run"), *flags)
    assert code == 2 and says in err and "Traceback" not in err
    assert not (tmp_path / "run" / "onnx").exists() and not (tmp_path / "run" / "plan.json").exists()


def test_unknown_recipe_key_in_a_file(cli, tiny_model, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("recover: {operator: [ghost]}\n")
    code, _, err = cli("build", "engine", tiny_model, "-o", tmp_path / "run", "--recipe", recipe)
    assert code == 2 and "unknown key 'recover.operator'. Did you mean 'operators'" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("model", ["no/such-model-anywhere", "./missing-folder", "missing.gguf"])
def test_unknown_model(cli, text_file, tmp_path, monkeypatch, model):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable is read on import
    code, _, err = cli(*good(model, text_file, tmp_path / "run"), "--prune", "2")
    assert code == 2 and model.lstrip("./") in err and "Traceback" not in err


@pytest.mark.parametrize("content", [b"", b"\x00\x01\xff\xfe" * 100, b"   \n\n"])
def test_empty_or_binary_calibration_file(cli, tiny_model, tmp_path, content):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(content)
    code, _, err = cli(*good(tiny_model, bad, tmp_path / "run"), "--prune", "2")
    assert code == 2 and "bad.txt" in err


def test_missing_calibration_file(cli, tiny_model, tmp_path):
    code, _, err = cli(*good(tiny_model, tmp_path / "none.txt", tmp_path / "run"), "--prune", "2")
    assert code == 2 and "none.txt" in err


def test_too_few_calibration_tokens_says_how_many(cli, tiny_model, text_file, tmp_path):
    code, _, err = cli(*good(tiny_model, text_file, tmp_path / "run"), "--prune", "2", "--sequences", "1")
    assert code == 2 and "128" in err  # at least 2 C tokens for C = 64


def test_vocabulary_mismatch(cli, text_file, tmp_path):
    model = tiny_folder(tmp_path / "model", vocab_size=100)
    code, _, err = cli(*good(model, text_file, tmp_path / "run"), "--prune", "2")
    assert code == 2 and "vocab" in err.lower()


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), "float32"), (60000.0, "float16")])
def test_non_finite_activations_and_fp16_overflow(cli, text_file, tmp_path, value, dtype):
    folder = tiny_folder(tmp_path / "model")
    model = tiny("llama-tied", vocab_size=264)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(value)
    model.save_pretrained(folder)
    code, _, err = cli(*good(folder, text_file, tmp_path / "run"), "--prune", "2", "--dtype", dtype)
    assert code == 2 and ("finite" in err or "float16" in err) and "Traceback" not in err


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder"])
def test_models_that_are_not_decoders(cli, text_file, tmp_path, kind):
    from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

    if kind == "encoder":
        config = BertConfig(
            vocab_size=264, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
        model = BertModel(config)
    else:
        model = T5ForConditionalGeneration(
            T5Config(vocab_size=264, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
        )
    folder = tiny_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    code, _, err = cli(*good(folder, text_file, tmp_path / "run"), "--prune", "1")
    assert code == 2 and "decoder" in err and "Traceback" not in err


def test_a_run_folder_of_another_model_is_left_alone(cli, tiny_model, text_file, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    recipe = "model: {source: other/model}\nselect: {prune: 2}\n"
    (run / "recipe.yaml").write_text(recipe)
    code, _, err = cli(*good(tiny_model, text_file, run), "--prune", "2")
    assert code == 2 and "another model: other/model" in err
    assert (run / "recipe.yaml").read_text() == recipe and len(list(run.iterdir())) == 1


def test_a_folder_with_other_files_is_not_taken_over(cli, tiny_model, text_file, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    code, _, err = cli(*good(tiny_model, text_file, tmp_path), "--prune", "2")
    assert code == 2 and "not a run folder" in err
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_model_without_an_output_folder(cli, tiny_model):
    code, _, err = cli("build", "engine", tiny_model, "--prune", "2")
    assert code == 2 and "-o RUN" in err


def test_show_of_something_else(cli, tmp_path):
    code, _, err = cli("show", tmp_path)
    assert code == 2 and "not a run folder" in err


def test_no_disk_space(cli, tiny_model, text_file, tmp_path, monkeypatch):
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 0))
    code, _, err = cli("export", tiny_model, "-o", tmp_path / "run", "--prune", "2")
    assert code == 2 and "No disk space" in err
    assert not list((tmp_path / "run").glob("onnx/*"))


@pytest.mark.parametrize(
    ("source", "module", "command"),
    [("demo", "exllamav3", "pip install --no-deps exllamav3"), ("wikitext2", "datasets", "ghostexport[data]")],
)
def test_a_missing_extra_names_the_pip_install(cli, tiny_model, tmp_path, monkeypatch, source, module, command):
    import importlib.util
    import sys

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == module else real(name, *a))
    monkeypatch.setitem(sys.modules, module, None)
    code, _, err = cli(*good(tiny_model, source, tmp_path / "run"), "--prune", "2")
    assert code == 2 and command in err


def test_spans_in_json_and_in_a_plan_file_mean_the_same(tiny_model, tmp_path):
    from ghostexport.commands.arguments import spans_of

    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"num_blocks": 6, "removed": [[1, 3]]}))
    assert spans_of(str(path)) == spans_of("[[1, 3]]") == [[1, 3]]
