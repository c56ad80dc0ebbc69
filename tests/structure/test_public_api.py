"""The names that `import ghostexport` offers: adding or removing one is a decision, made here."""

import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from mypy import api as mypy

import ghostexport as gx
from ghostexport import api, recipe
from ghostexport.commands.flags import FLAGS, VERBS

FUNCTIONS = [
    "apply",
    "bench",
    "build",
    "calibrate",
    "convert",
    "evaluate",
    "export",
    "load",
    "quantize",
    "recover",
    "save",
    "select",
    "split",
    "surgery",
    "verify",
]
OTHERS = [
    "BenchReport",
    "BenchSection",
    "BlockSpan",
    "Boundary",
    "BuildSection",
    "CalibrationSection",
    "CalibrationSet",
    "EngineFile",
    "EvalSection",
    "Execution",
    "ExportSection",
    "GhostExportError",
    "GraphReport",
    "LoadedModel",
    "ModelSection",
    "OnnxGraphFile",
    "Operator",
    "OperatorSet",
    "ParityReport",
    "PrunePlan",
    "Quality",
    "Recipe",
    "QuantizeSection",
    "RecoverSection",
    "RunFolder",
    "SelectSection",
    "SurgeryReport",
    "Tokens",
    "drop_blocks",
    "export_model",
    "insert_operators",
    "inspect_graph",
    "load_engine",
    "load_model",
    "load_operators",
    "operate",
    "parse_recipe",
    "read_operators",
    "run",
    "swap_operator",
]
#: verb -> its function, where Python has that name already, or the verb is a word of a group
CALLED = {"eval": "evaluate", "engine": "build"}


def test_public_names_exist_and_are_documented():
    assert sorted(dir(gx)) == sorted([*FUNCTIONS, *OTHERS, "__version__"])
    for name in FUNCTIONS + OTHERS:
        assert getattr(gx, name).__doc__, name
    assert gx.__version__ == importlib.metadata.version("ghostexport")
    with pytest.raises(AttributeError, match="nonsense"):
        gx.nonsense  # noqa: B018


def test_the_functions_of_the_api_are_the_public_ones():
    assert sorted(api.__all__) == FUNCTIONS
    for name in FUNCTIONS:
        assert inspect.signature(getattr(gx, name)) == inspect.signature(getattr(api, name))


def test_every_verb_that_is_a_stage_has_its_function():
    assert {CALLED.get(verb.name, verb.name) for verb in VERBS} | {"surgery"} <= set(FUNCTIONS)


SECTION_OF = {
    "load": "model",
    "calibrate": "calibration",
    "select": "select",
    "recover": "recover",
    "export": "export",
    "build": "build",
    "bench": "bench",
    "evaluate": "eval",
}
#: of a whole run, not of one call: graphs are verified by `verify`, samples come from `generate`, bootstraps compare,
#: texts are handed over as tokens
NOT_OF_A_CALL = {
    "eval": {"onnx", "generate", "prompts", "resamples", "seed", "corpora", "corpus_length"},
    "build": {"runtimes"},
    "model": {"source"},
}


@pytest.mark.parametrize("name", SECTION_OF)
def test_options_are_the_keys_of_the_verbs_section_with_its_defaults(name):
    section = SECTION_OF[name]
    sections = recipe.Recipe(model=recipe.ModelSection(source="x"))
    defaults = getattr(sections, section)
    parameters = inspect.signature(getattr(gx, name)).parameters
    keys = set(type(defaults).model_fields) - NOT_OF_A_CALL.get(section, set())
    assert keys <= set(parameters)
    for key in keys:
        assert parameters[key].default == getattr(defaults, key), key
    known = {*keys, *type(defaults).resolved, "model", "tokens", "plan", "output", "graph", "engines", "source"}
    assert set(parameters) <= known | {"execution", "device", "runtime"}


@pytest.mark.parametrize("name", SECTION_OF)
def test_every_flag_of_a_verbs_own_section_can_be_given_to_its_function(name):
    parameters = inspect.signature(getattr(gx, name)).parameters
    for flag, entry in FLAGS.items():
        if entry.section == SECTION_OF[name] and entry.key not in NOT_OF_A_CALL.get(entry.section, set()):
            assert entry.key in parameters, flag


def test_importing_the_package_and_looking_at_it_imports_nothing_heavy():
    code = (
        "import sys, ghostexport as gx\n"
        "first = {'torch', 'numpy', 'pydantic', 'onnx_ir'} & set(sys.modules)\n"
        "gx.load, gx.select, gx.PrunePlan, gx.RecoverSection, gx.Execution\n"
        "print(first, {'torch', 'transformers', 'onnx', 'onnx_ir'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set() set()"


SNIPPET = """
import ghostexport as gx

reveal_type(gx.__version__)
reveal_type(gx.PrunePlan)
reveal_type(gx.load)
model = gx.load("smollm2")
tokens = gx.calibrate(model, "demo", sequences=32, length=512)
plan = gx.select(model, tokens, prune=7)
reveal_type(plan)
reveal_type(gx.recover(model, plan, tokens, "ghost"))
reveal_type(gx.recover(model, plan, tokens, ["ghost", "none"]))
small = gx.apply(model, [[10, 17]], gx.recover(model, plan, tokens, "ghost"))
reveal_type(gx.evaluate(small, tokens))
reveal_type(gx.evaluate({"small": small}, tokens))
graph = gx.surgery(gx.export(model, "dense.onnx"), gx.recover(model, plan, tokens, "ghost"), "ghost.onnx")
reveal_type(graph)
engine = gx.build(graph, runtime="onnxruntime", max_batch=8)
reveal_type(gx.bench(["dense.onnx", engine], prefill_tokens=[16]))
gx.nonsense
gx.select(model, tokens, prun=7)
gx.select(model, tokens, prune="seven")
gx.PrunePlan(num_blocks="six")
"""
REVEALED = [
    "str",
    "ghostexport.plan.PrunePlan",
    "ghostexport.models.loading.LoadedModel",
    "ghostexport.plan.PrunePlan",
    "ghostexport.operators.OperatorSet",
    "dict[str, ghostexport.operators.OperatorSet]",
    "ghostexport.evaluation.quality_meter.Quality",
    "dict[str, ghostexport.evaluation.quality_meter.Quality]",
    "ghostexport.surgery.surgery_report.SurgeryReport",
    "ghostexport.benchmarking.result.BenchReport",
]


@pytest.mark.slow
def test_type_checkers_see_real_types(tmp_path, monkeypatch):
    (tmp_path / "snippet.py").write_text(SNIPPET)
    root = Path(__file__).parents[2]
    monkeypatch.setenv("MYPYPATH", str(root))
    options = ["--strict", "--config-file", str(root / "pyproject.toml"), "--cache-dir", str(root / ".mypy_cache")]
    output, errors, _ = mypy.run([*options, str(tmp_path / "snippet.py")])
    assert not errors
    notes = [line for line in output.splitlines() if "Revealed type" in line]
    assert len(notes) == len(REVEALED)
    for note, expected in zip(notes, REVEALED, strict=True):
        assert expected in note
        assert '"Any"' not in note
    found = [line for line in output.splitlines() if "error:" in line]
    for part, line in zip(["nonsense", '"prun"', '"prune"', '"num_blocks"'], found, strict=True):
        assert part in line
