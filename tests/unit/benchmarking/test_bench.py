import json

import numpy as np
import pytest

from ghostexport.benchmarking import bench
from ghostexport.benchmarking.result import pairs
from ghostexport.errors import ParityError, RecipeError
from ghostexport.execution import Execution
from ghostexport.recipe import BenchSection
from tests.unit.benchmarking.synthetic import CEILINGS, FakeClock, SyntheticSession, engine, facts

SECTION = BenchSection(prefill_tokens=(8,), decode_past=(4,), decode_steps=4, request=(4, 3), repeats=12)


def run(sessions, section=SECTION, engines=None, parity=None, clock=None, execution=None, all_facts=None, **more):
    return bench(
        sessions,
        engines or {v: engine(v) for v in sessions},
        all_facts or {v: facts(10 if v == "dense" else 8) for v in sessions},
        section,
        execution or Execution(),
        parity=parity if parity is not None else dict.fromkeys(sessions, True),
        ceilings=CEILINGS,
        clock=clock or FakeClock(),
        **more,
    )


def loaders(costs, noise=0.0, drift=None, seed=0):
    clock = FakeClock()
    return {
        name: lambda name=name, number=number, cost=cost: SyntheticSession(
            clock, lambda t, p: cost * t, noise, number, (drift or {}).get(name, lambda call: 1.0)
        )
        for number, (name, cost) in enumerate(costs.items(), seed)
    }, clock


def comparison(report, workload, variant, against, metric="seconds"):
    found = [
        c
        for c in report.to_json()["comparisons"]
        if (c["workload"], c["variant"], c["against"], c["metric"]) == (workload, variant, against, metric)
    ]
    assert len(found) == 1
    return found[0]


def test_two_copies_of_one_engine_are_the_same():
    # five 95 % intervals in each of four runs: on average one misses 1; more than three would be 1 in 400
    found = []
    for seed in range(0, 40, 10):
        sessions, clock = loaders({"dense": 0.01, "pruned": 0.01}, noise=0.03, seed=seed)
        found += run(sessions, clock=clock).to_json()["comparisons"]
    for c in found:
        assert (c["verdict"] == "same") == (c["speedup"]["low"] <= 1 <= c["speedup"]["high"])
    assert len(found) == 20 and sum(c["verdict"] == "same" for c in found) >= 17
    assert sum(c["difference_seconds"]["low"] <= 0 <= c["difference_seconds"]["high"] for c in found) >= 17


def test_known_costs_are_found():
    sessions, clock = loaders({"dense": 0.010, "pruned": 0.008, "linearpatch-rotate": 0.0081, "ghost": 0.0081})
    report = run(sessions, clock=clock)
    speedup = comparison(report, "decode-b1-p4", "pruned", "dense")
    assert speedup["speedup"]["value"] == pytest.approx(1.25) and speedup["verdict"] == "faster"
    assert speedup["ideal"] == pytest.approx(1.25)  # weights and KV both shrink by 10/8
    assert speedup["of_ideal"] == pytest.approx(1.0)
    marginal = comparison(report, "decode-b1-p4", "ghost", "pruned")
    assert marginal["difference_seconds"]["value"] == pytest.approx(0.0001)
    twins = comparison(report, "prefill-b1-t8", "ghost", "linearpatch-rotate")
    assert twins["speedup"]["value"] == pytest.approx(1.0) and twins["verdict"] == "same"
    assert comparison(report, "request-b1-t4-g3", "pruned", "dense", "latency")["ideal"] == pytest.approx(1.25)


def test_session_that_slows_down_half_way_is_flagged():
    # one visit of each workload in the memory pass and 12 + 1 rounds; a round is 1 + (1 + 4) + 3 forwards
    slow = {"ghost": lambda call: 1.0 if call < 9 * 7 else 1.4}
    sessions, clock = loaders({"dense": 0.01, "ghost": 0.01}, noise=0.01, drift=slow)
    report = run(sessions, clock=clock)
    flagged = {
        (m["variant"], m["workload"]) for m in report.to_json()["measurements"] if "slowed down" in str(m["flags"])
    }
    assert flagged == {("ghost", w.name) for w in report.workloads}


def test_json_is_complete_and_keeps_raw_samples(tmp_path):
    sessions, clock = loaders({"dense": 0.01, "pruned": 0.008})
    seen = []
    report = run(sessions, clock=clock, observe=lambda cells: seen.append(len(cells)), recipe_sha256="ab")
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["schema"] == "ghostexport.bench/1" and data["recipe_sha256"] == "ab"
    assert seen == [6] * 12
    decode = [m for m in data["measurements"] if m["workload"] == "decode-b1-p4" and m["variant"] == "dense"]
    assert len(decode) == 1 and [len(r) for r in decode[0]["rounds"]] == [4] * 12
    assert decode[0]["summary"]["median"] == pytest.approx(0.01)
    assert decode[0]["tokens_per_second"] == pytest.approx(100)
    # a step reads the weights and a past of 4: (4000 + 20 x 4) bytes in 0.01 s, over 1 GB/s
    assert decode[0]["mbu"] == pytest.approx((4000 + 80) / 0.01 / 1e9)
    prefill = next(m for m in data["measurements"] if m["workload"] == "prefill-b1-t8" and m["variant"] == "dense")
    assert prefill["mfu"] == pytest.approx((8 * 2000 + 36 * 40) / 0.08 / 1e9)
    assert "enqueue_median" not in prefill  # a CPU has no enqueue time: absent, not zero
    assert set(data["variants"]["dense"]["peak_bytes"]) == {w["name"] for w in data["workloads"]}


def test_order_is_random_and_fair():
    clock, order = FakeClock(), []

    class Recording(SyntheticSession):
        def __init__(self, name):
            super().__init__(clock, lambda t, p: 0.01)
            self.name = name

        def new_cache(self, batch, length=0):
            order.append(self.name)
            return super().new_cache(batch, length)

    run({v: lambda v=v: Recording(v) for v in ("dense", "ghost")}, clock=clock)
    # the memory pass asks for 1 + 3 caches per variant; then 13 rounds of 3 workloads x 2 variants
    rounds = np.array(order[8:]).reshape(13, 6)
    assert all(sorted(r) == ["dense"] * 3 + ["ghost"] * 3 for r in rounds.tolist())
    assert len({tuple(r) for r in rounds.tolist()}) > 6


@pytest.mark.parametrize(
    ("engines", "parity", "all_facts", "reason"),
    [
        ({"ghost": engine("ghost", flags={"threads": 4})}, None, None, "runtime settings differ: threads"),
        ({"ghost": engine("ghost", version="2.0")}, None, None, "runtime differs"),
        ({}, {"dense": True, "ghost": False}, None, "parity of ghost failed"),
        ({}, {"dense": True}, None, "parity of ghost was not checked"),
    ],
)
def test_no_verdict_when_the_sides_differ(engines, parity, all_facts, reason):
    sessions, clock = loaders({"dense": 0.01, "ghost": 0.008})
    both = {v: engine(v) for v in sessions} | engines
    report = run(sessions, clock=clock, engines=both, parity=parity)
    for found in report.to_json()["comparisons"]:
        assert found["verdict"] == "none" and any(reason in w for w in found["withheld"])


def test_no_verdict_across_dtypes():
    import dataclasses

    sessions, clock = loaders({"dense": 0.01, "ghost": 0.008})
    mixed = {"dense": facts(), "ghost": dataclasses.replace(facts(8), dtype="float16")}
    report = run(sessions, clock=clock, all_facts=mixed)
    assert (
        "dtype differs: float16 (ghost), float32 (dense)"
        in comparison(report, "decode-b1-p4", "ghost", "dense")["withheld"]
    )


def test_host_bound_gpu_session_is_flagged():
    clock = FakeClock()

    class HostBound(SyntheticSession):
        enqueue_seconds = 0.0095

    report = run({"dense": lambda: HostBound(clock, lambda t, p: 0.01)}, clock=clock)
    decode = next(m for m in report.to_json()["measurements"] if m["workload"] == "decode-b1-p4")
    assert decode["enqueue_median"] == 0.0095 and any("host-bound" in f and "95%" in f for f in decode["flags"])


def test_an_unsteady_session_is_flagged_and_a_steady_one_is_not():
    sessions, clock = loaders({"dense": 0.01}, noise=0.1)
    sessions["ghost"] = lambda: SyntheticSession(clock, lambda t, p: 0.01 * t, 0.01, 1)
    measured = run(sessions, clock=clock).to_json()["measurements"]
    for m in measured:
        unsteady = [f for f in m["flags"] if f.startswith("unsteady")]
        assert bool(unsteady) == (m["summary"]["cv"] > 0.025), m["flags"]  # trtexec's limit
        if m["variant"] == "dense" and m["workload"] == "decode-b1-p4":
            assert unsteady == [f"unsteady: coefficient of variation {m['summary']['cv']:.1%} > 2.5%"]
    assert not any(m["flags"] for m in measured if m["variant"] == "ghost")


def test_ideal_is_said_before_anything_is_measured():
    sessions, clock = loaders({"dense": 0.01, "ghost": 0.008})
    events = []
    run(
        sessions,
        clock=clock,
        execution=Execution(say=events.append, progress=lambda task, done, total: events.append(task)),
    )
    ideal = next(i for i, e in enumerate(events) if e == "ideal speed-up, decode-b1-p4 seconds: ghost 1.250")
    assert ideal < events.index("bench")


def test_engine_with_broken_logits_is_not_timed():
    clock = FakeClock()

    class Broken(SyntheticSession):
        def forward(self, input_ids, cache):
            logits, cache = super().forward(input_ids, cache)
            return logits * np.nan, cache

    sessions = {"dense": lambda: SyntheticSession(clock, lambda t, p: 0.01)}
    sessions["ghost"] = lambda: Broken(clock, lambda t, p: 0.01)
    with pytest.raises(ParityError, match="engine of ghost computes logits that are not finite") as caught:
        run(sessions, clock=clock)
    assert "ghostexport verify" in caught.value.remedy


def test_workloads_outside_every_profile_are_an_error():
    tiny = {"only": {"input_ids": ((1, 1), (1, 1), (1, 2))}}
    sessions, clock = loaders({"dense": 0.01})
    with pytest.raises(RecipeError, match="No workload"):
        run(
            sessions,
            clock=clock,
            engines={"dense": engine("dense", profiles=tiny)},
            section=BenchSection(prefill_tokens=(8,), decode_past=(4,), request=(4, 3), batches=(2,)),
        )


def test_the_first_visit_of_a_session_that_was_loaded_anew_is_not_timed(monkeypatch):
    """Where memory holds one session, each turn loads it again: its first forward costs ten times as much."""
    monkeypatch.setattr("ghostexport.benchmarking.benchmark._free_memory", lambda: 0)
    cold = dict.fromkeys(("dense", "pruned"), lambda call: 10.0 if call == 0 else 1.0)
    sessions, clock = loaders({"dense": 0.010, "pruned": 0.008}, drift=cold)
    opened = []
    counted = {name: lambda name=name: opened.append(name) or sessions[name]() for name in sessions}
    measured = run(counted, clock=clock).to_json()["measurements"]
    assert len(opened) > 12  # not only once each
    for cost, variant in ((0.010, "dense"), (0.008, "pruned")):
        (prefill,) = [m for m in measured if (m["workload"], m["variant"]) == ("prefill-b1-t8", variant)]
        assert np.ravel(prefill["rounds"]) == pytest.approx(np.full(12, 8 * cost))


def test_every_variant_is_judged_against_dense_and_only_repaired_ones_against_pruned():
    variants = ("dense", "pruned", "ghost", "dense.int4", "ghost.int4")
    found = list(pairs(variants))
    assert [v for v, against in found if against == "dense"] == list(variants[1:])
    assert [v for v, against in found if against == "pruned"] == ["ghost", "ghost.int4"]
    assert ("ghost.int4", "dense.int4") in found
