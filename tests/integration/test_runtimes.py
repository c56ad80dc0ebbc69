"""Deployed folders on the runtimes that a wheel brings: the self-test, and what a runtime does beside greedy decoding.

Larger models and runtimes that need an environment of their own: ``benchmarks/runtimes.py``.
"""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from ghostexport.deploy import TARGETS, deploy, selftest
from ghostexport.errors import RuntimeUnavailableError
from ghostexport.execution import Execution

ROOT = Path(__file__).parents[2]
CPU = Execution(device="cpu")


@pytest.fixture(scope="module")
def checks():
    spec = importlib.util.spec_from_file_location("runtime_checks", ROOT / "benchmarks" / "runtime_checks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("target", ["genai", "openvino"])
def test_a_runtime_computes_the_graph_streams_and_knows_the_chat_template(built_run, checks, target, tmp_path):
    pytest.importorskip(TARGETS[target].package, reason="extra [runtimes]")
    assert "passed" in deploy(built_run.path, target, tmp_path / target, "ghost", CPU)
    assert {check(tmp_path / target) for check in checks.CHECKS[target].values()} == {None}


def test_a_missing_runtime_is_named_with_the_versions_that_were_tested(built_run, tmp_path, monkeypatch):
    tested = dict(re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.M))
    monkeypatch.setitem(sys.modules, TARGETS["genai"].package, None)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find(name) if name == "torch" else None)
    deploy(built_run.path, "genai", tmp_path / "out", "ghost", CPU)
    with pytest.raises(RuntimeUnavailableError) as refusal:
        selftest(tmp_path / "out")
    assert refusal.value.remedy == TARGETS["genai"].install
    for name, target in TARGETS.items():
        if name.startswith("tensorrt"):
            continue  # the version is that which built the engine
        assert target.install.startswith("pip install "), name
        for pin in shlex.split(target.install)[2:]:
            package, version = re.fullmatch(r"([\w-]+)(?:\[\w+\])?==([\w.]+)", pin).groups()
            assert version == tested.get(package, version), f"{name} was tested with {tested.get(package)}"
