"""Surgery on a graph of TensorRT Edge-LLM's own exporter: ONNX Runtime equals PyTorch on the cut model.

The graph takes embeddings of packed tokens and a paged cache, and attention is a plugin that only TensorRT has. Here
the plugin gets a body of standard operators for one sequence in one page (float32 inside), so ONNX Runtime runs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

from ghostexport.models import drop_blocks, insert_operators
from ghostexport.surgery import operate
from tests.decoding import assert_same, chunks, session, torch_logits
from tests.surgery_cases import FIXTURES, SPANS, dense_operators, fixture_model, plan_of

NAME = "edge-llm-llama"
SOURCE = Path(__file__).parent.parent / "fixtures" / NAME / "model.onnx"
PAGE, HEADS, HEAD_DIM = 128, 2, 16
PLUGIN = """
<opset_import: ["" : 24], domain: "trt_edgellm">
AttentionPlugin (qkv, past, query_lengths, rope, past_lengths, table, starts, lengths, phase, carrier) => (y, present)
{
   zero = Constant <value = int64[1] {0}> ()
   one = Constant <value = int64[1] {1}> ()
   page_size = Constant <value = int64[1] {128}> ()
   sizes = Constant <value = int64[3] {64, 32, 32}> ()
   old_length = Cast <to = 7> (past_lengths)
   new_length = Cast <to = 7> (query_lengths)
   total = Add (old_length, new_length)
   wide_qkv = Cast <to = 1> (qkv)
   flat = Constant <value = int64[3] {1, -1, 128}> ()
   batched = Reshape (wide_qkv, flat)
   q, k, v = Split <axis = 2> (batched, sizes)
   cos2, sin2 = Split <axis = 1, num_outputs = 2> (rope)
   cos = Unsqueeze (cos2, zero)
   sin = Unsqueeze (sin2, zero)
   turned_q = RotaryEmbedding <num_heads = 4> (q, cos, sin)
   turned_k = RotaryEmbedding <num_heads = 2> (k, cos, sin)
   wide_past = Cast <to = 1> (past)
   page = Squeeze (wide_past, one)
   before = Slice (page, zero, old_length, one)
   after = Slice (page, total, page_size, one)
   heads_first = Transpose <perm = [0, 2, 1, 3]> (before)
   old_k, old_v = Split <axis = 0, num_outputs = 2> (heads_first)
   out, all_k, all_v = Attention <is_causal = 1, q_num_heads = 4, kv_num_heads = 2>
      (turned_q, turned_k, v, , old_k, old_v)
   y = Cast <to = 10> (out)
   both = Concat <axis = 0> (all_k, all_v)
   used = Transpose <perm = [0, 2, 1, 3]> (both)
   stored = Concat <axis = 1> (used, after)
   pages = Unsqueeze (stored, one)
   present = Cast <to = 10> (pages)
}
"""


def _edge_logits(graph: Path, model: Any, tokens: list[NDArray[np.int64]], blocks: int) -> list[NDArray[np.float32]]:
    """Logits of one sequence, chunk after chunk; embeddings and rotary tables come from the PyTorch model."""
    runnable = ir.load(graph)
    function = ir.from_proto(onnx.parser.parse_function(PLUGIN))
    runnable.functions[function.identifier()] = function
    ir.save(runnable, graph.with_name("run.onnx"))
    run = session(graph.with_name("run.onnx"))
    cache = {f"past_key_values_{k}": np.zeros((2, 1, PAGE, HEADS, HEAD_DIM), np.float16) for k in range(blocks)}
    kinds = {value.name: value.type for value in run.get_inputs()}
    dtypes = {"tensor(float)": "f4", "tensor(float16)": "f2", "tensor(int32)": "i4", "tensor(int64)": "i8"}
    assert {name for name in kinds if "past_key" in name} == set(cache)
    past, result = 0, []
    for ids in tokens:
        length = ids.shape[1]
        positions = torch.arange(past, past + length)[None]
        with torch.no_grad():
            x = model.get_input_embeddings()(torch.from_numpy(ids))[0].half().numpy()
            cos, sin = (table[0, :, : HEAD_DIM // 2] for table in model.model.rotary_emb(torch.zeros(1), positions))
        feeds: dict[str, Any] = {"inputs_embeds": x, "rope_rotary_cos_sin": torch.cat([cos, sin], -1).numpy(), **cache}
        feeds |= {"query_lengths": [length], "past_lengths": [past], "attention_sequence_lengths": [past + length]}
        feeds |= {"query_start_offsets": [0, length], "execution_phase_marker": [0], "state_indices": [0]}
        feeds |= {"context_sequence_count_carrier": [0], "kv_page_table": [[[0], [0]]], "positions": positions[0]}
        feeds["logits_indices"] = np.arange(length)
        ready = {name: np.asarray(feeds[name]).astype(dtypes[kind]) for name, kind in kinds.items()}
        outputs = dict(zip([value.name for value in run.get_outputs()], run.run(None, ready), strict=True))
        cache = {name: outputs[name.replace("past", "present")] for name in cache}
        result.append(np.asarray(outputs["logits"])[None])
        past += length
    return result


@pytest.mark.parametrize("spans", SPANS)
def test_a_cut_graph_equals_the_cut_model(spans: str, tmp_path: Path) -> None:
    """Prefill of 7 tokens, one token with past 7, five with past 8."""
    model, plan, tokens = fixture_model(NAME), plan_of(spans), chunks(96, (7, 1, 5), batch=1)
    for operators in (None, dense_operators(plan, 32)):
        operate(SOURCE, plan, operators, tmp_path / "cut.onnx")
        pruned = drop_blocks(model, plan)
        reference = torch_logits(pruned if operators is None else insert_operators(pruned, operators), tokens)
        found = _edge_logits(tmp_path / "cut.onnx", model, tokens, len(plan.kept))
        assert_same(found, reference, FIXTURES[NAME].tolerance)
