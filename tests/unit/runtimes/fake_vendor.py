"""A strict stand-in for a vendor module, generated from a listing: what the release lacks raises AttributeError.

It exists for releases and machines where the real library cannot run. Plans hold the path of their ONNX graph and any
refitted weights; an execution context runs that graph with ONNX Runtime on the bound addresses and shapes, so what the
session computes is checked by numbers and not only by calls.
"""

import ctypes
import json
import pickle
from functools import cache
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import onnx
import onnxruntime

from ghostexport.runtimes.interface import read_interface
from tests.unit.runtimes.vendor_listing import listing

_ENUM = {"name", "value"}


class Member:
    """An enum member."""

    def __init__(self, kind, name, value):
        self.kind, self.name, self.value = kind, name, value

    def __int__(self):
        return self.value

    def __repr__(self):
        return f"{self.kind}.{self.name}"


class Strict:
    """Base of all fake classes: only listed attributes can be read or written."""

    _allowed = frozenset()
    _calls = None

    def __getattribute__(self, name):
        if name.startswith("_") or name in type(self)._allowed or name in type(self)._own:
            return object.__getattribute__(self, name)
        raise AttributeError(f"{type(self).__name__} of this release has no {name}")

    def __setattr__(self, name, value):
        if not (name.startswith("_") or name in type(self)._allowed or name in type(self)._own):
            raise AttributeError(f"{type(self).__name__} of this release has no {name}")
        if name in type(self)._allowed and not name.startswith("_"):
            self._calls.append(f"{type(self).__name__}.{name}=")
        object.__setattr__(self, name, value)


def logged(function):
    """Records the call as ``Class.method``."""

    def wrapper(self, *args):
        self._calls.append(f"{type(self)._vendor}.{function.__name__}")
        return function(self, *args)

    return wrapper


class Logger:
    def __init__(self, least=None):
        assert least is None or least.kind == "Severity"

    def log(self, severity, text):
        pass


class Builder:
    def __init__(self, logger):
        self._calls.append("Builder")

    @logged
    def create_network(self, flags):
        network = self._module.INetworkDefinition()
        network._flags = flags
        network._refittable = []
        return network

    @logged
    def create_builder_config(self):
        config = self._module.IBuilderConfig()
        config._flags, config._profiles, config._cache = set(), [], None
        return config

    @logged
    def create_optimization_profile(self):
        profile = self._module.IOptimizationProfile()
        profile._shapes = {}
        return profile

    @logged
    def build_serialized_network(self, network, config):
        return pickle.dumps({"graph": network._path, "weights": {}, "profiles": config._profiles})

    @logged
    def build_serialized_network_to_stream(self, network, config, writer):
        data = pickle.dumps({"graph": network._path, "weights": {}, "profiles": config._profiles})
        return writer.write(data[:100]) == 100 and writer.write(data[100:]) == len(data) - 100


class INetworkDefinition:
    num_inputs = property(lambda self: len(self._interface.inputs))
    num_layers = property(lambda self: len(self._nodes))

    def get_input(self, index):
        return SimpleNamespace(name=self._interface.inputs[index].name)

    def get_layer(self, index):
        return SimpleNamespace(name=self._nodes[index], type=None)

    @logged
    def mark_weights_refittable(self, name):
        self._refittable.append(name)
        return name in self._interface.spliced


class OnnxParser:
    num_errors = 0

    def __init__(self, network, logger):
        self._network = network

    @logged
    def parse_from_file(self, path):
        self._network._path = path
        self._network._interface = read_interface(__import__("pathlib").Path(path))
        self._network._nodes = [n.name for n in onnx.load(path, load_external_data=False).graph.node]
        return True


class IBuilderConfig:
    @logged
    def set_flag(self, flag):
        self._flags.add(flag.name)

    def get_flag(self, flag):
        return flag.name == "TF32" or flag.name in self._flags

    @logged
    def set_memory_pool_limit(self, pool, size):
        assert pool.name == "WORKSPACE" and size % (1 << 20) == 0

    @logged
    def add_optimization_profile(self, profile):
        self._profiles.append(profile._shapes)
        return len(self._profiles) - 1

    @logged
    def set_compute_capability(self, target, index):
        return index < self.num_compute_capabilities

    @logged
    def create_timing_cache(self, blob):
        cache = self._module.ITimingCache()
        cache._blob = blob
        return cache

    @logged
    def set_timing_cache(self, cache, ignore_mismatch):
        self._cache = cache
        return not ignore_mismatch and not cache._blob.startswith(b"foreign")

    def get_timing_cache(self):
        return self._cache


class ITimingCache:
    def serialize(self):
        return self._blob + b"timings"


class IOptimizationProfile:
    def set_shape(self, name, low, opt, high):
        assert len(low) == len(opt) == len(high)
        self._shapes[name] = (low, opt, high)


class Runtime:
    def __init__(self, logger):
        self._calls.append("Runtime")
        self._logger = logger

    @logged
    def deserialize_cuda_engine(self, plan):
        try:
            content = pickle.loads(plan)
        except (pickle.UnpicklingError, EOFError, KeyError):
            self._logger.log(self._module.ILogger.ERROR, "Serialization assertion failed: magic tag does not match")
            return None
        engine = self._module.ICudaEngine()
        engine._content = content
        return engine


class ICudaEngine:
    streamable_weights_size = 0

    @logged
    def create_execution_context(self, config=None):
        context = self._module.IExecutionContext()
        context._content, context._shapes, context._addresses, context._active = self._content, {}, {}, 0
        return context

    @logged
    def create_runtime_config(self):
        return self._module.IRuntimeConfig()

    @logged
    def create_serialization_config(self):
        return self._module.ISerializationConfig()

    @logged
    def serialize_with_config(self, config):
        return pickle.dumps(self._content)

    @logged
    def create_engine_inspector(self):
        inspector = self._module.EngineInspector()
        inspector._nodes = _nodes(self._content["graph"])
        return inspector

    def get_aliased_input_tensor(self, name):
        return _aliases(self._content["graph"]).get(name)

    def get_weight_streaming_automatic_budget(self):
        return 1 << 20


class EngineInspector:
    def get_engine_information(self, layout):
        assert layout is self._module.LayerInformationFormat.JSON
        assert self.execution_context._shapes  # without bound shapes, dims would be -1
        layers = [{"Name": node.name, "LayerType": node.op_type} for node in self._nodes]
        return json.dumps({"Layers": layers, "Bindings": sorted(self.execution_context._shapes)})


class ISerializationConfig:
    @logged
    def set_flag(self, flag):
        return True


class IRuntimeConfig:
    def create_runtime_cache(self):
        return self._module.IRuntimeCache()

    @logged
    def set_runtime_cache(self, cache):
        return True


class IRuntimeCache:
    def serialize(self):
        return b"kernels"

    @logged
    def deserialize(self, blob):
        return blob == b"kernels"


class IExecutionContext:
    profiler = None

    @logged
    def set_optimization_profile_async(self, index, stream):
        self._active = index
        return True

    def set_input_shape(self, name, shape):
        low, _, high = self._content["profiles"][self._active][name]
        self._shapes[name] = shape
        return all(a <= x <= b for a, x, b in zip(low, shape, high, strict=True))

    def set_tensor_address(self, name, address):
        assert address
        self._addresses[name] = address
        return True

    @logged
    def execute_async_v3(self, stream):
        session = _session(self._content)
        feeds = {v.name: self._read(v) for v in session.get_inputs()}
        names = [v.name for v in session.get_outputs()]
        for output, aliased in _aliases(self._content["graph"]).items():
            assert self._addresses[output] == self._addresses[aliased], f"{output} must share the buffer of {aliased}"
        for name, value in zip(names, session.run(names, feeds), strict=True):
            raw = np.ascontiguousarray(value)
            ctypes.memmove(self._addresses[name], raw.ctypes.data, raw.nbytes)
        if self.profiler is not None:
            for number, node in enumerate(_nodes(self._content["graph"]), 1):
                self.profiler.report_layer_time(node.name, number / 8)
        return True

    def _read(self, value):
        dtype = {
            "tensor(int32)": np.int32,
            "tensor(int64)": np.int64,
            "tensor(float)": np.float32,
            "tensor(float16)": np.float16,
        }[value.type]
        shape = self._shapes[value.name]
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(ctypes.string_at(self._addresses[value.name], nbytes), dtype).reshape(shape)


class Refitter:
    def __init__(self, engine, logger):
        self._calls.append("Refitter")
        self._engine, self._set = engine, {}

    def get_weights_prototype(self, name):
        return SimpleNamespace(dtype=self._module.float32)

    @logged
    def set_named_weights(self, name, weights):
        self._set[name] = weights
        return name.startswith("ghost.")

    def get_missing_weights(self):
        return []

    @logged
    def refit_cuda_engine(self):
        # read now, as the library does: arrays that died meanwhile would show
        for name, weights in self._set.items():
            raw = ctypes.string_at(weights._pointer, weights._count * 4)
            self._engine._content["weights"][name] = np.frombuffer(raw, np.float32)
        return True


class OnnxParserRefitter:
    def __init__(self, refitter, logger):
        self._refitter = refitter

    @logged
    def refit_from_file(self, path):
        return onnx.load(path, load_external_data=True) is not None


class Weights:
    def __init__(self, dtype, pointer, count):
        self._pointer, self._count = pointer, count


_BEHAVIOUR = {
    cls.__name__: cls
    for cls in (
        Logger,
        Builder,
        INetworkDefinition,
        OnnxParser,
        IBuilderConfig,
        ITimingCache,
        IOptimizationProfile,
        Runtime,
        ICudaEngine,
        EngineInspector,
        ISerializationConfig,
        IRuntimeConfig,
        IRuntimeCache,
        IExecutionContext,
        Refitter,
        OnnxParserRefitter,
        Weights,
    )
}
#: What the classes that we subclass get on top.
_OWN = {
    "ILogger": {"text", "lines", "log"},
    "IStreamWriter": {"error", "write"},
    "IProfiler": {"milliseconds"},
}
_SESSIONS = {}


@cache
def _aliases(graph):
    """Output -> the input it overwrites in place, as the library reports for KV cache updates."""
    nodes = onnx.load(graph, load_external_data=False).graph.node
    return {n.output[0]: n.input[0] for n in nodes if n.op_type == "TensorScatter"}


@cache
def _nodes(graph):
    return onnx.load(graph, load_external_data=False).graph.node


def _session(content):
    key = (content["graph"], tuple((k, v.tobytes()) for k, v in content["weights"].items()))
    if key not in _SESSIONS:
        model = onnx.load(content["graph"])
        for initializer in model.graph.initializer:
            if initializer.name in content["weights"]:
                values = content["weights"][initializer.name].reshape(list(initializer.dims))
                initializer.CopyFrom(onnx.numpy_helper.from_array(values, initializer.name))
        _SESSIONS[key] = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return _SESSIONS[key]


class Module:
    """The fake module; ``calls`` is what was done, in order."""

    def __init__(self, release):
        names = listing(release)
        self.calls = []
        self.__version__ = release.split("-")[1]
        for name, allowed in names.items():
            setattr(self, name, self._enum(name, allowed) if allowed >= _ENUM else self._class(name, allowed))
        for dtype, numpy in (("float32", np.float32), ("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
            if dtype in names:
                setattr(self, dtype, Member("DataType", dtype, numpy))

    def _enum(self, name, allowed):
        members = sorted(allowed - _ENUM)
        return type(name, (), {member: Member(name, member, i) for i, member in enumerate(members)})

    def _class(self, name, allowed):
        behaviour = _BEHAVIOUR.get(name)
        bases = (Strict,) if behaviour is None else (behaviour, Strict)
        own = frozenset(_OWN.get(name, ()))
        body = {"_allowed": allowed, "_own": own, "_calls": self.calls, "_module": self, "_vendor": name}
        if name in ("ILogger", "Logger"):
            severities = {s: Member("Severity", s, i) for i, s in enumerate(("INTERNAL_ERROR", "ERROR", "WARNING"))}
            body |= severities
        return type(name, bases, body)


class HostDevice:
    """Stands in for :class:`ghostexport.runtimes.cuda.Cuda` with host memory."""

    handle = 7

    def __init__(self):
        self.captured = 0

    def empty(self, nbytes):
        return _Buffer(np.full(max(nbytes, 1), 0xFF, np.uint8))  # not zero: stale memory would show as NaN

    def zero(self, buffer):
        buffer.array[:] = 0

    def upload(self, buffer, values):
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        buffer.array[: raw.size] = raw

    def download(self, buffer, shape, dtype):
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return buffer.array[:nbytes].copy().view(dtype).reshape(shape).astype(np.float32)

    def synchronize(self):
        pass

    def timed(self, work):
        work()
        return 0.5

    def capture(self, work):
        self.captured += 1
        return work


class _Buffer:
    def __init__(self, array):
        self.array = array
        self.nbytes = array.nbytes

    def data_ptr(self):
        return self.array.ctypes.data
