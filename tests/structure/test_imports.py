"""Who may import what. Walks the syntax trees, so that a lazy import inside a function is told from one at the top."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ghostexport"
FILES = sorted(PACKAGE.rglob("*.py"))

HEAVY = {
    "torch",
    "transformers",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "tensorrt",
    "tensorrt_rtx",
    "datasets",
    "matplotlib",
}
#: vendor library -> the one file that may import it, inside functions
VENDORS = {
    "tensorrt": "runtimes/nvinfer/flavours.py",
    "tensorrt_rtx": "runtimes/nvinfer/flavours.py",
    "tensorrt_rtx_bindings": "runtimes/nvinfer/flavours.py",
    "onnxruntime": "runtimes/ort/onnxruntime.py",
    "optimum": "exporters/optimum.py",
}
LIGHT = (
    "errors.py",
    "plan.py",
    "recipe.py",
    "recipe_measuring.py",
    "recovery/__init__.py",
    "recovery/registry.py",
    "execution.py",
    "selection/__init__.py",
    "selection/criteria.py",
    "kv_names.py",
    "files.py",
    "runfolder.py",
    "operators.py",
    "pipeline.py",
    "cli.py",
    "commands/flags.py",
    "commands/using.py",
)


def imports(path: Path, top_level_only: bool) -> set[str]:
    """Top packages imported by a file, TYPE_CHECKING blocks excluded."""
    found: set[str] = set()

    def visit(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import) and not (inside and top_level_only):
                found.update(alias.name.split(".")[0] for alias in child.names)
            if isinstance(child, ast.ImportFrom) and not (inside and top_level_only):
                found.add((child.module or "").split(".")[0])
                if (child.module or "").startswith("ghostexport"):
                    found.add(child.module or "")
            visit(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


@pytest.mark.parametrize("name", LIGHT)
def test_the_light_files_import_nothing_heavy(name):
    assert not imports(PACKAGE / name, top_level_only=True) & HEAVY


@pytest.mark.parametrize(
    "path",
    sorted([*(PACKAGE / "surgery").glob("*.py"), *(PACKAGE / "quantization").glob("*.py")]),
    ids=lambda p: p.relative_to(PACKAGE).as_posix(),
)
def test_surgery_and_quantization_never_import_torch(path):
    found = imports(path, top_level_only=False)
    assert not found & {"torch", "transformers", "onnxruntime"}
    assert not any(module.startswith(("ghostexport.models", "ghostexport.calibration")) for module in found)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_vendor_libraries_are_imported_in_one_file_each_inside_functions(path):
    here = path.relative_to(PACKAGE).as_posix()
    assert not imports(path, top_level_only=True) & set(VENDORS)
    for vendor in imports(path, top_level_only=False) & set(VENDORS):
        assert here == VENDORS[vendor]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_the_library_never_prints_or_configures_logging(path):
    text = path.read_text(encoding="utf-8")
    assert "basicConfig" not in text
    if path.name not in ("cli.py", "screen.py"):
        calls = [
            n.func.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        ]
        assert "print" not in calls


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_files_and_functions_stay_readable(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name


def test_importing_the_package_costs_no_torch():
    code = "import sys, ghostexport; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_help_works_with_no_heavy_package_importable():
    blocked = sorted(HEAVY | {"numpy", "pydantic", "yaml", "safetensors", "filelock"})
    code = (
        "import sys\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        "sys.argv = ['ghostexport', '--help']\n"
        "from ghostexport.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "build" in done.stdout
