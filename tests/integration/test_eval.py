"""The eval stage on a tiny model, end to end, and zero-shot tasks from a local file."""

import html
import json
import math

import numpy as np
import pytest
import torch

from ghostexport import calibration, models
from ghostexport.cli import resolve
from ghostexport.evaluation.tasks import ask, summarise
from ghostexport.evaluation.writing import variety
from ghostexport.execution import Execution
from ghostexport.pipeline import run as run_pipeline
from ghostexport.report.page import render
from ghostexport.report.sections import number
from ghostexport.runfolder import RunFolder

OPERATORS = ["ghost", "replaceme-lstsq"]


@pytest.fixture(scope="module")
def run(tiny_model, exported_run, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval") / "run"
    flags = {
        "calibration": {"source": str(text_file), "sequences": 24, "length": 64, "held_out_sequences": 6},
        "select": {"spans": [[2, 4]]},
        "recover": {"operators": OPERATORS},
        "build": {"runtimes": ["onnxruntime"]},
        "eval": {
            "windows": 5,
            "generate": 8,
            "prompts": 3,
            "resamples": 200,
            "corpora": [str(text_file)],
            "corpus_length": 48,
        },
    }
    recipe, run_folder = resolve(str(tiny_model), folder, None, flags)
    run_folder.adopt("export", exported_run)
    run_pipeline(recipe, run_folder, goal="eval")
    return folder, json.loads((folder / "model_quality.json").read_text())


@pytest.mark.slow
def test_text_figures_equal_the_models_own_loss_and_onnx_agrees(run, tiny_model):
    folder, report = run
    assert list(report["variants"]) == ["dense", "pruned", *OPERATORS]
    assert report["text"]["windows"] == 5 and report["text"]["spec"]["bos"] == 1
    loaded = models.load_model(tiny_model, "float32", Execution(device="cpu"))
    _, held_out = calibration.load(folder / "calibration.safetensors")
    ids = torch.from_numpy(held_out.tokens[:5])
    for name, found in report["variants"].items():
        operators = RunFolder(folder).read_operators(name)
        model = (
            loaded.model if name == "dense" else models.patch(loaded, RunFolder(folder).read_plan(), operators).model
        )
        loss = float(model(input_ids=ids, labels=ids).loss)
        assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
        assert found["onnx"]["perplexity"] == pytest.approx(found["perplexity"], rel=1e-4)
        assert found["onnx"]["kl"] == pytest.approx(found["kl"], abs=1e-4)
        assert len(found["losses"]) == 5 and found["tokens"] == 5 * 63
        assert len(found["samples"]) == 3 and all(sample["prompt"] for sample in found["samples"])
        assert found["writing"] == variety([greedy_ids(loaded, model, ids[i]) for i in range(3)])
    assert report["variants"]["dense"]["kl"] == 0 and report["variants"]["pruned"]["kl"] > 0


def greedy_ids(loaded, model, window):
    prompt = window[None, :24]
    return model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 24:].tolist()


@pytest.mark.slow
def test_a_corpus_is_measured_in_windows_without_gaps(run, tiny_model, text_file):
    folder, report = run
    (corpus,) = report["corpora"].values()
    loaded = models.load_model(tiny_model, "float32", Execution(device="cpu"))
    ids = loaded.tokenizer("\n\n".join(text_file.read_text().split("\n\n")))["input_ids"]
    assert corpus["windows"] == 5 and corpus["length"] == 48  # eval.windows limits it as well
    windows = torch.tensor(ids[: 5 * 48]).view(5, 48)
    for name in ("dense", "ghost"):
        operators = RunFolder(folder).read_operators(name)
        model = loaded.model if operators is None else models.patch(loaded, operators.plan, operators).model
        loss = float(model(input_ids=windows, labels=windows).loss)
        assert corpus["variants"][name]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert corpus["variants"]["dense"]["kl"] == 0 < corpus["variants"]["ghost"]["kl"]


@pytest.mark.slow
def test_differences_are_paired_and_complete(run):
    _, report = run
    variants = list(report["variants"])
    pairs = {(d["variant"], d["minus"]) for d in report["differences"]}
    assert len(pairs) == len(report["differences"]) == len(variants) * (len(variants) - 1) // 2
    for entry in report["differences"]:
        one, other = (report["variants"][entry[key]] for key in ("variant", "minus"))
        assert entry["loss"]["difference"] == pytest.approx(math.log(one["perplexity"] / other["perplexity"]))
        low, high = entry["loss"]["interval"]
        assert low <= entry["loss"]["difference"] <= high
        assert entry["loss"]["claimed"] == (not low <= 0 <= high)


@pytest.mark.slow
def test_the_ladder_and_the_operators_errors(run):
    _, report = run
    (cut,) = report["boundaries"]
    assert cut["span"] == [2, 4] and list(cut["operators"]) == OPERATORS
    assert list(cut["ladder"]) == ["scalar", "diagonal", "symmetric", "procrustes", "full"]
    ghost, full = cut["operators"]["ghost"], cut["ladder"]["full"]
    assert ghost["nmse"] == pytest.approx(full["nmse"], rel=1e-3)
    assert ghost["sink_relative_error"] == pytest.approx(full["sink_relative_error"], rel=1e-2)
    assert all(np.isfinite(v) for kind in ("ladder", "operators") for f in cut[kind].values() for v in f.values())


@pytest.mark.slow
def test_a_second_eval_is_kept(run, cli):
    folder, _ = run
    code, _, err = cli("eval", folder)
    assert code == 0 and "eval: current, kept" in err


@pytest.mark.slow
def test_the_report_shows_it(run):
    folder, evaluation = run
    page = html.unescape(render(RunFolder(folder)))
    assert 'id="evaluation"' in page and "Cut [2, 4)" in page
    for found in evaluation["variants"].values():
        assert number(found["perplexity"]) in page and all(sample["text"] in page for sample in found["samples"])
    for figures in evaluation["boundaries"][0]["ladder"].values():
        assert number(figures["nmse"]) in page


TASK = """
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data}}}}}
validation_split: validation
test_split: null
output_type: multiple_choice
target_delimiter: ""
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@pytest.mark.slow
def test_tasks_from_a_local_file_need_no_network(tiny_model, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="extra [eval]")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    questions = [
        {"question": f"Stone {i} is", "choices": [" red", " blue and green", " old"], "answer": i % 3} for i in range(7)
    ]
    data = tmp_path / "colours.jsonl"
    data.write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "colours.yaml").write_text(TASK.format(data=data))
    (tmp_path / "scratch").mkdir()
    loaded = models.load_model(tiny_model, "float32", Execution(device="cpu"))
    found = ask({"dense": loaded.model}, loaded.tokenizer, ["colours"], tmp_path, 6, tmp_path / "scratch", Execution())
    expected = {"acc": [], "acc_norm": []}

    def tokens(text):
        return loaded.tokenizer(text, add_special_tokens=False)["input_ids"]

    def log_likelihood(question, choice):
        prompt = [loaded.tokenizer.bos_token_id, *tokens(question)]
        ids = [*prompt, *tokens(choice)]
        with torch.no_grad():
            log_p = loaded.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(float(log_p[t - 1, ids[t]]) for t in range(len(prompt), len(ids)))

    for item in questions[:6]:
        scores = np.array([log_likelihood(item["question"], choice) for choice in item["choices"]])
        lengths = np.array([len(choice) for choice in item["choices"]])
        expected["acc"].append(float(scores.argmax() == item["answer"]))
        expected["acc_norm"].append(float((scores / lengths).argmax() == item["answer"]))
    assert found["dense"]["colours"] == expected


ANSWERED = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data}}}}}
validation_split: validation
test_split: null
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["###"], do_sample: false, max_gen_toks: 4}}
filter_list:
  - name: whole
    filter: [{{function: take_first}}]
  - name: first-word
    filter: [{{function: regex, regex_pattern: "(\\\\S+)"}}, {{function: take_first}}]
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: false
"""


@pytest.mark.slow
def test_a_task_with_answers_in_words_keeps_its_own_metrics(tiny_model, tmp_path, monkeypatch):
    """As gsm8k is: text is generated, read in two ways, and compared. Here half of the answers are what is written."""
    pytest.importorskip("lm_eval", reason="extra [eval]")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    loaded = models.load_model(tiny_model, "float32", Execution(device="cpu"))
    tokenizer = loaded.tokenizer

    def written(question):
        ids = torch.tensor([tokenizer(question)["input_ids"]])
        with torch.no_grad():
            for _ in range(4):
                ids = torch.cat([ids, loaded.model(ids).logits[:, -1:].argmax(-1)], dim=1)
        return tokenizer.decode(ids[0, -4:], skip_special_tokens=True)

    questions = [f"Stone {i} is" for i in range(6)]
    texts = [written(question) for question in questions]
    answers = [text if i % 3 == 0 else text.split()[0] if i % 3 == 1 else "no" for i, text in enumerate(texts)]
    data = tmp_path / "sums.jsonl"
    rows = [{"question": q, "answer": a} for q, a in zip(questions, answers, strict=True)]
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "sums.yaml").write_text(ANSWERED.format(data=data))
    (tmp_path / "scratch").mkdir()
    found = ask({"dense": loaded.model}, tokenizer, ["sums"], tmp_path, 6, tmp_path / "scratch", Execution())
    assert found["dense"]["sums"] == {
        "exact_match,whole": [float(a == t) for a, t in zip(answers, texts, strict=True)],
        "exact_match,first-word": [float(a == t.split()[0]) for a, t in zip(answers, texts, strict=True)],
    }
    for name, values in found["dense"]["sums"].items():
        assert 0 < sum(values) < 6
        assert summarise(found)["dense"]["average"][name] == pytest.approx(sum(values) / 6)
