"""README's table of architectures is made from the committed results, never written by hand."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import architectures  # noqa: E402


def test_readme_shows_the_committed_results():
    found = json.loads(architectures.RESULTS.read_text())
    readme = architectures.README.read_text()
    assert architectures.in_readme(readme, architectures.families(found)) == readme
    assert architectures.RESULTS.with_suffix(".md").read_text() == architectures.table(found)


def test_every_committed_row_is_whole_and_reasoned():
    rows = json.loads(architectures.RESULTS.read_text())["rows"]
    for row in rows:
        assert tuple(row["cells"]) == architectures.CELLS, row["name"]
        for cell in row["cells"].values():
            assert cell["state"] in architectures.MARKS
            assert cell["note"] or cell["state"] == "passed"
