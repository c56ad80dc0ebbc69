import numpy as np
import pytest

from ghostexport.benchmarking.workloads import Workload, grid, visit, why_not
from ghostexport.recipe import BenchSection
from tests.unit.benchmarking.synthetic import VOCABULARY, FakeClock, SyntheticSession, engine


def test_grid_of_the_section():
    section = BenchSection(batches=(1, 2), prefill_tokens=(8,), decode_past=(4, 6), decode_steps=3, request=(5, 2))
    assert [w.name for w in grid(section)] == [
        "prefill-b1-t8",
        "prefill-b2-t8",
        "decode-b1-p4",
        "decode-b1-p6",
        "decode-b2-p4",
        "decode-b2-p6",
        "request-b1-t5-g2",
    ]


def test_forward_passes_and_tokens():
    assert Workload("prefill", 2, 8).forward_passes() == ((8, 0),)
    assert Workload("decode", 2, past=4, steps=3).forward_passes() == ((1, 4), (1, 4), (1, 4))
    assert Workload("request", 1, 5, steps=3).forward_passes() == ((5, 0), (1, 5), (1, 6))
    assert [w.tokens_per_visit for w in (Workload("prefill", 2, 8), Workload("decode", 2, past=4, steps=3))] == [16, 8]


def test_request_times_by_hand():
    clock = FakeClock()
    session = SyntheticSession(clock, lambda tokens, past: 0.5 if past == 0 else 0.1)
    workload = Workload("request", 1, 4, steps=5)
    result = visit(session, workload, workload.token_ids(VOCABULARY, 0), clock)
    assert result.samples["ttft"] == pytest.approx((0.5,))
    assert result.samples["itl"] == pytest.approx((0.1,))
    assert result.samples["latency"] == pytest.approx((0.9,))  # TTFT + 4 x ITL
    assert result.cache_bytes == 10 * 8  # 4 prompt tokens and 4 of the 5 generated ones are in the cache


def test_decode_keeps_one_raw_sample_per_step():
    clock = FakeClock()
    session = SyntheticSession(clock, lambda tokens, past: past / 10)
    workload = Workload("decode", 1, past=3, steps=3)
    result = visit(session, workload, workload.token_ids(VOCABULARY, 0), clock)
    assert result.samples["seconds"] == pytest.approx((0.3, 0.3, 0.3))  # always after 3 tokens
    assert clock.now == round(4 * 0.3e9) and result.cache_bytes == 10 * 4  # one step more, untimed
    assert result.enqueue == ()


def test_all_variants_get_the_same_tokens():
    workload = Workload("prefill", 2, 8)
    assert np.array_equal(workload.token_ids(50, 1), workload.token_ids(50, 1))
    assert not np.array_equal(workload.token_ids(50, 1), workload.token_ids(50, 2))


def test_workload_outside_the_profiles_is_named():
    profile = {"input_ids": ((1, 1), (1, 8), (2, 16)), "attention_mask": ((1, 1), (1, 8), (2, 32))}
    built = engine("dense", profiles={"both": profile})
    assert why_not(Workload("prefill", 2, 16), built) is None
    assert why_not(Workload("decode", 1, past=31, steps=1), built) is None
    assert "past 32" in why_not(Workload("decode", 1, past=32), built)
    in_place = engine("dense", profiles={"both": {"input_ids": ((1, 1), (1, 8), (2, 16))}}, extra={"kv_capacity": 16})
    assert why_not(Workload("decode", 1, past=15), in_place) is None
    assert why_not(Workload("decode", 1, past=16), in_place) == "the KV cache of dense holds 16 tokens, not 17"
    assert "batch 3" in why_not(Workload("prefill", 3, 8), built)
