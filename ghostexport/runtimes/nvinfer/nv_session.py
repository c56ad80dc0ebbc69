"""A session on TensorRT or TensorRT-RTX: device buffers, KV ping-pong, profile switching, CUDA graphs for decode.

Buffers are allocated once, for the largest batch and length of the profiles, so addresses never change. The KV cache
lives in two sets of buffers: a call reads one and writes the other. Where the engine aliases every KV output to its
input (``TensorScatter``, ``TRT_KVCacheUpdate``) there is one set, and both are bound to the same address.

A CUDA graph is captured for a decode call whose shapes and addresses equal those of the call before, since the
context's host state belongs to its last shapes. With a growing cache every step of a generation has another past
length, so nothing can be replayed there: only a repeated call at one past, as the decode benchmark makes it, is. A
cache updated in place has one shape, and every step replays. :attr:`NvSession.graph_replays` counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ghostexport.errors import BuildError, RecipeError, RuntimeUnavailableError
from ghostexport.files import write_bytes
from ghostexport.kv_names import pair_kv
from ghostexport.runtimes.base import EngineFile, KVCache, Tensor
from ghostexport.runtimes.interface import decoder_feeds
from ghostexport.runtimes.nvinfer.diagnosis import capture_log, layer_information, layer_timer
from ghostexport.runtimes.nvinfer.engine_loading import create_runtime, load_plan


@dataclass(frozen=True)
class NvCache:
    """The KV cache in one of the session's two buffer sets.

    Attributes:
        slot: buffer set, 0 or 1 (always 0 for a cache updated in place).
        batch, length: sequences and tokens held.
        nbytes: bytes held.
        epoch: which conversation it belongs to; a new one overwrites the buffers.
        step: calls since the conversation's start; the set is overwritten two calls later.
    """

    slot: int
    batch: int
    length: int
    nbytes: int
    epoch: int
    step: int


@dataclass
class _Plan:
    """A deserialised plan: its context, which profiles it has, and what its last call looked like."""

    cuda_engine: Any
    context: Any
    profiles: list[str]
    active: int = 0
    last: Any = None
    replay: Callable[[], None] | None = None


class NvSession:
    """See :class:`ghostexport.runtimes.base.Session`. One conversation at a time: a new cache ends the one before.

    Attributes:
        enqueue_seconds: host seconds of the last ``execute_async_v3`` or replay; None before the first call.
        graph_captures, graph_replays: CUDA graphs captured, and calls that replayed one. TensorRT-RTX captures inside
            the library, where they cannot be counted: both stay 0.
    """

    clock = "cuda-events"

    def __init__(self, trt: Any, title: str, engine: EngineFile, device: Any) -> None:
        self.engine = engine
        self.enqueue_seconds: float | None = None
        self.graph_captures = self.graph_replays = 0
        self._trt, self._title, self._device = trt, title, device
        self._logger = capture_log(trt)
        self._runtime = create_runtime(trt, title, self._logger)
        if engine.flags["version_compatible"]:
            self._runtime.engine_host_code_allowed = True
        self._runtime_cache: Any = None
        self._plans = [self._open(engine.path.with_name(name)) for name in engine.sha256]
        self._kv = dict(pair_kv([t.name for t in engine.inputs], [t.name for t in engine.outputs]))
        self._limits = {
            role: max(engine.largest(profile, role) for profile in engine.profiles)
            for role in ("batch", "tokens", "past", "total")
        }
        self._inputs = {t.name: device.empty(t.nbytes(self._limits)) for t in engine.inputs if t.name not in self._kv}
        self._dtypes = {t.name: np.dtype(t.dtype) for t in engine.inputs if t.name in self._inputs}
        outputs = {t.name: t for t in engine.outputs}
        self._in_place = bool(self._kv) and _aliased(self._plans[0].cuda_engine, self._kv) == set(self._kv)
        self._sets = [
            {past: device.empty(outputs[present].nbytes(self._limits)) for past, present in self._kv.items()}
            for _ in range(1 if self._in_place else 2)
        ]
        # the sizes that some input has: calls that agree in them have the same shapes
        self._roles = [role for role in self._limits if any(role in t.dims for t in engine.inputs)]
        self._other: dict[str, Any] = {}  # output buffers outside the cache, grown on demand: logits can be huge
        self._epoch = self._step = 0

    def new_cache(self, batch: int, length: int = 0) -> NvCache:
        self._profile(batch, 1, length)  # refuses what no profile can continue
        self._epoch, self._step = self._epoch + 1, 0
        for buffer in self._sets[0].values():
            self._device.zero(buffer)
        return NvCache(0, batch, length, self._cache_bytes(batch, length), self._epoch, 0)

    def forward(
        self, input_ids: NDArray[np.int64], cache: KVCache, attention_mask: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.float32], NvCache]:
        run, longer = self._prepare(input_ids, cache, attention_mask)
        run()
        logits = next(t for t in self.engine.outputs if t.name == "logits")
        batch, tokens = input_ids.shape
        shape = logits.shape(self._sizes(batch, tokens, cache.length))
        return self._device.download(self._other["logits"], shape, logits.dtype), longer

    def timed_forward(self, input_ids: NDArray[np.int64], cache: KVCache) -> tuple[float, NvCache]:
        run, longer = self._prepare(input_ids, cache)
        return self._device.timed(run), longer

    def profile(
        self, input_ids: NDArray[np.int64], cache: KVCache, repeats: int
    ) -> tuple[dict[str, Any], list[dict[str, float]]]:
        """The layers that the inspector names for this call, and their milliseconds in each of ``repeats`` executions.

        The profiler stays attached and slows later calls down: close the session next.
        """
        run, _ = self._prepare(input_ids, cache)
        run()  # binds the shapes
        batch, tokens = input_ids.shape
        plan, _ = self._profile(batch, tokens, cache.length)
        layers = layer_information(self._trt, plan.cuda_engine, plan.context)
        plan.context.profiler = timer = layer_timer(self._trt)
        runs = []
        for _ in range(repeats):
            timer.milliseconds = {}
            self._enqueue(plan)  # not a replay: a captured graph reports no layers
            self._device.synchronize()
            runs.append(timer.milliseconds)
        return layers, runs

    def close(self) -> None:
        """Frees the engine; keeps the kernels that TensorRT-RTX finished on this machine beside the plan."""
        if hasattr(self._trt, "IRuntimeCache") and self._runtime_cache is not None:
            write_bytes(self._runtime_cache_path, bytes(self._runtime_cache.serialize()))
            self._runtime_cache = None
        self._plans.clear()
        self._inputs.clear()
        self._sets.clear()
        self._other.clear()

    def _open(self, path: Path) -> _Plan:
        trt = self._trt
        cuda_engine = load_plan(trt, self._title, path, self._logger, self._runtime)
        if self.engine.flags["strip_plan"]:
            self._restore_weights(cuda_engine, path)
        if self.engine.flags["weight_streaming"] and hasattr(cuda_engine, "weight_streaming_budget_v2"):
            cuda_engine.weight_streaming_budget_v2 = cuda_engine.get_weight_streaming_automatic_budget()
        context = self._context(cuda_engine)
        if context is None:
            raise RuntimeUnavailableError(
                f"{self._title} cannot create an execution context for {path}.\n{self._logger.text}",
                "Free GPU memory, or build with a smaller --max-batch, --max-tokens or --max-past.",
            )
        return _Plan(cuda_engine, context, self.engine.profiles_of(path.name))

    def _context(self, cuda_engine: Any) -> Any:
        trt = self._trt
        if not hasattr(trt, "IRuntimeCache"):
            return cuda_engine.create_execution_context()
        runtime_config = cuda_engine.create_runtime_config()
        if self._runtime_cache is None:
            self._runtime_cache = runtime_config.create_runtime_cache()
            if self._runtime_cache_path.exists():
                self._runtime_cache.deserialize(self._runtime_cache_path.read_bytes())
        runtime_config.set_runtime_cache(self._runtime_cache)
        runtime_config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        return cuda_engine.create_execution_context(runtime_config)

    @property
    def _runtime_cache_path(self) -> Path:
        return self.engine.sidecar.with_suffix(".runtime_cache")

    def _restore_weights(self, cuda_engine: Any, path: Path) -> None:
        trt = self._trt
        graph = path.parent / self.engine.extra["graph"]
        refitter = trt.Refitter(cuda_engine, self._logger)
        refit_parser = trt.OnnxParserRefitter(refitter, self._logger)
        if not refit_parser.refit_from_file(str(graph)) or not refitter.refit_cuda_engine():
            raise BuildError(
                f"{path} holds no weights, and they cannot be taken from {graph}.",
                "Keep the graph it was built from where it was, or build without --strip-plan.",
                log=self._logger.text,
            )

    def _prepare(
        self, input_ids: NDArray[np.int64], cache: KVCache, attention_mask: NDArray[np.int64] | None = None
    ) -> tuple[Callable[[], None], NvCache]:
        """Uploads the inputs; returns what enqueues the call, and the cache after it."""
        if not isinstance(cache, NvCache):
            raise TypeError("a cache belongs to the runtime that made it")
        # a set survives the call that follows it (which writes the other one) and no longer
        if cache.epoch != self._epoch or not self._step - 1 <= cache.step <= self._step:
            raise ValueError("this KV cache was overwritten: a session holds one conversation and its last step")
        batch, tokens = input_ids.shape
        if batch != cache.batch:
            raise ValueError(f"the cache holds {cache.batch} sequences, the call has {batch}")
        sizes = self._sizes(batch, tokens, cache.length)
        plan, index = self._profile(batch, tokens, cache.length)
        feeds = decoder_feeds(input_ids, cache.length, attention_mask)
        for name, buffer in self._inputs.items():
            self._device.upload(buffer, feeds[name].astype(self._dtypes[name]))
        slot = (cache.slot + 1) % len(self._sets)
        self._step = cache.step + 1
        nbytes = self._cache_bytes(batch, sizes["total"])
        longer = NvCache(slot, batch, sizes["total"], nbytes, self._epoch, self._step)
        return lambda: self._run(plan, index, sizes, cache.slot, slot), longer

    def _run(self, plan: _Plan, index: int, sizes: Mapping[str, int], source: int, target: int) -> None:
        key = (index, source, *(sizes[role] for role in self._roles))
        if key != plan.last:
            plan.replay = None
            self._bind(plan, index, sizes, source, target)
            plan.last = key
            self._enqueue(plan)
            return
        if sizes["tokens"] > 1 or hasattr(self._trt, "IRuntimeCache"):  # RTX captures graphs itself
            self._enqueue(plan)
            return
        if plan.replay is None:
            plan.replay = self._device.capture(lambda: self._enqueue(plan))
            self.graph_captures += 1
        started = time.perf_counter_ns()
        plan.replay()
        self.enqueue_seconds = (time.perf_counter_ns() - started) * 1e-9
        self.graph_replays += 1

    def _bind(self, plan: _Plan, index: int, sizes: Mapping[str, int], source: int, target: int) -> None:
        context = plan.context
        if index != plan.active:
            if not context.set_optimization_profile_async(index, self._device.handle):
                raise self._broken(f"profile {plan.profiles[index]} cannot be selected")
            self._device.synchronize()
            plan.active = index
        for tensor in self.engine.inputs:
            if not context.set_input_shape(tensor.name, tensor.shape(sizes)):
                raise self._broken(f"input {tensor.name} refuses shape {tensor.shape(sizes)}")
            buffer = self._sets[source][tensor.name] if tensor.name in self._kv else self._inputs[tensor.name]
            context.set_tensor_address(tensor.name, buffer.data_ptr())
        past_of = {present: past for past, present in self._kv.items()}
        for tensor in self.engine.outputs:
            if tensor.name in past_of:
                buffer = self._sets[target][past_of[tensor.name]]
            else:
                buffer = self._output_buffer(tensor, sizes)
            context.set_tensor_address(tensor.name, buffer.data_ptr())

    def _enqueue(self, plan: _Plan) -> None:
        started = time.perf_counter_ns()
        if not plan.context.execute_async_v3(self._device.handle):
            raise self._broken("execution failed")
        self.enqueue_seconds = (time.perf_counter_ns() - started) * 1e-9

    def _output_buffer(self, tensor: Tensor, sizes: Mapping[str, int]) -> Any:
        needed = tensor.nbytes(sizes)
        if tensor.name not in self._other or self._other[tensor.name].nbytes < needed:
            self._device.synchronize()  # the old buffer may still be written
            for plan in self._plans:  # and other plans and graphs point to it
                plan.last = plan.replay = None
            self._other[tensor.name] = self._device.empty(needed)
        return self._other[tensor.name]

    def _profile(self, batch: int, tokens: int, past: int) -> tuple[_Plan, int]:
        """The plan and profile index for a call: of those that fit, the one with the smallest range of tokens."""
        sizes = self._sizes(batch, tokens, past)
        fitting = [
            (self.engine.largest(name, "tokens"), plan_index, plan.profiles.index(name))
            for name, shapes in self.engine.profiles.items()
            for plan_index, plan in enumerate(self._plans)
            if name in plan.profiles and self._fits(shapes, sizes)
        ]
        capacity = self.engine.extra.get("kv_capacity")
        if not fitting or (capacity is not None and sizes["total"] > capacity):
            held = "" if capacity is None else f", its cache holds {capacity}"
            raise RecipeError(
                f"{self.engine.path.name} has no profile for batch {batch}, {tokens} tokens after {past}.",
                f"Its limits are {self._limits}{held}; build with larger --max-batch, --max-tokens or --max-past.",
            )
        _, plan_index, index = min(fitting)
        return self._plans[plan_index], index

    def _fits(self, shapes: Mapping[str, Any], sizes: Mapping[str, int]) -> bool:
        for tensor in self.engine.inputs:
            if tensor.name in shapes:
                low, _, high = shapes[tensor.name]
                wanted = tensor.shape(sizes)
                if any(not a <= x <= b for a, x, b in zip(low, wanted, high, strict=True)):
                    return False
        return True

    def _sizes(self, batch: int, tokens: int, past: int) -> dict[str, int]:
        return {"batch": batch, "tokens": tokens, "past": past, "total": past + tokens}

    def _cache_bytes(self, batch: int, length: int) -> int:
        sizes = self._sizes(batch, 0, length)
        return sum(t.nbytes(sizes) for t in self.engine.inputs if t.name in self._kv)

    def _broken(self, problem: str) -> RuntimeUnavailableError:
        return RuntimeUnavailableError(
            f"{self._title}, {self.engine.path.name}: {problem}.\n{self._logger.text}", "Build the engine again."
        )


def _aliased(cuda_engine: Any, kv: Mapping[str, str]) -> set[str]:
    """The KV inputs that the engine updates in place; releases before 10.16 know none."""
    if not hasattr(cuda_engine, "get_aliased_input_tensor"):
        return set()
    return {past for past, present in kv.items() if cuda_engine.get_aliased_input_tensor(present) == past}
