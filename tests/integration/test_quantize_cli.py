"""``ghostexport quantize`` as a person types it."""

import json

from onnxruntime import InferenceSession


def test_an_exported_graph_becomes_a_quantised_one(cli, exported, tmp_path):
    graph = exported("llama-tied", vocab_size=264).path
    code, shown, err = cli("quantize", graph, "-o", tmp_path / "out", "--format", "int4", "--block", "16")
    assert code == 0, err
    made = tmp_path / "out" / f"{graph.stem}.int4.onnx"
    InferenceSession(str(made), providers=["CPUExecutionProvider"])
    report = json.loads(made.with_suffix(".quantization.json").read_text())
    assert {row["block"] for row in report["linears"] if row["form"]} == {16}
    assert "MB" in shown and made.name in shown


def test_an_unknown_form_names_the_nearest(cli, exported, tmp_path):
    code, _, err = cli("quantize", exported("llama-tied", vocab_size=264).path, "-o", tmp_path, "--format", "int44")
    assert code == 2 and "Did you mean 'int4'?" in err
