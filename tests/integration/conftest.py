import os
import subprocess
import sys

import pytest

from tests.tiny import tiny_folder

#: Enough text for C = 64 (at least 2 C tokens), every document different.
SENTENCE = "Block number {0} of the garden holds {1} trees, {2} stones and one small river that runs to the {3}.\n"
PLACES = ("north", "south", "east", "west", "sea")


def write_text(path, documents=400):
    lines = (SENTENCE.format(i, i * 7 % 13, i * 5 % 11, PLACES[i % 5]) for i in range(documents))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture
def cli(monkeypatch, capsys):
    """Runs the command line in this process: ``code, out, err = cli("show", folder)``."""
    from ghostexport.cli import main

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
