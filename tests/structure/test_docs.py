"""Docs name nothing that is not there: command lines parse, links and Python names exist, made files are current."""

import ast
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
from email.message import Message

import pytest
import yaml
from typer.main import get_command

import ghostexport as gx
from ghostexport import errors
from ghostexport.cli import INTERRUPTED, app
from ghostexport.errors import GhostExportError, explained_at
from ghostexport.recipe import Recipe, parse_recipe
from tests.documented import ROOT, blocks, reading

COMMAND = get_command(app)
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *(p for p in reading() if not p.is_relative_to(ROOT / "docs"))])
PAGES.append(ROOT / "CONTRIBUTING.md")


def tool(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def reference(monkeypatch):
    return tool("docs_reference", monkeypatch)


def command_lines(page):
    return [line for block in blocks(page) for line in block.lines if line.startswith("ghostexport ")]


def parse(words):
    """Parses a command line without running it, as deep as it goes."""
    command, context, words = COMMAND, None, list(words)
    while True:
        context = command.make_context(command.name, words, parent=context)
        if not hasattr(command, "commands"):
            return context
        _, command, words = command.resolve_command(context, [*context._protected_args, *context.args])


@pytest.mark.parametrize("page", [page for page in PAGES if command_lines(page)], ids=lambda page: page.stem)
def test_every_command_line_parses(page):
    for line in command_lines(page):
        try:
            parse(shlex.split(line.replace("C:\\", "C:/").replace("\\", "/"), comments=True)[1:])
        except Exception as error:
            pytest.fail(f"{line}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_not_run_says_why(page):
    """Console and Python blocks are run by ``tests/integration/test_documented_commands.py``."""
    for block in blocks(page):
        if any(line.startswith("ghostexport ") for line in block.lines):
            assert block.language == "console" or block.not_run, block.text
        for name in re.findall(r"tests/\S+\.py", block.not_run or ""):
            assert (ROOT / name).exists(), f"{name} does not run it"
    assert page in reading() or page.name == "CONTRIBUTING.md", "not in the site's navigation: nothing of it is run"


def test_reading_order_names_what_there_is():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Reading order")[2].partition("\n## ")[0]
    named = {word.rstrip("/") for word in re.findall(r"^(?:ghostexport|graphs|benchmarks)\S*", text, re.MULTILINE)}
    assert len(named) > 20 and all((ROOT / name).exists() for name in named)
    rooms = {f"ghostexport/{path.parent.name}" for path in (ROOT / "ghostexport").glob("*/__init__.py")}
    assert rooms <= {"/".join(name.split("/")[:2]) for name in named}


def test_a_wrong_option_is_noticed():
    with pytest.raises(Exception, match="--pruned"):
        parse(["build", "engine", "m", "--pruned", "7"])
    with pytest.raises(Exception, match="valid integer"):
        parse(["select", "m", "--prune", "7b"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page, reference):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in link:
            target = (page.parent / link).resolve()
            assert target.exists() or any(target == ROOT / "docs" / made for made in reference.PAGES), link


def test_python_of_the_docs_calls_what_there_is():
    """Names; the blocks themselves run in ``tests/integration/test_documented_commands.py``."""
    for page in PAGES:
        for block in (block for block in blocks(page) if block.language == "python"):
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "gx":
                    assert hasattr(gx, node.attr), f"{page.name}: gx.{node.attr}"


def test_schema_is_current_and_knows_every_key(reference):
    assert json.loads(reference.SCHEMA.read_text(encoding="utf-8")) == reference.schema(), (
        "python tools/docs_reference.py"
    )
    definitions = reference.schema()["$defs"]
    for name, field in Recipe.model_fields.items():
        keys = {*field.annotation.model_fields, *field.annotation.resolved}
        assert keys == set(definitions[field.annotation.__name__]["properties"]), name
    written = yaml.safe_load(parse_recipe({"model": {"source": "m"}, "select": {"prune": 1}}).to_yaml())
    assert set(written) == set(reference.schema()["properties"])


def test_made_pages_have_every_flag(reference):
    page = reference.cli_page()
    for name, command in reference.commands():
        section = page.partition(f"## ghostexport {name}\n")[2].partition("\n## ")[0]
        assert section and all(
            opt in section for p in command.params for opt in p.opts if opt.startswith("--") and p.name != "help"
        )
    assert "manifest.json" in (ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8")


def kinds():
    return [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, GhostExportError)]


def test_every_kind_of_error_leads_to_its_explanation(reference, monkeypatch):
    text = errors.PAGE.read_text(encoding="utf-8")
    anchors = {heading.lower() for heading in re.findall(r"^## (\w+)$", text, re.MULTILINE)}
    links = [explained_at(kind).partition("#") for kind in kinds() if kind is not GhostExportError]
    assert len(links) > 15 and {page for page, _, _ in links} == {str(errors.PAGE)}
    assert {anchor for _, _, anchor in links} == anchors
    assert all(f"\n| {code} | " in text for code in {0, INTERRUPTED, *(kind.exit_code for kind in kinds())})
    flags = set(re.findall(r"`(?:ghostexport \w+ )?(--[\w-]+)", text)) - {"--help"}
    known = {opt for _, command in [*reference.commands(), ("", COMMAND)] for p in command.params for opt in p.opts}
    assert len(flags) > 8 and flags <= known

    named = Message()
    named["Project-URL"] = "Source, https://example.org/source"
    named["Project-URL"] = "Documentation, https://example.org/docs/"
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: named)
    assert explained_at(errors.ParityError) == "https://example.org/docs/reference/errors.html#parityerror"


def test_the_picture_of_surgery_is_that_of_the_graphs(monkeypatch):
    found = tool("surgery_picture", monkeypatch)
    assert found.PICTURE.read_text(encoding="utf-8") == found.picture(), "python tools/surgery_picture.py"
    dense, ghost = (found.steps((found.GRAPHS / f"{name}.txt").read_text("utf-8")) for name in ("dense", "ghost"))
    assert [step.block for step in dense if step.block is not None] == [0, 1, 2, 3, 4, 5]
    new = [step.value for step in ghost if step.block is None][1:-1]
    assert new == ["ghost.0.matmul", "ghost.0.add", "ghost.1.matmul", "ghost.1.add"]
    assert [step.block for step in ghost if step.block is not None] == [0, 2, 5]


@pytest.mark.slow
def test_the_site_builds_strictly_and_asks_nobody(tmp_path):
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loaded = re.findall(
            r"<(?:script|img|link)\b[^>]*?(?:src|href)=\"(https?:[^\"]*)", page.read_text(encoding="utf-8")
        )
        assert not loaded, f"{page.name}: {loaded}"
    explained = (tmp_path / "reference" / "errors.html").read_text(encoding="utf-8")
    assert all(f'id="{kind.__name__.lower()}"' in explained for kind in kinds() if kind is not GhostExportError)
    assert 'id="ghostexport.api.graphs.surgery"' in (tmp_path / "reference" / "api.html").read_text(encoding="utf-8")
