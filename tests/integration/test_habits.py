"""What the command line owes every user: help by stage, JSON, no colour where none is wanted, completion."""

import json
from pathlib import Path

from ghostexport import __version__
from tests.integration.conftest import run_cli

FIXTURES = Path(__file__).parents[1] / "fixtures"


def test_help_shows_first_what_most_need(cli):
    code, out, _ = cli("build", "engine", "--help")
    assert code == 0
    first = out.partition("Options")[2].partition("Which blocks go")[0]
    assert all(flag in first for flag in ("--output", "--prune", "--calibration", "--quality", "--hardware"))
    assert "--ridge" not in first and "--ridge" in out
    titles = ("Which blocks go", "Model", "Calibration text", "Repair", "Export", "Weight formats", "Engines")
    assert all(title in out for title in titles) and "Benchmark ─" not in out
    code, out, _ = cli("--help")
    assert code == 0 and "--install-completion" in out and "Exit codes: 0 done" in out and "Results" in out


def test_doctor_for_a_report(cli):
    code, out, _ = cli("doctor", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["packages"]["ghostexport"] == __version__ and facts["python"].startswith("3.")
    assert {row["runtime"] for row in facts["runtimes"]} == {"onnxruntime", "tensorrt", "tensorrt-rtx"}


def test_init_names_the_next_command(cli, tmp_path):
    code, out, _ = cli("init", "smollm2", "--hardware", "cpu", "--prune", "7", "-o", tmp_path / "r.yaml")
    assert code == 0 and out.splitlines()[1].startswith("ghostexport build engine smollm2 -o RUN --recipe ")


def test_explain_and_show_of_what_is_no_run(cli, tmp_path):
    for verb in (("explain", tmp_path), ("show", tmp_path, "--json")):
        code, _, err = cli(*verb)
        assert code == 2 and "is not a run folder" in err


def test_no_colour_without_a_terminal():
    done = run_cli("show", "nothing-here")
    assert done.returncode == 2 and "\x1b" not in done.stdout + done.stderr
    page, _, anchor = done.stderr.splitlines()[-1].removeprefix("see ").partition("#")
    assert f"## {anchor}\n" in Path(page).read_text(encoding="utf-8").lower()


def test_every_verb_that_prints_figures_can_print_json():
    from typer.main import get_command

    from ghostexport.cli import app

    def walk(prefix, group):
        for name, command in group.commands.items():
            yield from walk(name, command) if hasattr(command, "commands") else [(name, command)]

    talking = {"generate", "chat", "serve"}
    says_a_path = {"init", "report", "pack", "deploy", "selftest", "split"}
    found = dict(walk("", get_command(app)))
    lacking = {name for name, command in found.items() if "--json" not in {o for p in command.params for o in p.opts}}
    assert lacking == talking | says_a_path


def test_json_quiet_and_verbose_of_a_graph(cli, tmp_path):
    graph = FIXTURES / "transformers-llama" / "model.onnx"
    code, out, err = cli("--quiet", "surgery", graph, "--remove", "1:3", "-o", tmp_path, "--json")
    assert (code, err) == (0, "") and json.loads(out)["blocks_after"] == 4
    code, out, err = cli("--quiet", "quantize", graph, "--format", "int8", "-o", tmp_path, "--json")
    assert (code, err) == (0, "") and json.loads(out)["form"] == "int8"
    code, out, err = cli("surgery", graph, "--remove", "1:99", "-o", tmp_path)
    assert code == 2 and "Traceback" not in err
    code, out, err = cli("--verbose", "surgery", graph, "--remove", "1:99", "-o", tmp_path)
    assert code == 2 and "Traceback" in err and "error: " in err
