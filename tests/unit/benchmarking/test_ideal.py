import pytest

from ghostexport.benchmarking.ideal import (
    Ceilings,
    VariantFacts,
    flops,
    ideal_speedup,
    moved_bytes,
    roofline_seconds,
    utilisation,
)
from ghostexport.benchmarking.workloads import Workload

# 10 bytes of weights per block and 100 outside the blocks, of which 20 are looked up
DENSE = VariantFacts(10, 0, 200, 10, 50, attention_flops=4, gathered_bytes=20)
PRUNED = VariantFacts(6, 0, 160, 6, 34, attention_flops=2, gathered_bytes=20)


def test_bytes_by_hand():
    # every pass reads 180 bytes of weights; two sequences hold 5 tokens of 10 bytes, at each of two steps
    assert moved_bytes(Workload("decode", 2, past=5, steps=2), DENSE) == 2 * (180 + 2 * 10 * 5)
    assert moved_bytes(Workload("prefill", 2, 8), DENSE) == 180


def test_flops_by_hand():
    # causal pairs of 3 tokens: 1 + 2 + 3
    assert flops(Workload("prefill", 2, 3), DENSE) == 2 * (3 * 50 + 6 * 4)
    # one token after 5: it sees 6
    assert flops(Workload("decode", 1, past=5), DENSE) == 50 + 6 * 4


def test_ideal_speedups():
    decode = Workload("decode", 1, past=100)
    assert ideal_speedup(decode, "seconds", PRUNED, DENSE, None) == pytest.approx((180 + 1000) / (140 + 600))
    prefill = Workload("prefill", 1, 1)
    assert ideal_speedup(prefill, "seconds", PRUNED, DENSE, None) == pytest.approx(54 / 36)
    request = Workload("request", 1, 4, steps=3)
    assert ideal_speedup(request, "ttft", PRUNED, DENSE, None) == pytest.approx((4 * 50 + 40) / (4 * 34 + 20))
    assert ideal_speedup(request, "itl", PRUNED, DENSE, None) == pytest.approx((360 + 90) / (280 + 54))
    assert ideal_speedup(request, "latency", PRUNED, DENSE, None) is None  # needs the ceilings
    assert ideal_speedup(request, "latency", DENSE, DENSE, Ceilings(1.0, 1.0, "float32", "")) == 1


def test_roofline_takes_the_slower_side_of_every_pass():
    memory_bound = Ceilings(1.0, 1e9, "float32", "")
    assert roofline_seconds(Workload("decode", 1, past=5), DENSE, memory_bound) == 180 + 50
    compute_bound = Ceilings(1e9, 1.0, "float32", "")
    assert roofline_seconds(Workload("request", 1, 2, steps=2), DENSE, compute_bound) == (2 * 50 + 3 * 4) + (50 + 3 * 4)


def test_utilisation():
    ceilings = Ceilings(1000.0, 100.0, "float32", "")
    assert utilisation(Workload("decode", 1, past=2), 0.4, DENSE, ceilings) == {"mbu": pytest.approx(200 / 0.4 / 1000)}
    assert utilisation(Workload("prefill", 1, 1), 1.0, DENSE, ceilings) == {"mfu": pytest.approx(0.54)}
    assert utilisation(Workload("prefill", 1, 1), 1.0, DENSE, None) == {}
