"""The report in a real browser: no console error, no request, all plots, narrow and wide."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ghostexport.report.page import write_report
from ghostexport.runfolder import RunFolder
from tests.integration.chromium import Page, find_chromium
from tests.unit.benchmarking.synthetic import write_evaluation, write_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="no chromium binary on PATH"),
]
# Pareto over speed and over bytes, latency distributions, size bars, scores, two heat maps and the singular values
PLOTS = 2 + 6 + 1 + 1 + 3


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("run"))
    write_evaluation(folder)
    return write_report(RunFolder(folder))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    page = Page(find_chromium(), tmp_path_factory.mktemp("profile"))
    yield page
    page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_report_opens_cleanly(report, page, width):
    page.open(report.as_uri(), width)
    requests = [e["params"]["request"]["url"] for e in page.events if e["method"] == "Network.requestWillBeSent"]
    assert [r for r in requests if not r.startswith("data:")] == [report.as_uri()]
    bad = [
        e
        for e in page.events
        if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
    ]
    assert bad == []
    svgs = "[...document.querySelectorAll('figure.plot svg')]"
    sizes = page.evaluate(f"{svgs}.map(s => [s.clientWidth, s.clientHeight, s.childElementCount])")
    assert len(sizes) == PLOTS
    assert all(w > 300 and h > 60 and children for w, h, children in sizes)
    # nothing sticks out of the page: only tables and code scroll, inside themselves
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelectorAll('.missing').length") == 0
    if folder := os.environ.get("GHOSTEXPORT_SCREENSHOTS"):
        page.screenshot(Path(folder) / f"report-{width}.png")
