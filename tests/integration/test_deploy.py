"""Deployed folders: what each target gets and refuses, its card and hashes, and a self-test that notices faults."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from ghostexport.deploy import TARGETS, deploy, selftest
from ghostexport.deploy.selftest import FILE, GREEDY, check, read_selftest
from ghostexport.errors import ParityError, RecipeError, RunFolderError
from ghostexport.execution import Execution
from ghostexport.recipe import BuildSection
from ghostexport.runfolder import RunFolder
from ghostexport.runtimes import RUNTIMES
from ghostexport.runtimes.ort.onnxruntime import open_graph

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


def test_the_folder_is_one_that_the_hub_takes(folder, monkeypatch):
    from huggingface_hub import HfApi, ModelCard

    sent = []

    def commit(operations, **_):
        sent.extend(operations)
        return SimpleNamespace(commit_url="", pr_url=None, oid="0")

    monkeypatch.setattr("huggingface_hub.hf_api.is_xet_available", lambda: False)  # one commit in place of a stream
    monkeypatch.setattr(HfApi, "_validate_yaml", lambda self, content, **k: None)  # the Hub's own check of the card
    monkeypatch.setattr(HfApi, "create_commit", lambda self, *a, **k: commit(**k))
    HfApi(token="hf_none").upload_folder(repo_id="me/cut", folder_path=folder)
    listed = {line.split("  ", 1)[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert {operation.path_in_repo for operation in sent} == listed | {"SHA256SUMS"}
    about = ModelCard.load(folder / "README.md").data
    assert (about.library_name, about.license, about.base_model) == ("transformers", "other", "conversing-model")


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


def test_an_engine_folder_holds_the_plan_that_tensorrt_rtx_built(built_run, tmp_path):
    pytest.importorskip("tensorrt_rtx")
    run = RunFolder(shutil.copytree(built_run.path, tmp_path / "run"))
    with pytest.raises(RecipeError, match=r"no tensorrt-rtx engine yet.*\n?.*build engine \S+ --runtime tensorrt-rtx"):
        deploy(run.path, "tensorrt-rtx", tmp_path / "out", "ghost", CPU)
    target = run.engine_path("tensorrt-rtx", "ghost")
    engine = RUNTIMES["tensorrt-rtx"].build(run.graph_path("ghost"), target, "ghost", BuildSection(), CPU)
    told = deploy(run.path, "tensorrt-rtx", tmp_path / "out", None, CPU)  # the only one with an engine
    folder = tmp_path / "out"
    assert "passed" in told or "runs on a GPU" in told
    assert (folder / "ghost.engine").read_bytes() == engine.path.read_bytes()
    names = {"run.py", "run.json", "ghost.json", "tokenizer.json", "README.md", "LICENSE", "SHA256SUMS", FILE}
    assert names <= {p.name for p in folder.iterdir()}
    card = (folder / "README.md").read_text()
    for line in (f"pip install tensorrt_rtx=={engine.version} cuda-python", "--loadEngine=ghost.engine --useProfile=1"):
        assert line in card
    about = json.loads((folder / "run.json").read_text())
    longest = max(len(p["ids"]) for p in read_selftest(folder)["prompts"])
    assert about["context"] - longest >= GREEDY and about["plans"] == {"ghost.engine": engine.plan_sha256}
    (folder / "ghost.engine").unlink()
    with pytest.raises(RunFolderError, match=r"ghost\.engine is missing"):
        selftest(folder)


@pytest.mark.slow
def test_lm_evals_loglikelihoods_of_the_folder_are_the_graphs(built_run, folder):
    pytest.importorskip("lm_eval", reason="extra [eval]")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(folder), trust_remote_code=True, device="cpu", batch_size=2)
    items = [("Stone 1 is", " red"), ("Block number 7", " of the garden holds"), ("The", " river runs north")]
    found = model.loglikelihood([Instance("loglikelihood", {}, item, i) for i, item in enumerate(items)])
    session = open_graph(built_run.graph_path("ghost"))
    for (context, rest), (value, greedy) in zip(items, found, strict=True):
        ids, start = np.array([model.tok_encode(context + rest)]), len(model.tok_encode(context))
        logits = session.forward(ids, session.new_cache(1))[0][0, start - 1 : -1].astype(np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert value == pytest.approx(log_p[np.arange(len(log_p)), ids[0, start:]].sum(), rel=1e-5)
        assert greedy == (logits.argmax(-1) == ids[0, start:]).all()
