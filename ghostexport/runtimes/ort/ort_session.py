"""A session on ONNX Runtime: IO binding, KV cache as OrtValues on the provider's device."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ghostexport.errors import RuntimeUnavailableError
from ghostexport.kv_names import pair_kv
from ghostexport.runtimes.base import KVCache, Tensor
from ghostexport.runtimes.interface import decoder_feeds

_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16


@dataclass(frozen=True)
class OrtCache:
    """KV values by input name, each ``[batch, heads, length, head_dim]`` (or as the graph lays them out)."""

    values: Mapping[str, Any]
    length: int

    @property
    def nbytes(self) -> int:
        return sum(int(value.tensor_size_in_bytes()) for value in self.values.values())


class OrtSession:
    """See :class:`ghostexport.runtimes.base.Session`: an engine, or an exported graph as it is.

    Attributes:
        provider: the one that runs it, in our spelling.
        kv: ``(past input, present output)`` names.

    Raises:
        RuntimeUnavailableError: the graph takes more than token ids, a mask and positions.
    """

    clock = "perf_counter_ns"

    def __init__(
        self, ort: Any, session: Any, path: Path, inputs: Sequence[Tensor], outputs: Sequence[Tensor], provider: str
    ) -> None:
        self.provider = provider
        self._ort = ort
        self._session = session
        self._device = "cpu" if provider == "cpu" else "cuda"
        self._outputs = [t.name for t in outputs]
        self.kv = pair_kv([t.name for t in inputs], self._outputs)
        past = {name for name, _ in self.kv}
        self._past = [t for t in inputs if t.name in past]
        self._plain = [t.name for t in inputs if t.name not in past]
        unknown = set(self._plain) - {"input_ids", "attention_mask", "position_ids"}
        if unknown or "input_ids" not in self._plain:
            raise RuntimeUnavailableError(
                f"{path} takes {', '.join(self._plain)}; only token-id decoders can be run here.",
                "Run it with its own runtime.",
            )

    def new_cache(self, batch: int, length: int = 0) -> OrtCache:
        return OrtCache({t.name: self._zeros(t, {"batch": batch, "past": length}) for t in self._past}, length)

    def forward(
        self, input_ids: NDArray[np.int64], cache: KVCache, attention_mask: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.float32], OrtCache]:
        values, longer = self._run(input_ids, cache, attention_mask, "cpu")
        return _numpy(values["logits"]), longer

    def outputs(
        self, input_ids: NDArray[np.int64], cache: KVCache, attention_mask: NDArray[np.int64] | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], OrtCache]:
        """As :meth:`forward` on the CPU provider, with every output of the graph by name, as float32."""
        values, longer = self._run(input_ids, cache, attention_mask, "cpu")
        return {name: _numpy(value) for name, value in values.items()}, longer

    def timed_forward(self, input_ids: NDArray[np.int64], cache: KVCache) -> tuple[float, OrtCache]:
        started = time.perf_counter_ns()
        _, longer = self._run(input_ids, cache, None, self._device)
        return (time.perf_counter_ns() - started) / 1e9, longer

    def close(self) -> None:
        self._session = None

    def _run(
        self, input_ids: NDArray[np.int64], cache: KVCache, attention_mask: NDArray[np.int64] | None, logits_device: str
    ) -> tuple[dict[str, Any], OrtCache]:
        if not isinstance(cache, OrtCache):
            raise TypeError("a cache belongs to the runtime that made it")
        feeds = decoder_feeds(input_ids, cache.length, attention_mask)
        binding = self._session.io_binding()
        for name in self._plain:
            binding.bind_cpu_input(name, np.ascontiguousarray(feeds[name], np.int64))
        for name, value in cache.values.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._outputs:
            binding.bind_output(name, logits_device if name == "logits" else self._device)
        self._session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        outputs = dict(zip(self._outputs, binding.get_outputs(), strict=True))
        length = cache.length + input_ids.shape[1]
        return outputs, OrtCache({past: outputs[present] for past, present in self.kv}, length)

    def _zeros(self, tensor: Tensor, sizes: Mapping[str, int]) -> Any:
        shape = [d if isinstance(d, int) else sizes[d] for d in tensor.dims]
        if tensor.dtype == "bfloat16":  # NumPy arrays carry it as uint16; ONNX Runtime moves it to the device itself
            return self._ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(shape, np.uint16), _BFLOAT16)
        return self._ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, tensor.dtype), self._device, 0)


def _numpy(value: Any) -> NDArray[np.float32]:
    """A host value as float32."""
    if value.data_type() != "tensor(bfloat16)":
        return np.asarray(value.numpy(), np.float32)
    # NumPy has no bfloat16; its 16 bits are the upper half of a float32
    shape = value.shape()
    bits = (ctypes.c_uint16 * math.prod(shape)).from_address(value.data_ptr())
    return (np.frombuffer(bits, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
