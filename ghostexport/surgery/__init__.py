"""Cutting decoder blocks out of exported ONNX graphs and splicing operators in. onnx-ir only, never torch.

``ghostexport.surgery`` is this package and a function: called, it is :func:`ghostexport.api.surgery`.
"""

import inspect
import sys
from types import ModuleType
from typing import Any

from ghostexport.surgery.inspection import GraphReport, inspect_graph, read_operators
from ghostexport.surgery.operation import kept_of, operate
from ghostexport.surgery.surgery_report import BoundaryReport, SurgeryReport

__all__ = ["BoundaryReport", "GraphReport", "SurgeryReport", "inspect_graph", "kept_of", "operate", "read_operators"]


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> SurgeryReport:
        from ghostexport.api import surgery

        return surgery(*args, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        from ghostexport.api import surgery

        return inspect.signature(surgery)


sys.modules[__name__].__class__ = _Callable
