"""The optimum exporter in an environment of its own (it needs transformers < 4.58), its graph checked in this one.

The environment is made once, below the user's cache folder, in about a minute. To use another one, set
``GHOSTEXPORT_OPTIMUM_PYTHON`` to its interpreter; it needs ghostexport with the extra ``[optimum]``.
"""

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import platformdirs
import pytest
import tomllib

from ghostexport.models import drop_blocks, insert_operators
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.surgery import operate
from ghostexport.verification import verify
from tests.tiny import tiny

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
from pathlib import Path
import transformers
from ghostexport.exporters import choose_exporter, export_model
from ghostexport.errors import RuntimeUnavailableError
from tests.tiny import tiny

try:
    choose_exporter("transformers")
    refusal = ""
except RuntimeUnavailableError as error:
    refusal = str(error)
name, reason = choose_exporter("auto")
written = export_model(tiny("llama"), Path(sys.argv[1]), exporter=name, opset=int(sys.argv[2]))
print(json.dumps(written.to_json() | {"chosen": name, "refusal": refusal, "transformers": transformers.__version__}))
"""


@pytest.fixture(scope="session")
def optimum_python():
    given = os.environ.get("GHOSTEXPORT_OPTIMUM_PYTHON")
    if given:
        return given
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["optimum"]]
    key = hashlib.sha256(f"{ROOT} {sys.version} {needs}".encode()).hexdigest()[:12]
    folder = platformdirs.user_cache_path("ghostexport") / f"optimum-{key}"
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        # what is not replaced comes from this environment: torch alone takes a minute and, unpinned, gigabytes
        own, ours = (sysconfig.get_path("purelib", vars={"base": str(base)}) for base in (folder, sys.prefix))
        (Path(own) / "this.pth").write_text(f"{ours}\n", encoding="utf-8")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-e", f"{ROOT}[optimum]"], check=True)
        ready.touch()
    return str(python)


@pytest.fixture(scope="session")
def optimum_export(optimum_python, tmp_path_factory):
    graph = tmp_path_factory.mktemp("optimum") / "dense.onnx"
    command = [optimum_python, "-c", SCRIPT, str(graph), "18"]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert process.returncode == 0, process.stderr
    assert len(process.stdout.splitlines()) == 1, "the exporter printed something"
    return graph, json.loads(process.stdout)


@pytest.mark.slow
def test_auto_chooses_optimum_under_an_old_transformers(optimum_export):
    _, said = optimum_export
    assert said["transformers"].startswith("4.5")
    assert (said["chosen"], said["producer"], said["opset"], said["num_blocks"]) == ("optimum", "optimum", 18, 6)
    assert "pip install 'transformers>=5.23'" in said["refusal"]


@pytest.mark.slow
def test_its_graph_equals_the_model(optimum_export):
    graph, _ = optimum_export
    assert verify(tiny("llama"), graph).worst_relative < 1e-4
    assert sorted(path.name for path in graph.parent.iterdir()) == ["dense.onnx", "dense.onnx.data"]
    assert str(Path.home()).encode() not in graph.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("spans", [[(0, 2)], [(1, 2), (4, 6)]], ids=["first", "two-spans"])
def test_surgery_on_its_graph_equals_surgery_on_the_model(optimum_export, tmp_path, spans):
    graph, _ = optimum_export
    plan = PrunePlan.from_spans(6, spans)
    rng = np.random.default_rng(0)
    deltas = [(0.03 * rng.standard_normal((64, 64))).astype(np.float32) for _ in plan.boundaries]
    operators = tuple(Operator(b, "ghost", delta=delta) for b, delta in zip(plan.boundaries, deltas, strict=True))
    repair = OperatorSet("ghost", operators, plan)
    operate(graph, plan, repair, tmp_path / "ghost.onnx")
    patched = insert_operators(drop_blocks(tiny("llama"), plan), repair)
    assert verify(patched, tmp_path / "ghost.onnx", "ghost").worst_relative < 1e-4
