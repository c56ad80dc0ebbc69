"""Target ``triton``: a ``model_repository/`` for Triton Inference Server.

The graph, its cache as inputs and outputs, and a decoupled model in Python that streams token ids from it. The folder
is never called ``triton``: PyTorch would import it.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from ghostexport.deploy.bundle import Bundle
from ghostexport.deploy.genai import write_graph
from ghostexport.deploy.selftest import Answer
from ghostexport.errors import RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.files import write_bytes, write_json
from ghostexport.runtimes.base import Tensor

FOLDER = "model_repository"
DECODER, GENERATOR = "decoder", "generator"
#: With the client that asks it, and the server.
INSTALL, IMAGE = "pip install 'tritonclient[grpc]==2.73.0'", "nvcr.io/nvidia/tritonserver:24.10-py3"
#: Seconds that a model may take to load, or a token to come.
_PATIENCE = 300
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


def run(folder: Path, prompts: Sequence[list[int]], count: int) -> list[Answer]:
    """See :data:`selftest.Runner`: on a ``tritonserver`` of this machine, which streams token ids and gives no logits.

    Raises:
        RuntimeUnavailableError: there is no such program, or it does not start.
    """
    from tritonclient import grpc

    with _server(folder / FOLDER, grpc) as client:
        return [(None, _streamed(client, grpc, ids, count)) for ids in prompts]


def _streamed(client: Any, grpc: Any, ids: list[int], count: int) -> list[int]:
    inputs = [grpc.InferInput("prompt", [len(ids)], "INT64"), grpc.InferInput("max_tokens", [1], "INT32")]
    inputs[0].set_data_from_numpy(np.array(ids, np.int64))
    inputs[1].set_data_from_numpy(np.array([count], np.int32))
    said: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: said.put((result, error)))
    client.async_stream_infer(GENERATOR, inputs, enable_empty_final_response=True)
    tokens: list[int] = []
    while True:
        result, error = said.get(timeout=_PATIENCE)
        if error is not None:
            raise RuntimeUnavailableError(f"Triton's generator failed: {error}", "See the server's log.")
        if (token := result.as_numpy("token")) is not None:
            tokens.append(int(token[0]))
        if result.get_response().parameters["triton_final_response"].bool_param:
            client.stop_stream()
            return tokens


@contextlib.contextmanager
def _server(repository: Path, grpc: Any) -> Iterator[Any]:
    """A client of a server on this repository, which ends with the block."""
    program = shutil.which("tritonserver")
    if program is None:
        raise RuntimeUnavailableError("There is no tritonserver on the path.", f"docker pull {IMAGE}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [program, f"--model-repository={repository.absolute()}", "--allow-http=false", "--allow-metrics=false"]
    command += ["--grpc-address=127.0.0.1", f"--grpc-port={address.rpartition(':')[2]}"]
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        client = grpc.InferenceServerClient(address)
        try:
            _await(client, process, log)
            yield client
        finally:
            client.close()
            process.terminate()


def _await(client: Any, process: Any, log: Any) -> None:
    for _ in range(10 * _PATIENCE):
        with contextlib.suppress(Exception):  # the client's, of a server that does not listen yet
            if client.is_server_ready():
                return
        if process.poll() is not None:
            break
        time.sleep(0.1)
    log.seek(0)
    wrong = [line for line in log.read().splitlines() if line.startswith("E") or "| UNAVAILABLE" in line]
    raise RuntimeUnavailableError("tritonserver does not serve the folder: " + "\n".join(wrong[-5:]), f"Use {IMAGE}.")
