"""Removes decoder blocks of an LLM, repairs the cut in closed form, and builds TensorRT engines.

Public names are imported on first use (PEP 562): ``import ghostexport`` costs no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "BlockSpan": "plan",
    "Boundary": "plan",
    "PrunePlan": "plan",
    "Operator": "operators",
    "OperatorSet": "operators",
    "load_operators": "operators",
    "Recipe": "recipe",
    "Execution": "execution",
    "parse_recipe": "recipe",
    "RunFolder": "runfolder",
    "run": "pipeline",
    "load_model": "models",
    "drop_blocks": "models",
    "insert_operators": "models",
    "export_model": "exporters",
    "operate": "surgery",
    "inspect_graph": "surgery",
    "verify": "verification",
    "load_engine": "runtimes",
    "swap_operator": "runtimes",
    "GhostExportError": "errors",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ghostexport' has no attribute {name!r}")
    return getattr(importlib.import_module(f"ghostexport.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
