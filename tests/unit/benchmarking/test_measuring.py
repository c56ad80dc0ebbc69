from ghostexport.benchmarking.machine import MachineWatch
from ghostexport.benchmarking.measuring import SessionPool, measure
from ghostexport.benchmarking.workloads import Workload
from tests.unit.benchmarking.synthetic import VOCABULARY, FakeClock, SyntheticSession

WORKLOADS = (Workload("prefill", 1, 4), Workload("decode", 1, past=3, steps=2), Workload("request", 1, 4, steps=3))


def cold(clock, loads):
    """A session whose first forward pass of every size takes 100 s, and every other 1 s."""
    seen = set()
    loads.append(seen)

    def seconds(tokens, past):
        known = (tokens, past) in seen
        seen.add((tokens, past))
        return 1.0 if known else 100.0

    return SyntheticSession(clock, seconds)


def test_no_sample_is_of_a_session_that_was_just_loaded():
    clock, loads = FakeClock(), []
    pool = SessionPool(dict.fromkeys(("dense", "ghost"), lambda: cold(clock, loads)), keep_all=False)
    ids = {w.name: w.token_ids(VOCABULARY, 0) for w in WORKLOADS}
    cells = measure(pool, WORKLOADS, ids, rounds=4, warmup=0, seed=0, clock=clock, watch=MachineWatch("cpu"))
    assert len(loads) > 4  # memory holds one: sessions come and go
    samples = {(c.workload.kind, metric): rounds for c in cells for metric, rounds in c.rounds.items()}
    for (kind, metric), rounds in samples.items():
        expected = 3.0 if metric == "latency" else 1.0
        assert len(rounds) == 4 and all(abs(s - expected) < 1e-6 for r in rounds for s in r), (kind, metric)
