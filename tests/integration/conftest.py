import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tests.exports import FOLDER, shared
from tests.tiny import tiny_folder

#: Enough text for C = 64 (at least 2 C tokens), every document different.
SENTENCE = "Block number {0} of the garden holds {1} trees, {2} stones and one small river that runs to the {3}.\n"
#: Of a model that converses.
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
PLACES = ("north", "south", "east", "west", "sea")


def write_text(path, documents=400):
    lines = (SENTENCE.format(i, i * 7 % 13, i * 5 % 11, PLACES[i % 5]) for i in range(documents))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module", autouse=True)
def shared_exports(request):
    """Equal models are exported once per test run, but in modules that test the exporter (``OWN_EXPORTS = True``)."""
    if getattr(request.module, "OWN_EXPORTS", False):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ghostexport.exporters.transformers.export", shared)
        yield


@pytest.fixture(scope="session")
def tiny_model():
    """A model folder; it is shared by all processes of the test run, so nobody may write into it."""
    folder = Path(os.environ[FOLDER]) / "tiny-model"
    with FileLock(f"{folder}.lock"):
        return folder if folder.exists() else tiny_folder(folder)


@pytest.fixture(scope="session")
def exported_run(tiny_model):
    """A run in which the tiny model is exported: ``folder.adopt("export", exported_run)`` saves another export."""
    from ghostexport.cli import resolve
    from ghostexport.pipeline import run as run_pipeline

    path = Path(os.environ[FOLDER]) / "tiny-run"
    with FileLock(f"{path}.lock"):
        recipe, folder = resolve(str(tiny_model), path, None, {"select": {"prune": 2}})
        run_pipeline(recipe, folder, goal="export")
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="session")
def built_run(tiny_model):
    """A finished run of a model that converses, int8 variants and engines included; nobody may write into it."""
    from ghostexport import models
    from ghostexport.cli import resolve
    from ghostexport.execution import Execution
    from ghostexport.pipeline import run as run_pipeline

    path = Path(os.environ[FOLDER]) / "built-run"
    with FileLock(f"{path}.lock"):
        source = path.with_name("conversing-model")
        if not source.exists():
            models.save_model(models.load_model(str(tiny_model), "float32", Execution(device="cpu")), source)
            (source / "chat_template.jinja").write_text(TEMPLATE)
            (source / "LICENSE").write_text("Do what you like.")
        given = {
            "calibration": {"source": str(write_text(path.with_name("text.txt"))), "sequences": 24, "length": 64},
            "select": {"prune": 2},
            "recover": {"operators": ["ghost", "ghost-zero+refit"]},
            "quantize": {"format": ["int8"]},
            "build": {"runtimes": ["onnxruntime"]},
            "bench": {"preset": "quick", "repeats": 2, "eval_tokens": 64},
        }
        recipe, folder = resolve(str(source), path, None, given)
        run_pipeline(recipe, folder, goal="build")
    return folder


@pytest.fixture
def cli(monkeypatch, capsys):
    """Runs the command line in this process: ``code, out, err = cli("show", folder)``."""
    from ghostexport.cli import main
    from ghostexport.execution import talk

    for name in ("quiet", "verbose"):
        monkeypatch.setattr(talk, name, False)  # and again after the test

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["ghostexport", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def run_cli(*arguments, **kwargs):
    """Runs the command line in a process of its own."""
    environment = os.environ | {"COLUMNS": "200"}
    command = [sys.executable, "-m", "ghostexport.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, **kwargs)


PROMPT = "the river"


def answer_of(run, tokens):
    """What ``ghost`` of a run answers to :data:`PROMPT` here."""
    from ghostexport.execution import Execution
    from ghostexport.serving.speaker import Request, open_speaker

    return open_speaker(run.path, "ghost", None, Execution(device="cpu")).continue_text(PROMPT, Request(tokens)).text()
