"""The example notebook runs with a tiny model in the place of SmolLM2; the committed one has its outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.tiny import tiny_folder

NOTEBOOK = Path(__file__).parents[2] / "examples" / "smollm2.ipynb"
SMALLER = """
source, prune = "tiny", 2
calibration = {"sequences": 8, "length": 64, "held_out_sequences": 2}
workloads = {"prefill_tokens": [8], "decode_past": [8], "request": [8, 2], "repeats": 2, "warmup": 0}
out = "out"
"""


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    tiny_folder(tmp_path / "tiny")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert first.source.startswith("# The first cell is what a test changes")
    first.source = SMALLER
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    kinds = [output.output_type for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert kinds.count("display_data") == 2  # the plots
    assert (tmp_path / "out" / "hf" / "ghostexport.safetensors").exists()


def test_the_committed_notebook_has_the_outputs_of_one_whole_run():
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell.outputs for cell in cells[1:])
    outputs = [output for cell in cells for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert not any(output.output_type == "error" for output in outputs)
