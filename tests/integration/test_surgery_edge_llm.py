"""Surgery on a graph of TensorRT Edge-LLM's own exporter: ONNX Runtime equals PyTorch on the cut model.

The graph takes embeddings of packed tokens of any number of sequences and a pool of cache pages; attention is a plugin
that only TensorRT has. Here the plugin gets a body of standard operators (float32 inside), so ONNX Runtime runs it.
Meaning of its inputs, as the exporter documents them (B sequences, T tokens, P pages of 128 tokens):

- ``starts`` (B+1): first row of each sequence among the packed tokens; ``past_lengths`` (B): its tokens in the cache.
- ``past`` (2, P, 128, heads, size): the pool, keys then values. ``present`` is the pool with the new tokens written.
- ``table`` (B, 2, pages of a sequence): its pages in order, numbered through the flat pool: keys in [0, P), values in
  [P, 2P).
- ``rope`` (T, 2 * 8): cosines and sines of each packed token. Lengths, phase and carrier tell kernels what to launch.
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
#: Key pages of two sequences in a pool of six: out of order, interleaved, and two pages that nobody owns.
KEY_PAGES = np.array([[4, 1], [0, 3]])
NUM_PAGES = 6
PLUGIN = """
<opset_import: ["" : 24], domain: "trt_edgellm">
AttentionPlugin (qkv, past, query_lengths, rope, past_lengths, table, starts, lengths, phase, carrier) => (y, present)
{
   zero = Constant <value_int = 0> ()
   one = Constant <value_int = 1> ()
   page_size = Constant <value_int = 128> ()
   last = Constant <value = int64[1] {-1}> ()
   first = Constant <value = int64[1] {0}> ()
   second = Constant <value = int64[1] {1}> ()

   extent = Shape <start = 0, end = 1> (qkv)
   count = Squeeze (extent)
   token = Range (zero, count, one)
   begins = Cast <to = 7> (starts)
   row = Unsqueeze (token, last)
   has_begun = GreaterOrEqual (row, begins)
   as_number = Cast <to = 7> (has_begun)
   begun = ReduceSum <keepdims = 0> (as_number, last)
   sequence = Sub (begun, one)
   begin = Gather (begins, sequence)
   in_chunk = Sub (token, begin)
   old_lengths = Cast <to = 7> (past_lengths)
   old_length = Gather (old_lengths, sequence)
   position = Add (old_length, in_chunk)

   wide_qkv = Cast <to = 1> (qkv)
   one_token_each = Constant <value = int64[3] {-1, 1, 128}> ()
   batched = Reshape (wide_qkv, one_token_each)
   sizes = Constant <value = int64[3] {64, 32, 32}> ()
   q, k, v = Split <axis = 2> (batched, sizes)
   rope_rows = Unsqueeze (rope, second)
   cos, sin = Split <axis = 2, num_outputs = 2> (rope_rows)
   turned_q = RotaryEmbedding <num_heads = 4> (q, cos, sin)
   turned_k = RotaryEmbedding <num_heads = 2> (k, cos, sin)

   page_ids = Cast <to = 7> (table)
   by_page = Transpose <perm = [0, 2, 1]> (page_ids)
   page_number = Div (position, page_size)
   sequence_column = Unsqueeze (sequence, last)
   page_column = Unsqueeze (page_number, last)
   owner = Concat <axis = 1> (sequence_column, page_column)
   pages = GatherND (by_page, owner)
   slot = Mod (position, page_size)
   slot_column = Unsqueeze (slot, last)
   before_page = Mul (pages, page_size)
   address = Add (before_page, slot_column)
   addresses = Unsqueeze (address, last)
   both = Concat <axis = 1> (turned_k, v)
   stored = Cast <to = 10> (both)
   flat = Constant <value = int64[2] {-1, 32}> ()
   pool = Reshape (past, flat)
   filled = ScatterND (pool, addresses, stored)
   pool_shape = Shape (past)
   present = Reshape (filled, pool_shape)

   paged = Constant <value = int64[3] {-1, 128, 32}> ()
   pool_pages = Reshape (filled, paged)
   own_pages = Gather (pool_pages, page_ids)
   joined = Constant <value = int64[4] {0, 2, -1, 32}> ()
   caches = Reshape (own_pages, joined)
   wide_caches = Cast <to = 1> (caches)
   cache = Gather (wide_caches, sequence)
   cache_k, cache_v = Split <axis = 1, num_outputs = 2> (cache)
   all_k = Squeeze (cache_k, second)
   all_v = Squeeze (cache_v, second)
   capacity = Shape <start = 1, end = 2> (all_k)
   slots = Squeeze (capacity)
   cached = Range (zero, slots, one)
   position_column = Unsqueeze (position, last)
   visible = LessOrEqual (cached, position_column)
   axes = Constant <value = int64[2] {1, 2}> ()
   mask = Unsqueeze (visible, axes)
   out = Attention <q_num_heads = 4, kv_num_heads = 2> (turned_q, all_k, all_v, mask)
   heads = Constant <value = int64[3] {-1, 4, 16}> ()
   by_head = Reshape (out, heads)
   y = Cast <to = 10> (by_head)
}
"""


def _runnable(graph: Path) -> Any:
    """A session on ``graph`` whose plugin has a body."""
    model = ir.load(graph)
    function = ir.from_proto(onnx.parser.parse_function(PLUGIN))
    model.functions[function.identifier()] = function
    ir.save(model, graph.with_name("run.onnx"))
    return session(graph.with_name("run.onnx"))


def _metadata(lengths: NDArray[np.int64], past: NDArray[np.int64]) -> dict[str, Any]:
    """What the graph wants to know about the packed chunk: ``lengths`` new tokens behind ``past`` old ones (B)."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return {
        "query_start_offsets": starts,
        "query_lengths": lengths,
        "past_lengths": past,
        "attention_sequence_lengths": past + lengths,
        "state_indices": np.arange(len(lengths)),
        "execution_phase_marker": np.zeros(1),
        "context_sequence_count_carrier": np.zeros(len(lengths)),
        "kv_page_table": np.stack([KEY_PAGES, KEY_PAGES + NUM_PAGES], axis=1),
        "positions": np.concatenate([np.arange(p, p + n) for p, n in zip(past, lengths, strict=True)]),
        "logits_indices": np.arange(starts[-1]),
    }


def _edge_logits(
    graph: Path, model: Any, sequences: list[list[NDArray[np.int64]]], blocks: int
) -> list[list[NDArray[np.float32]]]:
    """Logits of every sequence, chunk after chunk, all sequences of a chunk in one packed call.

    Embeddings and rotary tables come from the PyTorch model. The pool starts full of numbers that nobody wrote.
    """
    run = _runnable(graph)
    shape = (2, NUM_PAGES, PAGE, HEADS, HEAD_DIM)
    cache = {f"past_key_values_{k}": np.full(shape, 9, np.float16) for k in range(blocks)}
    kinds = {value.name: value.type for value in run.get_inputs()}
    dtypes = {"tensor(float)": "f4", "tensor(float16)": "f2", "tensor(int32)": "i4", "tensor(int64)": "i8"}
    assert {name for name in kinds if "past_key" in name} == set(cache)
    past = np.zeros(len(sequences), np.int64)
    result: list[list[NDArray[np.float32]]] = [[] for _ in sequences]
    for parts in zip(*sequences, strict=True):
        lengths = np.array([ids.shape[1] for ids in parts])
        feeds = _metadata(lengths, past)
        with torch.no_grad():
            x = model.get_input_embeddings()(torch.from_numpy(np.concatenate(parts, axis=1)))[0]
            tables = model.model.rotary_emb(torch.zeros(1), torch.from_numpy(feeds["positions"])[None])
        rope = torch.cat([table[0, :, : HEAD_DIM // 2] for table in tables], -1)
        feeds |= {"inputs_embeds": x.half().numpy(), "rope_rotary_cos_sin": rope.numpy(), **cache}
        ready = {name: feeds[name].astype(dtypes[kind]) for name, kind in kinds.items()}
        outputs = dict(zip([value.name for value in run.get_outputs()], run.run(None, ready), strict=True))
        cache = {name: outputs[name.replace("past", "present")] for name in cache}
        for rows, logits in zip(result, np.split(outputs["logits"], np.cumsum(lengths)[:-1]), strict=True):
            rows.append(logits[None])
        past = past + lengths
    assert all((np.delete(pool, KEY_PAGES.ravel(), axis=1) == 9).all() for pool in cache.values())
    return result


@pytest.mark.parametrize("spans", SPANS)
def test_a_cut_graph_equals_the_cut_model(spans: str, tmp_path: Path) -> None:
    """Batch 2: prefill of 7 and 125 tokens, one token with past 7 and 125, then 5 and 4 with past 8 and 126.

    The last chunk takes the second sequence into its second page. PyTorch runs each sequence alone.
    """
    model, plan = fixture_model(NAME), plan_of(spans)
    sequences = [chunks(96, lengths, batch=1, seed=n) for n, lengths in enumerate([(7, 1, 5), (125, 1, 4)])]
    for operators in (None, dense_operators(plan, 32)):
        operate(SOURCE, plan, operators, tmp_path / "cut.onnx")
        pruned = drop_blocks(model, plan)
        pruned = pruned if operators is None else insert_operators(pruned, operators)
        found = _edge_logits(tmp_path / "cut.onnx", model, sequences, len(plan.kept))
        for logits, tokens in zip(found, sequences, strict=True):
            assert_same(logits, torch_logits(pruned, tokens), FIXTURES[NAME].tolerance)
