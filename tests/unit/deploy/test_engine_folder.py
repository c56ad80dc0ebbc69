"""``run.py`` of the engine folders on the strict fakes of every release: what it prints, computes and refuses."""

import hashlib
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from ghostexport.deploy import engine_folder
from ghostexport.execution import Execution
from ghostexport.runtimes.interface import read_interface
from ghostexport.runtimes.ort.onnxruntime import open_graph
from ghostexport.runtimes.sidecar import read_sidecar
from ghostexport.serving.generation import generate
from tests.runtime_graphs import variant_graph
from tests.unit.runtimes.in_place import CAPACITY, VOCABULARY, in_place_graph, in_place_logits
from tests.unit.runtimes.test_cuda_device import FakeBindings
from tests.unit.runtimes.test_nvinfer import build, flavour
from tests.unit.runtimes.vendor_listing import RELEASES, is_rtx, listing

LIMITS = {"max_batch": 2, "max_tokens": 16, "max_past": 159}
PROMPT = [3, 17, 90, 5, 44, 8, 21, 64, 90, 3, 17, 5, 99, 2, 4, 6, 8, 10, 12, 14]  # two calls of the prefill profile


def folder_of(release, graph, output, monkeypatch, ends=(), **limits):
    """The target's folder of an engine that a fake release built, whose modules are importable."""
    runtime, trt = flavour(release, monkeypatch)
    engine = build(runtime, graph, output / "engines", **limits)
    run = SimpleNamespace(sidecar_path=lambda name, variant: engine.sidecar)
    codec = SimpleNamespace(ends=frozenset(ends), positions=None)
    bundle = SimpleNamespace(folder=run, variant="ghost", graph=graph, interface=read_interface(graph), codec=codec)
    (output / "folder").mkdir()
    engine_folder.write(bundle, output / "folder", Execution(), runtime.name)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(output / "folder" / "tokenizer.json"))
    return output / "folder", bundle, trt, install(monkeypatch, release, trt)


def install(monkeypatch, release, trt):
    """Makes the fake release and CUDA bindings on host memory importable."""
    bindings, cuda, package = FakeBindings(), ModuleType("cuda.bindings"), ModuleType("cuda")
    cuda.runtime = bindings
    modules = {"tensorrt_rtx" if is_rtx(release) else "tensorrt": trt, "cuda": package, "cuda.bindings": cuda}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return bindings


def printed(folder, capsys, monkeypatch, *options):
    text = " ".join(f"w{i}" for i in PROMPT)
    monkeypatch.setattr(sys, "argv", ["run.py", text, *options])
    runpy.run_path(str(folder / "run.py"), run_name="__main__")
    return [int(word[1:]) for word in capsys.readouterr().out.split()]


def answer(graph, count):
    return generate(open_graph(graph), np.array([PROMPT]), count)[0].tolist()


def test_run_py_is_short_and_imports_only_what_it_says(tmp_path, monkeypatch):
    folder, *_ = folder_of(RELEASES[0], variant_graph("ghost"), tmp_path, monkeypatch, **LIMITS)
    lines = (folder / "run.py").read_text().splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 120
    found = {line.split()[1].split(".")[0] for line in lines if line.lstrip().startswith(("import ", "from "))}
    assert found == {"argparse", "hashlib", "importlib", "json", "math", "pathlib", "numpy", "cuda", "tokenizers"}


@pytest.mark.parametrize("release", RELEASES)
def test_it_prints_the_graphs_greedy_text(release, tmp_path, monkeypatch, capsys):
    graph = variant_graph("ghost")
    profiles = "split" if release == RELEASES[1] else "joint"
    folder, _, trt, bindings = folder_of(release, graph, tmp_path, monkeypatch, profiles=profiles, **LIMITS)
    trt.calls.clear()
    assert printed(folder, capsys, monkeypatch, "--max-new-tokens", "20") == answer(graph, 20)
    assert trt.calls.count("IExecutionContext.execute_async_v3") == 2 + 19  # the prompt is read in two calls
    assert bindings.calls.count("cudaMalloc") == 3 + 1 + 2 * 4  # inputs, logits, two sets of two blocks' keys, values
    assert (folder / "kernels.cache").exists() == is_rtx(release)
    assert ("IRuntimeConfig.set_runtime_cache" in trt.calls) == is_rtx(release)


def test_it_ends_at_an_end_token_and_where_the_engine_is_full(tmp_path, monkeypatch, capsys):
    graph = variant_graph("ghost")
    expected = answer(graph, 140)
    end = next(t for t in expected[5:] if t not in expected[:5])
    (tmp_path / "a").mkdir()
    folder, *_ = folder_of(RELEASES[0], graph, tmp_path / "a", monkeypatch, (end,), **LIMITS)
    assert printed(folder, capsys, monkeypatch) == expected[: expected.index(end)]
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {"ends": []}))
    assert printed(folder, capsys, monkeypatch, "--max-new-tokens", "1000") == expected  # 160 tokens in all
    (folder / "run.json").write_text(json.dumps(about | {"context": len(PROMPT) - 1}))
    assert printed(folder, capsys, monkeypatch) == []


def test_sampling_draws_from_the_filtered_distribution(tmp_path, monkeypatch, capsys):
    graph = variant_graph("ghost")
    folder, *_ = folder_of(RELEASES[0], graph, tmp_path, monkeypatch, **LIMITS)
    few = ("--max-new-tokens", "6", "--temperature", "0.7")
    assert printed(folder, capsys, monkeypatch, *few, "--top-k", "1") == answer(graph, 6)
    assert printed(folder, capsys, monkeypatch, *few, "--top-p", "1e-9") == answer(graph, 6)
    one, two = (printed(folder, capsys, monkeypatch, *few, "--seed", seed) for seed in "12")
    assert one != two and one == printed(folder, capsys, monkeypatch, *few, "--seed", "1")
    choose = runpy.run_path(str(folder / "run.py"))["choose"]
    logits, rng = np.log(np.array([0.1, 0.5, 0.3, 0.1], np.float32)), np.random.default_rng(0)
    given = SimpleNamespace(temperature=0.5, top_k=3, top_p=0.95)  # squares 1 25 9 1: of the three first 25/35 and 9/35
    drawn = np.bincount([choose(logits, given, rng) for _ in range(4000)], minlength=4) / 4000
    assert np.abs(drawn - [0, 25 / 34, 9 / 34, 0]).max() < 0.03


@pytest.mark.parametrize("release", [r for r in RELEASES if "get_aliased_input_tensor" in listing(r)["ICudaEngine"]])
def test_a_cache_updated_in_place_has_one_set_of_buffers(release, tmp_path, monkeypatch):
    limits = {"max_tokens": 8, "max_past": CAPACITY - 1}
    folder, _, _, bindings = folder_of(release, in_place_graph(tmp_path / "g.onnx"), tmp_path, monkeypatch, **limits)
    decoder = runpy.run_path(str(folder / "run.py"))["Decoder"](folder)
    ids = np.random.default_rng(2).integers(0, VOCABULARY, (1, CAPACITY))
    expected = in_place_logits(ids)[0]
    for _ in range(2):
        decoder.restart()
        assert np.abs(decoder.read(ids[0, :12].tolist()) - expected[11]).max() < 1e-5
        assert np.abs(decoder.read(ids[0, 12:13].tolist()) - expected[12]).max() < 1e-5
    assert bindings.calls.count("cudaMalloc") == 3 + 1 + 2 and decoder.about["context"] == CAPACITY


def test_a_missing_or_altered_plan_and_a_foreign_one_are_refused(tmp_path, monkeypatch, capsys):
    folder, *_ = folder_of(RELEASES[0], variant_graph("ghost"), tmp_path, monkeypatch, **LIMITS)
    plan = folder / "ghost.engine"
    data = plan.read_bytes()
    for change in (lambda: plan.write_bytes(data[:-1] + b"!"), plan.unlink):
        change()
        with pytest.raises(SystemExit):
            printed(folder, capsys, monkeypatch)
        assert "ghost.engine is missing or was changed" in capsys.readouterr().err
    plan.write_bytes(b"of another version")
    about = json.loads((folder / "run.json").read_text())
    digest = hashlib.sha256(b"of another version").hexdigest()
    (folder / "run.json").write_text(json.dumps(about | {"plans": {"ghost.engine": digest}}))
    with pytest.raises(SystemExit):
        printed(folder, capsys, monkeypatch)
    assert f"is for tensorrt {RELEASES[0].split('-')[1]}, on Orin" in capsys.readouterr().err


def test_the_self_test_runs_the_folders_own_file(tmp_path, monkeypatch):
    graph = variant_graph("ghost")
    folder, *_ = folder_of(RELEASES[0], graph, tmp_path, monkeypatch, **LIMITS)
    monkeypatch.setattr(engine_folder, "find_gpu", lambda: SimpleNamespace())
    session = open_graph(graph)
    expected = session.forward(np.array([PROMPT]), session.new_cache(1))[0][0, -1]
    for logits, tokens in engine_folder.run(folder, [PROMPT, PROMPT], 9):
        assert np.abs(logits - expected).max() < 1e-5 and tokens == answer(graph, 9)


def test_the_gpu_check_compares_run_py_with_onnxruntime(tmp_path, monkeypatch):
    runtime, trt = flavour(RELEASES[0], monkeypatch)
    check = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "gpu_check.py"))["Check"]
    graph = variant_graph("ghost")
    checking = check(runtime.name, {"ghost": graph}, None, tmp_path, 0.0)
    engine = build(runtime, graph, tmp_path / runtime.name, **checking.settings.model_dump(include=set(LIMITS)))
    checking.engines["ghost"] = engine
    install(monkeypatch, RELEASES[0], trt)
    monkeypatch.setattr(engine_folder, "find_gpu", lambda: SimpleNamespace())
    found = checking.deployed()
    assert found["relative_error"] < 1e-5 and found["same_tokens"] == 1


def test_what_the_card_says_is_the_engines(tmp_path, monkeypatch):
    release = RELEASES[-1]
    _, bundle, _, _ = folder_of(release, variant_graph("ghost"), tmp_path, monkeypatch, **LIMITS)
    name = "tensorrt-rtx" if is_rtx(release) else "tensorrt"
    text = engine_folder.use(bundle, name)
    command = "tensorrt_rtx" if is_rtx(release) else "trtexec"
    assert f"{command} --loadEngine=ghost.engine --useProfile=1 --shapes=input_ids:1x1,attention_mask:1x81" in text
    assert "polygraphy run ghost.engine --model-type engine --trt --input-shapes 'input_ids:[1,16]'" in text
    assert engine_folder.refusal(bundle, name) is None and engine_folder.context_of(bundle, name) == 160
    path = bundle.folder.sidecar_path(name, "ghost")
    other = SimpleNamespace(**vars(bundle) | {"graph": variant_graph("pruned")})
    assert "of another graph" in engine_folder.refusal(other, name)
    found = json.loads(path.read_text())
    for flags, reason in (({"strip_plan": True}, "holds no weights"), ({"max_past": 100}, "holds 101 tokens")):
        path.write_text(json.dumps(found | {"flags": found["flags"] | flags}))
        assert reason in engine_folder.refusal(bundle, name)
    path.unlink()
    assert f"no {name} engine" in engine_folder.refusal(bundle, name)
    with pytest.raises(Exception, match="missing"):
        read_sidecar(path)


def test_a_cache_in_another_order_is_another_answer(tmp_path, monkeypatch):
    graph = variant_graph("ghost")
    folder, *_ = folder_of(RELEASES[0], graph, tmp_path, monkeypatch, **LIMITS)
    monkeypatch.setattr(engine_folder, "find_gpu", lambda: SimpleNamespace())
    about = json.loads((folder / "run.json").read_text())
    olds, news = zip(*about["cache"].items(), strict=True)
    for order in ((1, 0, 3, 2), (2, 3, 0, 1)):  # keys for values; the blocks exchanged
        wrong = dict(zip(olds, [news[i] for i in order], strict=True))
        (folder / "run.json").write_text(json.dumps(about | {"cache": wrong}))
        (_, tokens) = engine_folder.run(folder, [PROMPT], 20)[0]
        assert tokens != answer(graph, 20)
