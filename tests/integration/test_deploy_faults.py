"""Deliberate faults in deployed folders whose hashes are right: only the answers tell."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ghostexport.deploy import deploy, llama_cpp, openvino, selftest
from ghostexport.deploy.bundle import SUMS, write_sums
from ghostexport.errors import ParityError, RunFolderError
from ghostexport.execution import Execution

CPU = Execution(device="cpu")


@pytest.fixture(scope="module")
def deployed(built_run, tmp_path_factory):
    """``deployed(target, variant)``: its folder, whose self-test passed."""
    root, made = tmp_path_factory.mktemp("deployed"), {}

    def folder(target, variant):
        output = root / f"{target}-{variant}"
        if output not in made:
            made[output] = deploy(built_run.path, target, output, variant, CPU)
            assert "passed" in made[output]
        return output

    return folder


@pytest.fixture(scope="module")
def merging_run(built_run, tmp_path_factory):
    """The run with one merge in its tokenizer: llama.cpp reads none without."""
    path = shutil.copytree(built_run.path, tmp_path_factory.mktemp("merging") / "run")
    file = path / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["th"] = 259
    tokenizer["model"]["merges"] = [["t", "h"]]
    file.write_text(json.dumps(tokenizer))
    (path / "model" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    return path


def fails(folder, tmp_path, change):
    """After ``change`` of a copy, with hashes made anew, the self-test fails."""
    copy = shutil.copytree(folder, tmp_path / f"changed-{len(list(tmp_path.iterdir()))}")
    change(copy)
    (copy / SUMS).unlink()
    write_sums(copy)
    with pytest.raises(ParityError, match="FAILED"):
        selftest(copy)


@pytest.mark.parametrize("part", ["q", pytest.param("k", marks=pytest.mark.slow)])
def test_rows_of_q_or_k_in_llama_cpps_order_in_a_checkpoint(part, deployed, tmp_path):
    def permute(folder):
        path = folder / "model.safetensors"
        tensors = load_file(path)
        name, heads = f"model.layers.1.self_attn.{part}_proj.weight", {"q": 4, "k": 2}[part]
        assert tensors[name].shape[0] == heads * 16
        save_file(tensors | {name: llama_cpp._neighbouring(tensors[name], heads)}, path, {"format": "pt"})

    fails(deployed("checkpoint", "ghost-zero+refit"), tmp_path, permute)


def test_rows_of_q_and_k_in_transformers_order_in_a_gguf_file(merging_run, tmp_path, monkeypatch):
    pytest.importorskip("xllamacpp")
    assert "passed" in deploy(merging_run, "gguf", tmp_path / "right", None, CPU)
    require_both_files(tmp_path / "right")
    monkeypatch.setattr(llama_cpp, "_neighbouring", lambda rows, heads: rows)
    with pytest.raises(ParityError, match="FAILED"):
        deploy(merging_run, "gguf", tmp_path / "out", None, CPU)
    assert not (tmp_path / "out").exists()


def require_both_files(folder):
    """One holds what the other rounds to eight bits, 32 numbers a scale; both name the licence, as the card does."""
    from gguf import GGMLQuantizationType, GGUFReader, dequantize

    whole, rounded = (GGUFReader(folder / f"model.{name}.gguf") for name in ("f16", "q8_0"))
    assert all(r.fields["general.license"].contents() == "apache-2.0" for r in (whole, rounded))
    assert "license: apache-2.0" in (folder / "README.md").read_text()
    assert [t.name for t in whole.tensors] == [t.name for t in rounded.tensors]
    for one, two in zip(whole.tensors, rounded.tensors, strict=True):
        if len(one.shape) == 1:
            assert one.tensor_type == two.tensor_type == GGMLQuantizationType.F32
            continue
        assert (one.tensor_type, two.tensor_type) == (GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0)
        a, b = (dequantize(t.data, t.tensor_type).reshape(-1, 32) for t in (one, two))
        # half a step, and what 11 bits of the scale and of the whole number's file lose at the 127th
        assert (np.abs(a - b).max(1) <= (0.5 / 127 + 2 * 2**-11) * np.abs(a).max(1)).all() and not np.array_equal(a, b)


def test_a_fold_that_was_dropped_from_a_gguf_file(merging_run, tmp_path, monkeypatch):
    pytest.importorskip("xllamacpp")
    whole = llama_cpp.patched
    monkeypatch.setattr(llama_cpp, "patched", lambda bundle, how: whole(replace(bundle, operators=None), how))
    with pytest.raises(ParityError, match="FAILED"):
        deploy(merging_run, "gguf", tmp_path / "out", None, CPU)


def test_keys_and_values_exchanged_in_genai(deployed, tmp_path):
    pytest.importorskip("onnxruntime_genai")

    def exchange(folder):
        path = folder / "genai_config.json"
        config = json.loads(path.read_text())
        names = config["model"]["decoder"]["inputs"]
        names["past_key_names"], names["past_value_names"] = names["past_value_names"], names["past_key_names"]
        path.write_text(json.dumps(config))

    fails(deployed("genai", "ghost"), tmp_path, exchange)


def test_a_graph_without_its_operator_in_genai(built_run, deployed, tmp_path):
    pytest.importorskip("onnxruntime_genai")

    def drop(folder):
        for name in ("model.onnx", "model.onnx.data"):
            shutil.copyfile(deployed("genai", "pruned") / name, folder / name)

    fails(deployed("genai", "ghost"), tmp_path, drop)


@pytest.mark.parametrize(
    "order", [(1, 0, 3, 2, 5, 4, 7, 6), pytest.param((2, 3, 0, 1, 4, 5, 6, 7), marks=pytest.mark.slow)]
)
def test_a_cache_in_another_order_in_openvino(order, built_run, tmp_path, monkeypatch):
    pytest.importorskip("openvino")
    whole = openvino._make_stateful

    def exchanged(ov, model, bundle):
        kv = bundle.interface.kv
        wrong = tuple((past, kv[order[i]][1]) for i, (past, _) in enumerate(kv))
        whole(ov, model, SimpleNamespace(interface=replace(bundle.interface, kv=wrong)))

    monkeypatch.setattr(openvino, "_make_stateful", exchanged)
    with pytest.raises(ParityError, match="FAILED"):
        deploy(built_run.path, "openvino", tmp_path / "out", "ghost", CPU)


@pytest.mark.parametrize(
    ("target", "name"),
    [("transformers", "model.safetensors"), ("genai", "model.onnx.data"), ("openvino", "openvino_model.bin")],
)
def test_the_file_that_holds_the_operator_must_be_there_unchanged(target, name, deployed, tmp_path):
    pytest.importorskip({"genai": "onnxruntime_genai"}.get(target, target))
    copy = shutil.copytree(deployed(target, "ghost"), tmp_path / "copy")
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(RunFolderError, match=f"{name} was changed"):
        selftest(copy)
    (copy / name).unlink()
    with pytest.raises(RunFolderError, match=f"{name} is missing"):
        selftest(copy)
