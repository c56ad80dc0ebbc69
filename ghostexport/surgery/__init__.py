"""Cutting decoder blocks out of exported ONNX graphs and splicing operators in. onnx-ir only, never torch."""

from ghostexport.surgery.inspection import GraphReport, inspect_graph
from ghostexport.surgery.operation import operate
from ghostexport.surgery.report import BoundaryReport, SurgeryReport

__all__ = ["BoundaryReport", "GraphReport", "SurgeryReport", "inspect_graph", "operate"]
