"""ONNX Runtime as a backend of Triton in Python, for servers that come without Triton's own, such as nvidia-pytriton's.

As ``model.py`` of a folder ``onnxruntime`` among the server's backends it runs ``model.onnx`` of models that ask for
that backend, with their files as they are.
"""

from pathlib import Path

import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """One ONNX graph."""

    def initialize(self, args: dict[str, str]) -> None:
        graph = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        self.session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])

    def execute(self, requests: list) -> list:
        return [self._answer(request) for request in requests]

    def _answer(self, request: object) -> object:
        feeds = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        names = request.requested_output_names()
        found = self.session.run(names, feeds)
        return pb_utils.InferenceResponse([pb_utils.Tensor(n, v) for n, v in zip(names, found, strict=True)])
