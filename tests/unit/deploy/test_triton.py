"""Triton's folder: the generator's own code against the decoder's graph, through a stand-in for the server's module."""

import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest

from ghostexport.deploy import model_repository
from ghostexport.deploy.bundle import Bundle
from ghostexport.execution import Execution
from ghostexport.runtimes.interface import read_interface
from ghostexport.runtimes.ort.onnxruntime import open_graph


class Server:
    """``triton_python_backend_utils`` with one decoder, on ONNX Runtime."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL, TRITONSERVER_MEMORY_CPU = 1, 0

    def __init__(self, graph):
        session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
        self.PreferredMemory = lambda kind: kind
        self.Tensor = lambda name, values: SimpleNamespace(name=name, as_numpy=lambda: values)
        self.TritonError = str

        class InferenceResponse(SimpleNamespace):
            def __init__(self, tensors=(), error=None):
                super().__init__(tensors=list(tensors), has_error=lambda: error is not None, error=error)

        class InferenceRequest:
            def __init__(self, model_name, requested_output_names, inputs, preferred_memory):
                assert model_name == "decoder"
                self.names, self.feeds = requested_output_names, {t.name: t.as_numpy() for t in inputs}

            def exec(request):  # noqa: N805
                found = session.run(request.names, request.feeds)
                return InferenceResponse([self.Tensor(n, v) for n, v in zip(request.names, found, strict=True)])

        self.InferenceResponse, self.InferenceRequest = InferenceResponse, InferenceRequest
        self.get_output_tensor_by_name = lambda r, name: next(t for t in r.tensors if t.name == name)
        self.get_input_tensor_by_name = lambda r, name: next(t for t in r.inputs if t.name == name)


@pytest.fixture(scope="module")
def folder(exported, tmp_path_factory):
    case, output = exported("llama"), tmp_path_factory.mktemp("triton")
    codec = SimpleNamespace(ends=frozenset({2}))
    bundle = SimpleNamespace(interface=read_interface(case.path), codec=codec, graph=case.path)
    bundle.copy_description = lambda place: Bundle
    model_repository.write(bundle, output, Execution())
    return output / "model_repository"


def test_every_binding_of_the_graph_is_configured(folder, exported):
    interface = read_interface(exported("llama").path)
    text = (folder / "decoder" / "config.pbtxt").read_text()
    found = re.findall(
        r'^(input|output) \{ name: "([^"]+)" data_type: TYPE_(\w+) dims: \[ ([-\d, ]+) \] \}$', text, re.M
    )
    assert [name for kind, name, _, _ in found if kind == "input"] == [t.name for t in interface.inputs]
    assert [name for kind, name, _, _ in found if kind == "output"] == [t.name for t in interface.outputs]
    past = next(t for t in interface.inputs if t.name == interface.kv[0][0])
    assert next(f[3] for f in found if f[1] == past.name) == f"-1, {past.dims[1]}, -1, {past.dims[3]}"
    assert "decoupled: true" in (folder / "generator" / "config.pbtxt").read_text()


def test_the_generator_sends_the_graphs_greedy_tokens(folder, exported, monkeypatch):
    server = Server(folder / "decoder" / "1" / "model.onnx")
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", server)
    path = folder / "generator" / "1" / "model.py"
    names = {"__file__": str(path), "__name__": "model"}
    exec(compile(path.read_text(), path, "exec"), names)
    model, sent = names["TritonPythonModel"](), []
    model.initialize({})
    prompt = np.array([1, 5, 9, 77, 33], np.int64)
    inputs = [server.Tensor("prompt", prompt), server.Tensor("max_tokens", np.array([12], np.int32))]
    sender = SimpleNamespace(send=lambda response=None, flags=0: sent.append((response, flags)))
    model.execute([SimpleNamespace(inputs=inputs, get_response_sender=lambda: sender)])
    assert sent[-1] == (None, 1)
    tokens = [int(response.tensors[0].as_numpy()[0]) for response, _ in sent[:-1]]
    session, expected, step = open_graph(exported("llama").path), [], prompt[None]
    cache = session.new_cache(1)
    while len(expected) < 12 and 2 not in expected:
        logits, cache = session.forward(step, cache)
        expected.append(int(logits[0, -1].argmax()))
        step = np.array([[expected[-1]]])
    assert tokens == expected and json.loads(path.with_name("model.json").read_text())["ends"] == [2]
