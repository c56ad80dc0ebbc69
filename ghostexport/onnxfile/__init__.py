"""ONNX files with external data: read through one security gate, refer to shared data files, save without copying."""

from ghostexport.onnxfile.gate import External, external, read_bytes_of, read_model, refer
from ghostexport.onnxfile.graph_io import (
    DTYPES,
    copy_data,
    external_tensors,
    initializer,
    load_graph,
    save_graph,
    strip_metadata,
    values,
    weight_bytes,
)

__all__ = [
    "DTYPES",
    "External",
    "copy_data",
    "external",
    "external_tensors",
    "initializer",
    "load_graph",
    "read_bytes_of",
    "read_model",
    "refer",
    "save_graph",
    "strip_metadata",
    "values",
    "weight_bytes",
]
