"""Every command and Python block of README and site runs, top to bottom in one fresh folder, with a tiny model."""

import io
import json
import re
import shlex

import pytest

from tests.documented import ROOT, blocks, reading
from tests.integration.conftest import TEMPLATE, write_text
from tests.tiny import tiny_folder

#: What makes a command small: the model, how many of its 6 blocks go, and how much is calibrated and measured.
SMALLER = {
    **{"smollm2": "tiny", "MODEL": "tiny", "model.onnx": "demo/onnx/dense.onnx"},
    **{"7": "2", "6": "2", "5": "2", "8": "1"},
    **{"512": "64", "1024": "64", "2048": "64", "128": "16", "200": "4", "10:17": "1:3", "3:4": "2:3"},
    **{"[[14, 19]]": "[[1, 3]]", "[[4, 5], [14, 16]]": "[[1, 2], [3, 4]]"},
    **{"c4:96": "text.txt:8", "chat.jsonl:32": "chat.jsonl:8"},
}
SMALLER_PYTHON = {'"smollm2"': '"tiny"', "prune=7": "prune=2", "length=512": "length=64"}
#: What no flag of a line says: a recipe for every run that is begun without one.
SMALL_RECIPE = """
calibration: {source: text.txt, sequences: 24, length: 64, held_out_sequences: 4}
build: {runtimes: [onnxruntime]}
bench: {preset: quick, repeats: 2, eval_tokens: 64}
eval: {generate: 8}
"""
BEGINNING = {"build", "calibrate", "select", "recover", "export", "verify", "bench", "eval", "fit", "sweep"}
#: ``make demo`` is the commands below it; packages are installed by the test of the packaging.
ELSEWHERE = ("make", "pip")


def prepare(folder):
    """What the pages suppose: a model that converses, text, an exported graph of somebody else."""
    (tiny_folder(folder / "tiny") / "chat_template.jinja").write_text(TEMPLATE)
    write_text(folder / "text.txt")
    (folder / "recipe.yaml").write_text(SMALL_RECIPE)
    for name in ("my.jsonl", "chat.jsonl"):
        said = (line for line in (folder / "text.txt").read_text().splitlines() if line)
        rows = ({"messages": [{"role": "user", "content": text}]} for text in said)
        (folder / name).write_text("\n".join(map(json.dumps, rows)))


def commands(page):
    """The arguments of every command of a page that is run, made small."""
    for block in blocks(page):
        if block.language != "console" or block.not_run:
            continue
        for line in block.lines:
            first, *words = (SMALLER.get(word, word) for word in shlex.split(line, comments=True))
            if first not in ELSEWHERE:
                assert first == "ghostexport", f"{page.name}: {line}"
                begins = words[0] in BEGINNING and "-o" in words and "--recipe" not in words
                yield [*words, "--recipe", "recipe.yaml"] if begins else words


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    lines = [line for block in blocks(ROOT / "README.md") if block.language == "console" for line in block.lines]
    named = {line.split()[1] for line in lines if line.startswith("make ")}
    assert named and named <= targets
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").count("make test") == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)  # some sixty commands
def test_every_command_runs(tmp_path, monkeypatch, cli):
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    count = 0
    for page in reading():
        for words in commands(page):
            monkeypatch.setattr("sys.stdin", io.StringIO("Is it a garden?\n\n"))
            code, out, err = cli(*words)
            assert code == 0, f"{page.name}: {shlex.join(words)}\n{out}\n{err}"
            count += 1
    assert count > 40


@pytest.mark.slow
def test_every_python_block_runs(tmp_path, monkeypatch):
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    count = 0
    for page in reading():
        names = {}  # the blocks of a page go on with each other's names
        for block in blocks(page):
            if block.language == "python" and not block.not_run:
                text = block.text
                for large, small in SMALLER_PYTHON.items():
                    text = text.replace(large, small)
                exec(compile(text, f"{page.name}", "exec"), names)
                count += 1
    assert count > 2
    assert (tmp_path / "out" / "hf" / "ghostexport.safetensors").exists()
