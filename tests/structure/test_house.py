"""The house has one owner of every file name of a run, no import circle, and no two modules of one name."""

import ast
from collections import Counter

from ghostexport.runfolder import RunFolder
from tests.structure.test_imports import FILES, PACKAGE

#: File names of a run, as :class:`RunFolder` spells them, and the folders below it.
NAMES = {path.name for path in vars(RunFolder("run")).values() if path.suffix}
FOLDERS = {"operators", "onnx", "engines", "bench", "checkpoint"}


def module(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module(path): path for path in FILES}


def imported(path, lazy):
    """Modules of the package that a file imports, ``from package import module`` included; not for types only."""
    found = set()

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.ImportFrom) and child.module and (lazy or not inside):
                found.update({child.module, *(f"{child.module}.{alias.name}" for alias in child.names)})
            if isinstance(child, ast.Import) and (lazy or not inside):
                found.update(alias.name for alias in child.names)
            visit(child, inside or isinstance(child, ast.FunctionDef))

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    # a package whose submodule is imported runs too, but what it imports cannot be waiting for its own submodule
    return {name for name in found & MODULES.keys() if not any(other.startswith(f"{name}.") for other in found)}


def circles(lazy):
    """Modules that reach themselves, by taking away what imports nothing that is left."""
    left = {name: imported(path, lazy) - {name} for name, path in MODULES.items()}
    while leaves := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in leaves:
            del left[name]
    return {name: sorted(needs & left.keys()) for name, needs in left.items()}


def test_no_module_imports_itself_over_others_not_even_inside_functions():
    assert circles(lazy=False) == {}
    assert circles(lazy=True) == {}


def test_no_two_modules_or_rooms_have_one_name():
    rooms = {path.parent for path in FILES} - {PACKAGE}
    counted = Counter([*(path.stem for path in FILES if path.stem != "__init__"), *(room.name for room in rooms)])
    assert [name for name, count in counted.items() if count > 1] == []


def test_only_the_run_folder_spells_file_names_of_a_run():
    spelled = []
    for path in FILES:
        if path.name == "runfolder.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and (node.value in NAMES or str(node.value).endswith(".surgery.json")):
                spelled.append(f"{path.name}: {node.value}")
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                right = node.right.value if isinstance(node.right, ast.Constant) else None
                of_a_run = ast.unparse(node.left).endswith(".path")  # not beside a graph somewhere else
                spelled += [f"{path.name}: / {right}"] if right in FOLDERS and of_a_run else []
    assert {"plan.json", "manifest.json", "engine_quality.json", "recipe.yaml"} <= NAMES and spelled == []
