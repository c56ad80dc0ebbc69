"""Sessions without PyTorch: NVIDIA's bindings as recorded from cuda-bindings 13.4.4, their functions on host memory."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from ghostexport.errors import RuntimeUnavailableError
from ghostexport.runtimes.cuda_device import CudaDevice
from ghostexport.runtimes.nvinfer.nv_session import NvSession
from tests.unit.runtimes.in_place import CAPACITY, VOCABULARY, in_place_graph, in_place_logits
from tests.unit.runtimes.test_nvinfer import build, flavour

#: Function -> its parameters, as its signature says.
SIGNATURES = {
    "cudaMalloc": ["size"],
    "cudaFree": ["devPtr"],
    "cudaMemsetAsync": ["devPtr", "value", "count", "stream"],
    "cudaMemcpyAsync": ["dst", "src", "count", "kind", "stream"],
    "cudaStreamCreateWithFlags": ["flags"],
    "cudaStreamSynchronize": ["stream"],
    "cudaEventCreate": [],
    "cudaEventRecord": ["event", "stream"],
    "cudaEventSynchronize": ["event"],
    "cudaEventElapsedTime": ["start", "end"],
    "cudaEventDestroy": ["event"],
    "cudaStreamBeginCapture": ["stream", "mode"],
    "cudaStreamEndCapture": ["stream"],
    "cudaGraphInstantiate": ["graph", "flags"],
    "cudaGraphLaunch": ["graphExec", "stream"],
    "cudaGetErrorString": ["error"],
}


class FakeBindings:
    """Strict: nothing but the recorded functions, with so many arguments; memory that was freed is not known."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)  # noqa: N815
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)  # noqa: N815

    def __init__(self):
        self.memory, self.calls, self.launches, self.fails = {}, [], 0, None

    def __getattr__(self, name):
        parameters = SIGNATURES[name]

        def function(*arguments):
            assert len(arguments) == len(parameters), name
            self.calls.append(name)
            if name == "cudaGetErrorString":
                return 0, b"out of memory"
            if name == self.fails:
                return 2, None
            own = vars(type(self)).get(f"_{name}")
            value = own and own(self, *arguments)
            return (0,) if value is None else (0, value)

        return function

    def _cudaMalloc(self, size):  # noqa: N802
        block = ctypes.create_string_buffer(b"\xff" * size, size)
        self.memory[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def _cudaFree(self, address):  # noqa: N802
        del self.memory[address]

    def _cudaMemsetAsync(self, address, value, count, stream):  # noqa: N802
        assert count <= len(self.memory[address]) and stream == 9
        ctypes.memset(address, value, count)

    def _cudaMemcpyAsync(self, target, source, count, kind, stream):  # noqa: N802
        device = target if kind == 1 else source
        assert any(0 <= device - at <= len(block) - count for at, block in self.memory.items()) and stream == 9
        ctypes.memmove(target, source, count)

    def _cudaStreamCreateWithFlags(self, flags):  # noqa: N802
        return 9

    def _cudaEventCreate(self):  # noqa: N802
        return 5

    def _cudaEventElapsedTime(self, start, end):  # noqa: N802
        return 250.0

    def _cudaStreamEndCapture(self, stream):  # noqa: N802
        return 3

    def _cudaGraphInstantiate(self, graph, flags):  # noqa: N802
        return 4

    def _cudaGraphLaunch(self, graph, stream):  # noqa: N802
        self.launches += 1


def test_values_go_there_and_back_in_every_dtype():
    bindings = FakeBindings()
    device = CudaDevice(bindings)
    values = np.array([[1.5, -2.0, 0.25]], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    for stored, dtype in ((values, "float32"), (values.astype(np.float16), "float16"), (bits, "bfloat16")):
        buffer = device.empty(16)
        device.upload(buffer, stored)
        assert np.array_equal(device.download(buffer, (1, 3), dtype), values)
    device.zero(buffer)
    assert not device.download(buffer, (1, 3), "float32").any()
    assert device.timed(lambda: None) == 0.25 and device.handle == 9
    del buffer
    assert not bindings.memory
    replay = device.capture(lambda: None)
    replay()
    assert bindings.launches == 1 and bindings.calls.count("cudaStreamEndCapture") == 1


def test_an_error_of_the_driver_is_ours():
    bindings = FakeBindings()
    device = CudaDevice(bindings)
    bindings.fails = "cudaMalloc"
    with pytest.raises(RuntimeUnavailableError, match="cudaMalloc failed: out of memory"):
        device.empty(4)


def test_a_session_runs_on_the_bindings(tmp_path, monkeypatch):
    runtime, trt = flavour("tensorrt-11.4.0.106", monkeypatch)
    engine = build(runtime, in_place_graph(tmp_path / "graph.onnx"), tmp_path / "engines")
    running = NvSession(trt, runtime.title, engine, CudaDevice(FakeBindings()))
    ids = np.random.default_rng(2).integers(0, VOCABULARY, (2, CAPACITY))
    logits, cache = running.forward(ids[:, :5], running.new_cache(2))
    step, _ = running.forward(ids[:, 5:6], cache)
    assert np.abs(np.concatenate([logits, step], 1) - in_place_logits(ids)[:, :6]).max() < 1e-5
