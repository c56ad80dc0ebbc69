"""Which of a task's metrics are kept, from what lm-eval logs of its items."""

from __future__ import annotations

import pytest

from ghostexport.errors import RecipeError
from ghostexport.evaluation.tasks import compare, item_metrics, summarise


def logged(doc, name, **metrics):
    return {"doc_id": doc, "filter": name, "metrics": list(metrics), **metrics}


def test_every_mean_over_items_is_kept_by_filter_in_the_order_of_the_items():
    samples = [
        logged(2, "strict", exact_match=1.0),
        logged(0, "strict", exact_match=0.0),
        logged(1, "strict", exact_match=True),
        logged(0, "loose", exact_match=1.0),
        logged(2, "loose", exact_match=1.0),
        logged(1, "loose", exact_match=0.0),
    ]
    reported = {"exact_match,strict": 2 / 3, "exact_match,loose": 2 / 3, "exact_match_stderr,strict": "N/A"}
    found = item_metrics("sums", samples, reported)
    assert found == {"exact_match,strict": [0.0, 1.0, 1.0], "exact_match,loose": [1.0, 0.0, 1.0]}


def test_the_only_filter_is_not_named():
    samples = [logged(i, "none", acc=float(i == 0), acc_norm=1.0) for i in range(4)]
    found = item_metrics("x", samples, {"acc,none": 0.25, "acc_norm,none": 1.0})
    assert found == {"acc": [1.0, 0.0, 0.0, 0.0], "acc_norm": [1.0] * 4}


def test_figures_of_the_whole_text_are_refused_by_name():
    """A perplexity is logged as pairs; a median is not the mean of its items."""
    pairs = [logged(i, "none", word_perplexity=(-3.0, 2)) for i in range(3)]
    with pytest.raises(RecipeError, match=r"'wiki' has no metric that is a mean over its items.*word_perplexity,none"):
        item_metrics("wiki", pairs, {"alias": "wiki", "word_perplexity,none": 4.5})
    median = [logged(i, "none", length=float(i * i)) for i in range(3)]
    with pytest.raises(RecipeError, match="length,none"):
        item_metrics("x", median, {"length,none": 1.0})


def test_averages_are_of_the_metrics_that_all_tasks_have():
    one = {"a": {"acc": [1.0, 0.0], "acc_norm": [1.0, 1.0]}, "b": {"acc": [1.0, 1.0, 1.0, 0.0]}}
    other = {"a": {"acc": [0.0, 0.0], "acc_norm": [1.0, 0.0]}, "b": {"acc": [1.0, 0.0, 1.0, 0.0]}}
    found = summarise({"one": one})["one"]
    assert found["average"] == {"acc": pytest.approx((0.5 + 0.75) / 2)}
    assert found["a"]["acc"] == {"value": 0.5, "stderr": pytest.approx(0.5), "items": 2}
    differences = compare(one, other, 200, 0)
    assert differences["average"]["acc"]["difference"] == pytest.approx((0.5 + 0.25) / 2)
    assert list(differences["a"]) == ["acc", "acc_norm"] and list(differences["average"]) == ["acc"]
