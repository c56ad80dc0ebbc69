"""Whole texts in windows, what models write counted by hand, and what is left of dense on tasks."""

from __future__ import annotations

import sys
import types

import pytest

from ghostexport import texts
from ghostexport.errors import CalibrationError, RuntimeUnavailableError
from ghostexport.evaluation.corpora import corpus_windows
from ghostexport.evaluation.tasks import retained
from ghostexport.evaluation.writing import variety


class Letters:
    """A token per character, behind a BOS token."""

    def __call__(self, text, verbose=True):
        return {"input_ids": [1, *map(ord, text)]}


def text_of(windows):
    return "".join(map(chr, windows.tokens.ravel()[1:]))


def test_a_file_is_read_in_its_order_and_cut_without_gaps(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one two\n\nthree four five", encoding="utf-8")
    windows = corpus_windows(str(path), Letters(), 6)
    assert windows.tokens.shape == (4, 6) and windows.tokens[0, 0] == 1 and (windows.tokens[1:, 0] != 1).all()
    assert text_of(windows) == "one two\n\nthree four five"[:23]
    with pytest.raises(CalibrationError, match="25 tokens, less than one window of 26"):
        corpus_windows(str(path), Letters(), 26)
    with pytest.raises(CalibrationError, match="neither a known corpus nor a file"):
        corpus_windows("wikitext3", Letters(), 6)


def hub(rows):
    """The ``datasets`` module with one split."""
    asked = []

    def load_dataset(*names, split, **options):
        asked.append((names, split, options))
        return rows

    return types.SimpleNamespace(load_dataset=load_dataset), asked


def test_named_corpora_are_the_papers_splits(monkeypatch):
    module, asked = hub({"text": ["a", "", "b"], "sentence": ["c", "d"]})
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert text_of(corpus_windows("wikitext2", Letters(), 2)) == "a\n\n\n\nb"[:5]
    assert text_of(corpus_windows("ptb", Letters(), 5)) == "c\n\nd"
    assert [split for _, split, _ in asked] == ["test", "validation"]
    taken = []
    rows = types.SimpleNamespace(take=lambda count: taken.append(count) or [{"text": "x" * 9}] * 300)
    monkeypatch.setitem(sys.modules, "datasets", hub(rows)[0])
    windows = corpus_windows("c4", Letters(), 10)
    assert windows.tokens.shape == (256, 10) and taken == [1100]
    assert text_of(windows)[:12] == "xxxxxxxxx xx"


def test_without_the_package_or_the_network_it_says_what_it_needs(monkeypatch):
    def unreachable(*names, **options):
        raise OSError("no route to host")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(CalibrationError, match="could not be read from the Hugging Face Hub: no route"):
        corpus_windows("wikitext2", Letters(), 6)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RuntimeUnavailableError, match="datasets is not installed"):
        corpus_windows("c4", Letters(), 6)
    assert set(texts.MEASURED) == set(texts.CORPORA)


def test_repetition_counted_by_hand():
    found = variety([[1, 2, 1, 2, 1, 2], [3, 4, 5]])
    assert found["distinct_1"] == 5 / 9  # 1 2 3 4 5 of nine
    assert found["distinct_2"] == 4 / 7  # 12 21 34 45 of seven
    assert found["repeated"] == 1 - 2 / 3  # 1212 2121 1212; the other is too short
    assert variety([[7]]) == {"distinct_1": 1.0, "distinct_2": None, "repeated": None}


def test_retained_is_a_share_of_the_dense_average():
    assert retained({"acc": 0.45, "acc_norm": 0.3}, {"acc": 0.5, "acc_norm": 0.0}) == {"acc": pytest.approx(0.9)}
