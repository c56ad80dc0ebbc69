"""The real TensorRT-RTX builder, for graphs small enough to build in a test."""

import pytest

from ghostexport.execution import Execution
from ghostexport.recipe import BuildSection
from ghostexport.runtimes import RUNTIMES


@pytest.fixture
def build_rtx(tmp_path):
    """Builds an engine of a graph, for the GPUs of ``targets``, or the usual ones."""
    pytest.importorskip("tensorrt_rtx")

    def build(graph, *targets):
        shape = {"max_batch": 2, "max_tokens": 16, "max_past": 31, "profiles": "single", "compute_capability": targets}
        settings = BuildSection(runtimes=("tensorrt-rtx",), **shape)
        return RUNTIMES["tensorrt-rtx"].build(graph, tmp_path / "engine", "ghost", settings, Execution())

    return build
