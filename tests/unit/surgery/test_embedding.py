"""A decoder without its token embedding: both graphs together are the one they came from."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from ghostexport.errors import SurgeryError
from ghostexport.plan import PrunePlan
from ghostexport.quantization.targets import Settings
from ghostexport.quantization.writer import quantize_graph
from ghostexport.surgery import operate
from ghostexport.surgery.embedding import split_embedding
from tests.decoding import onnx_logits
from tests.surgery_cases import dense_operators

FIXTURES = Path(__file__).parents[2] / "fixtures"
CHUNKS = [np.arange(3, 13).reshape(2, 5), np.array([[7], [9]])]


def inputs_of(path):
    found = onnx.load(path, load_external_data=False).graph.input
    return {i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in found}


def split(graph, folder):
    made = folder / "decoder.onnx", folder / "embedding.onnx"
    split_embedding(graph, *made)
    return made


@pytest.mark.parametrize(
    "producer",
    [
        "genai-llama-fp32",
        "genai-llama-int4",
        "optimum-llama",
        "transformers-gemma3",
        "transformers-gpt-neox",
        "transformers-llama-tied",
        "transformers-llama-ort-fused",
    ],
)
def test_both_graphs_together_are_the_one_they_came_from(producer, tmp_path):
    graph = FIXTURES / producer / "model.onnx"
    decoder, embedding = split(graph, tmp_path)
    if not producer.startswith("genai") and "fused" not in producer:  # operators that onnx does not know
        onnx.checker.check_model(str(decoder))
        onnx.checker.check_model(str(embedding))
    before, after = inputs_of(graph), inputs_of(decoder)
    assert list(after) == ["inputs_embeds" if name == "input_ids" else name for name in before]
    assert after["inputs_embeds"][:2] == before["input_ids"] and after["inputs_embeds"][2] > 2
    assert inputs_of(embedding) == {"input_ids": before["input_ids"]}
    expected = onnx_logits(graph, CHUNKS, fused=False)
    for logits, wanted in zip(onnx_logits(decoder, CHUNKS, False, embedding), expected, strict=True):
        np.testing.assert_array_equal(logits, wanted)


def test_a_graph_that_was_cut_repaired_and_quantised_with_its_tied_table(exported, tmp_path):
    case = exported("llama-tied")
    operators = dense_operators(PrunePlan.from_spans(case.file.num_blocks, [(1, 2)]), case.file.hidden_size)
    operate(case.path, operators.plan, operators, tmp_path / "ghost.onnx")
    quantize_graph(tmp_path / "ghost.onnx", tmp_path / "ghost.int8.onnx", "int8", Settings(head="same"))
    decoder, embedding = split(tmp_path / "ghost.int8.onnx", tmp_path)
    assert {n.op_type for n in onnx.load(embedding, load_external_data=False).graph.node} <= {
        "DequantizeLinear",
        "Gather",
        "Transpose",
    }
    assert sum(path.stat().st_size for path in (decoder, embedding)) < 1e6  # the weights stay where they are
    expected = onnx_logits(tmp_path / "ghost.int8.onnx", CHUNKS, fused=False)
    for logits, wanted in zip(onnx_logits(decoder, CHUNKS, False, embedding), expected, strict=True):
        np.testing.assert_array_equal(logits, wanted)


def test_another_folder_gets_data_of_its_own_and_only_what_it_needs(exported, tmp_path):
    case = exported("llama")
    decoder, embedding = split(case.path, tmp_path)
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.data")}
    table = 4 * 64 * case.model.config.vocab_size
    assert table <= sizes["embedding.onnx.data"] < table + 65536
    assert sizes["decoder.onnx.data"] < case.file.data_path.stat().st_size
    np.testing.assert_allclose(onnx_logits(decoder, CHUNKS, embedding=embedding)[0], onnx_logits(case.path, CHUNKS)[0])


def test_ids_that_serve_more_than_the_lookup_are_refused_and_nothing_is_written(tmp_path):
    graph = onnx.load(FIXTURES / "transformers-llama" / "model.onnx")
    graph.graph.node.append(onnx.helper.make_node("Mul", ["input_ids", "input_ids"], ["squares"]))
    graph.graph.output.append(onnx.helper.make_tensor_value_info("squares", onnx.TensorProto.INT64, None))
    onnx.save(graph, tmp_path / "model.onnx")
    with pytest.raises(SurgeryError, match="token ids are also read by Mul"):
        split(tmp_path / "model.onnx", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    decoder, _ = split(FIXTURES / "transformers-llama" / "model.onnx", tmp_path)
    with pytest.raises(SurgeryError, match="has no input input_ids"):
        split_embedding(decoder, tmp_path / "a.onnx", tmp_path / "b.onnx")
