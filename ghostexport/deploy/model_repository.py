"""Target ``triton``: a ``model_repository/`` for Triton Inference Server.

The graph, its cache as inputs and outputs, and a decoupled model in Python that streams token ids from it. The folder
is never called ``triton``: PyTorch would import it.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from ghostexport.deploy.bundle import Bundle
from ghostexport.deploy.genai import write_graph
from ghostexport.execution import Execution
from ghostexport.files import write_bytes, write_json
from ghostexport.runtimes.base import Tensor

FOLDER = "model_repository"
DECODER, GENERATOR = "decoder", "generator"
_TYPES = {"int64": "TYPE_INT64", "int32": "TYPE_INT32", "float32": "TYPE_FP32", "float16": "TYPE_FP16"}


def refusal(bundle: Bundle) -> str | None:
    """Why the variant does not fit, or None."""
    unknown = {t.dtype for t in (*bundle.interface.inputs, *bundle.interface.outputs)} - _TYPES.keys()
    return f"the generator has no {', '.join(sorted(unknown))}" if unknown else None


def write(bundle: Bundle, output: Path, execution: Execution) -> None:
    """Writes the decoder with every binding in its ``config.pbtxt``, and the generator with what it must know."""
    bundle.copy_description(output)
    repository, interface = output / FOLDER, bundle.interface
    write_graph(bundle, repository / DECODER / "1" / "model.onnx")
    parts = [f'name: "{DECODER}"', 'backend: "onnxruntime"', "max_batch_size: 0"]
    parts += [_binding("input", t) for t in interface.inputs]
    parts += [_binding("output", t) for t in interface.outputs]
    write_bytes(repository / DECODER / "config.pbtxt", "\n".join(parts).encode() + b"\n")
    whole = ("prompt", "TYPE_INT64", "[ -1 ]"), ("max_tokens", "TYPE_INT32", "[ 1 ]")
    parts = [f'name: "{GENERATOR}"', 'backend: "python"', "max_batch_size: 0"]
    parts += ["model_transaction_policy { decoupled: true }"]
    parts += [f'input {{ name: "{name}" data_type: {kind} dims: {dims} }}' for name, kind, dims in whole]
    parts += ['output { name: "token" data_type: TYPE_INT64 dims: [ 1 ] }']
    write_bytes(repository / GENERATOR / "config.pbtxt", "\n".join(parts).encode() + b"\n")
    code = resources.files("ghostexport.deploy").joinpath("triton_generator.py.txt").read_bytes()
    write_bytes(repository / GENERATOR / "1" / "model.py", code)
    caches = dict(interface.kv)
    empty = {"batch": 1}  # of everything else that grows, nothing
    about = {
        "decoder": DECODER,
        "ends": sorted(bundle.codec.ends),
        "inputs": [t.name for t in interface.inputs if t.name not in caches],
        "logits": next(t.name for t in interface.outputs if t.name not in caches.values()),
        "cache": [
            [t.name, caches[t.name], t.dtype, [d if isinstance(d, int) else empty.get(d, 0) for d in t.dims]]
            for t in interface.inputs
            if t.name in caches
        ],
    }
    write_json(repository / GENERATOR / "1" / "model.json", about)


def _binding(kind: str, tensor: Tensor) -> str:
    dims = ", ".join(str(d) if isinstance(d, int) else "-1" for d in tensor.dims)
    return f'{kind} {{ name: "{tensor.name}" data_type: {_TYPES[tensor.dtype]} dims: [ {dims} ] }}'
