import numpy as np
import pytest

from ghostexport.benchmarking.engine_checks import engine_quality, windows
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import CalibrationError
from ghostexport.execution import Execution
from tests.unit.benchmarking.synthetic import Cache

VOCABULARY = 5


class TableSession:
    """Logits depend on the current token only: everything can be computed by hand."""

    clock = "perf_counter_ns"

    def __init__(self, table):
        self.table = table.astype(np.float32)

    def new_cache(self, batch, length=0):
        return Cache(length, batch)

    def forward(self, input_ids, cache):
        return self.table[input_ids], cache

    def close(self):
        pass


def test_figures_by_hand():
    generator = np.random.default_rng(0)
    tables = {name: generator.standard_normal((VOCABULARY, VOCABULARY)) for name in ("dense", "ghost")}
    tokens = generator.integers(0, VOCABULARY, (3, 9))
    loaders = {name: lambda t=table: TableSession(t) for name, table in tables.items()}
    found = engine_quality(loaders, CalibrationSet.from_tokens(tokens), 24, 9, Execution())
    log_p, log_q = (np.log(np.exp(t) / np.exp(t).sum(1, keepdims=True)) for t in tables.values())
    here, following = tokens[:, :-1].ravel(), tokens[:, 1:].ravel()
    assert found["tokens"] == 24
    assert found["variants"]["ghost"]["perplexity"] == pytest.approx(np.exp(-log_q[here, following].mean()), rel=1e-5)
    kl = (np.exp(log_p[here]) * (log_p[here] - log_q[here])).sum(1).mean()
    assert found["variants"]["ghost"]["kl"] == pytest.approx(kl, rel=1e-5)
    assert found["variants"]["ghost"]["top1"] == np.mean(log_p[here].argmax(1) == log_q[here].argmax(1))
    assert found["variants"]["dense"]["kl"] == 0 and found["variants"]["dense"]["top1"] == 1


def test_windows_leave_padding_out_and_stop_at_the_wanted_tokens():
    tokens = np.arange(20).reshape(2, 10)
    mask = np.ones_like(tokens)
    mask[0, 7:] = 0
    held_out = CalibrationSet.from_tokens(tokens, mask)
    chosen = [w.tolist() for w in windows(held_out, 8, 4)]
    # 4 and 3 real tokens of the first row predict 3 + 2; four of the second predict the last 3
    assert chosen == [[0, 1, 2, 3], [4, 5, 6], [10, 11, 12, 13]]


def test_no_text_is_an_error():
    with pytest.raises(CalibrationError):
        engine_quality({}, CalibrationSet.from_tokens(np.zeros((1, 1))), 8, 4, Execution())
