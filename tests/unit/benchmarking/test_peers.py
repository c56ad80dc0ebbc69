"""benchmarks/peers.py: what its sessions compute, and that a peer without parity cannot be overlooked."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tests.tiny import tiny_folder
from tests.unit.benchmarking.synthetic import FakeClock, SyntheticSession


@pytest.fixture(scope="module")
def peers():
    path = Path(__file__).parents[3] / "benchmarks" / "peers.py"
    spec = importlib.util.spec_from_file_location("peers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_repeated_steps_meet_the_same_past(peers, tmp_path):
    session = peers.TorchSession(tiny_folder(tmp_path / "tiny"), compiled=False)
    prompt, step = np.arange(3, 11)[None], np.array([[20]])
    _, cache = session.forward(prompt, session.new_cache(1))
    first, longer = session.forward(step, cache)
    for _ in range(3):
        session.timed_forward(step, cache)
    again, _ = session.forward(step, cache)
    np.testing.assert_allclose(again, first, rtol=1e-5, atol=1e-6)
    assert (cache.length, longer.length) == (8, 9)
    whole, _ = session.forward(np.concatenate([prompt, step], 1), session.new_cache(1))
    np.testing.assert_allclose(first[0, -1], whole[0, -1], rtol=1e-4, atol=1e-5)


def test_a_peer_without_parity_is_marked(peers, capsys):
    def row(variant):
        return {"workload": "decode-b1-p4", "metric": "seconds", "variant": variant, "summary": {"median": 0.01}}

    report = {"variants": {"dense": {}, "optimum": {}}, "measurements": [row("dense"), row("optimum")]}
    report |= {"comparisons": [], "flags": ["clocks drifted"]}
    parity = {"dense": peers.judged(1e-6, "torch-eager"), "optimum": peers.judged(0.25, "torch-eager")}
    peers.show(report, parity, {"ort-genai": "ImportError: no module\nnamed so"})
    shown = capsys.readouterr().out.splitlines()
    assert "optimum (!)" in shown[0] and "dense (!)" not in shown[0]
    assert "(!) optimum computes something else, 2.5e-01 standard deviations off: do not compare." in shown
    assert "left out: ort-genai: ImportError: no module" in shown and "caution: clocks drifted" in shown


def test_logits_that_are_not_finite_leave_a_peer_out(peers):
    class Broken(SyntheticSession):
        def forward(self, input_ids, cache):
            logits, cache = super().forward(np.zeros_like(input_ids), cache)
            logits[0, -1, 0] = np.inf
            return logits, cache

    with pytest.raises(ValueError, match="2 of 64 logits are not finite"):
        peers.last_logits(lambda: Broken(FakeClock(), lambda t, p: 0.01))
