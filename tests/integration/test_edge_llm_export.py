"""TensorRT Edge-LLM's own exporter on the target's folder, where it is installed: pip install tensorrt-edgellm==0.11.0.

The exporter needs torch, transformers and onnx of its environment; it is found on PATH.
"""

import json
import shutil
import subprocess

import onnx
import pytest
import transformers

from ghostexport.deploy import deploy
from ghostexport.execution import Execution
from tests.decoding import assert_same, chunks, torch_logits
from tests.integration.test_surgery_edge_llm import NAME, _edge_logits
from tests.surgery_cases import FIXTURES

EXPORT = shutil.which("tensorrt-edgellm-export")


@pytest.mark.slow
@pytest.mark.skipif(EXPORT is None, reason="tensorrt-edgellm-export is not on PATH")
def test_its_graph_of_the_folder_answers_as_pytorch(built_run, tmp_path):
    assert "passed" in deploy(built_run.path, "edge-llm", tmp_path / "folder", None, Execution(device="cpu"))
    subprocess.run([EXPORT, str(tmp_path / "folder"), str(tmp_path / "out")], check=True)
    assert json.loads((tmp_path / "out" / "llm" / "config.json").read_text())["num_hidden_layers"] == 4
    onnx.save(onnx.load(tmp_path / "out" / "llm" / "model.onnx"), tmp_path / "whole.onnx")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    sequences = [chunks(264, lengths, batch=1, seed=n) for n, lengths in enumerate([(7, 1, 5), (125, 1, 4)])]
    found = _edge_logits(tmp_path / "whole.onnx", model, sequences, 4)
    for logits, tokens in zip(found, sequences, strict=True):
        assert_same(logits, torch_logits(model, tokens), FIXTURES[NAME].tolerance)
