"""Graphs of standard operators still parse and build with the real TensorRT-RTX builder after surgery."""

from __future__ import annotations

from pathlib import Path

import pytest

from ghostexport.execution import Execution
from ghostexport.recipe import BuildSection
from ghostexport.runtimes import RUNTIMES
from ghostexport.surgery import operate
from tests.surgery_cases import FIXTURES, dense_operators, plan_of

FOLDER = Path(__file__).parent.parent / "fixtures"
STANDARD = [name for name, fixture in FIXTURES.items() if fixture.standard]


@pytest.mark.slow
@pytest.mark.parametrize("name", STANDARD)
def test_a_cut_and_spliced_graph_builds(name: str, tmp_path: Path) -> None:
    runtime = RUNTIMES["tensorrt-rtx"]
    if not runtime.availability().build:
        pytest.skip(runtime.availability().reason)
    plan = plan_of("two")
    graph = tmp_path / "ghost.onnx"
    operate(FOLDER / name / "model.onnx", plan, dense_operators(plan, 32), graph)
    settings = BuildSection(profiles="single")  # several profiles are a matter of test_build_tensorrt_rtx.py
    engine = runtime.build(graph, tmp_path / "ghost", "ghost", settings, Execution())
    cached = FIXTURES[name].producer != "torch"  # torch's own export has no cache
    assert len([i for i in engine.inputs if "past" in i.name]) == (2 * len(plan.kept) if cached else 0)
    assert len(engine.profiles) == 1
