"""The listings of vendor releases: class name -> attribute names, as introspected from the real bindings."""

import json
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "data" / "tensorrt-api"
RELEASES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


@cache
def listing(release):
    return {
        name: frozenset(attributes or ())
        for name, attributes in json.loads((FOLDER / f"{release}.json").read_text()).items()
    }


def is_rtx(release):
    return release.startswith("tensorrt_rtx")
