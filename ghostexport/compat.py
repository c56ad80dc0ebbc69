"""``--compat``: every switch as a published repository sets it; flags given beside it win. Imports nothing.

What cannot be switched, and where each repository differs from its own paper, is in ``docs/methods.md``.
"""

from __future__ import annotations

from typing import Any

#: name -> recipe section -> key -> value.
COMPAT: dict[str, dict[str, dict[str, Any]]] = {
    "ghosted-v2": {
        "calibration": {"source": "c4", "sequences": 32, "length": 2048, "seed": 0, "bos": False},
        "select": {"criterion": "streamline-channelwise"},
        "recover": {
            "operators": ["ghost"],
            "ridge": 1e-6,
            "solver": "normal",
            "statistics": "dense",
            "per_block": True,
            "ratio": "mean-of-ratios",
        },
    },
    "linearpatch": {
        "calibration": {"source": "wikitext2", "sequences": 128, "length": 2048, "seed": 2, "bos": False},
        "select": {"criterion": "streamline-channelwise"},
        "recover": {
            "operators": ["linearpatch-rotate"],
            "statistics": "dense",
            "per_block": False,
            "ratio": "mean-of-ratios",
        },
    },
    "replaceme": {
        "calibration": {"sequences": 128, "length": 1024, "seed": 42, "bos": True},
        "select": {"criterion": "angular"},
        "recover": {"operators": ["replaceme-lstsq"], "ridge": 0.0, "statistics": "dense", "per_block": False},
    },
}
