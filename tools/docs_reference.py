"""Pages of the site that are made, not written: commands, recipe, architectures, errors, results; and a schema.

A hook of mkdocs (``mkdocs.yml``). ``python tools/docs_reference.py`` writes ``recipes/recipe.schema.json``.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from typer.main import get_command

from ghostexport import errors
from ghostexport.cli import app
from ghostexport.quantization.targets import HEADS, SCALES, SMALLEST_SM
from ghostexport.recipe import QUALITIES, Recipe
from ghostexport.runtimes import RUNTIMES
from ghostexport.selection.criteria import CRITERIA

ROOT = Path(__file__).parents[1]
SCHEMA = ROOT / "recipes" / "recipe.schema.json"
RESULTS = ROOT / "benchmarks" / "results"


def commands() -> Iterator[tuple[str, Any]]:
    """``(name, command)`` of every verb, ``build engine`` for one in a group."""

    def walk(prefix: str, group: Any) -> Iterator[tuple[str, Any]]:
        for name, command in group.commands.items():
            path = f"{prefix} {name}".strip()
            if hasattr(command, "commands"):
                yield from walk(path, command)
            else:
                yield path, command

    return walk("", get_command(app))


def cli_page() -> str:
    """Every verb with its arguments and options."""
    lines = ["# Commands", "", "`ghostexport VERB --help` says the same. Defaults of flags are those of the recipe."]
    for name, command in commands():
        lines += ["", f"## ghostexport {name}", "", command.help or "", "", "| | |", "|---|---|"]
        for parameter in command.params:
            if parameter.name != "help":
                names = ", ".join(f"`{n}`" for n in (*parameter.opts, *parameter.secondary_opts))
                if parameter.param_type_name == "argument":
                    names = f"`{parameter.name.upper()}`"
                lines.append(f"| {names} | {_cell(getattr(parameter, 'help', '') or '')} |")
    return "\n".join(lines) + "\n"


def recipe_page() -> str:
    """Every section of a recipe, with its docstring, types and defaults."""
    found = schema()
    lines = [
        "# Recipe",
        "",
        "A YAML file of the sections below; every key but `model.source` has a default. Editors that know JSON Schema",
        "complete it after this first line, with the path of `recipes/recipe.schema.json`:",
        "",
        "```yaml",
        "# yaml-language-server: $schema=recipe.schema.json",
        "```",
    ]
    for name, field in Recipe.model_fields.items():
        section: Any = field.annotation
        properties = found["$defs"][section.__name__]["properties"]
        lines += ["", f"## {name}", "", *_prose(inspect.getdoc(section) or ""), ""]
        lines += ["| key | values | default |", "|---|---|---|"]
        for key, entry in properties.items():
            default = json.dumps(entry["default"]) if "default" in entry else "required"
            lines.append(f"| `{key}` | {_cell(_values(entry))} | `{default}` |")
    return "\n".join(lines) + "\n"


def results_page(name: str) -> Callable[[], str]:
    """A committed table of results."""
    return lambda: (RESULTS / name).read_text(encoding="utf-8")


#: The made pages of the site.
PAGES: Mapping[str, Callable[[], str]] = {
    "reference/cli.md": cli_page,
    "reference/recipe.md": recipe_page,
    "reference/errors.md": lambda: errors.PAGE.read_text(encoding="utf-8"),
    "reference/architectures.md": results_page("architectures.md"),
    "results/healing.md": results_page("healing.md"),
    "results/quality.md": results_page("quality.md"),
}


def schema() -> dict[str, Any]:
    """JSON Schema of a recipe file, with the names that validators check and the keys that are resolved into others."""
    found = Recipe.model_json_schema()
    definitions = found["$defs"]
    definitions["SelectSection"]["properties"]["criterion"]["enum"] = sorted(CRITERIA)
    definitions["BuildSection"]["properties"]["runtimes"]["items"] = {"type": "string", "enum": list(RUNTIMES)}
    quantize = definitions["QuantizeSection"]["properties"]
    quantize["scales"]["enum"], quantize["head"]["enum"] = list(SCALES), list(HEADS)
    form = {"type": "string", "enum": ["none", *SMALLEST_SM]}
    quantize["format"] = {"anyOf": [form, {"type": "array", "items": form}], "default": []}
    definitions["RecoverSection"]["properties"] |= {
        "quality": {"type": "string", "enum": list(QUALITIES), "default": None},
        "refit_downstream": {"type": "boolean", "default": None},
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "ghostexport recipe"} | found


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: adds the made pages, and the pictures and reports of ``benchmarks/results``."""
    from mkdocs.structure.files import File

    for uri, page in PAGES.items():
        files.append(File.generated(config, uri, content=page()))
    for path in sorted([*RESULTS.rglob("*.png"), *RESULTS.rglob("*.html")]):
        uri = f"results/{path.relative_to(RESULTS).as_posix()}"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """mkdocs: links to committed results lead to their copies on the site."""
    return markdown.replace("../benchmarks/results/", "results/")


def _values(entry: Mapping[str, Any]) -> str:
    if "anyOf" in entry:
        return " or ".join(dict.fromkeys(_values(option) for option in entry["anyOf"]))
    if "enum" in entry:
        return ", ".join(str(value) for value in entry["enum"])
    if "const" in entry:
        return str(entry["const"])
    if entry.get("type") == "array":
        return "list of " + _values(entry["items"]) if "items" in entry else "list"
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤"}
    bounds = [f"{sign} {entry[key]}" for key, sign in limits.items() if key in entry]
    return " ".join([str(entry.get("type", "any")), *bounds])


def _prose(docstring: str) -> list[str]:
    """A docstring as Markdown: roles and double ticks become code, attributes a list."""
    text = re.sub(r":\w+:`[~!]?([^`]+)`|``([^`]+)``", lambda m: f"`{m[1] or m[2]}`", docstring)
    head, found, rest = text.partition("Attributes:\n")
    if not found:
        return [text]
    attributes, _, tail = rest.partition("\n\n")
    items = re.sub(r"\n {8,}", " ", attributes)
    return [
        head,
        *(re.sub(r"^ *([\w, ]+):", r"* `\1`:", line) for line in items.splitlines()),
        "",
        inspect.cleandoc(tail),
    ]


def _cell(text: str) -> str:
    return re.sub(r"``([^`]+)``", r"`\1`", " ".join(text.split())).replace("|", "\\|")


def main() -> None:
    SCHEMA.parent.mkdir(exist_ok=True)
    SCHEMA.write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
