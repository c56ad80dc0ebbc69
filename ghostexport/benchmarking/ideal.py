"""What the arithmetic allows: facts of a variant from its graph, ceilings of the device, and ideal speed-ups."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ghostexport.benchmarking.workloads import Workload
from ghostexport.kv_names import parse_kv_name
from ghostexport.quantization.forms import UNPACK, UNPACK_MX
from ghostexport.runtimes.interface import load_graph, read_interface


@dataclass(frozen=True)
class VariantFacts:
    """What is known of a variant before it runs.

    Attributes:
        blocks: decoder blocks left.
        parameters: parameters, operator included.
        weight_bytes: bytes of all weights in the engine's dtype.
        kv_bytes_per_token: KV cache bytes of one token.
        flops_per_token: FLOPs of the linear layers for one token (2 per weight that multiplies).
        attention_flops: FLOPs of attention for one (query, key) pair, over all blocks (4 x heads x head size x blocks).
        gathered_bytes: of ``weight_bytes``, those looked up and not streamed (an untied embedding table).
        operator_parameters: parameters of the recovery operators.
        dtype: of the graph.
    """

    blocks: int
    parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    flops_per_token: int
    attention_flops: int = 0
    gathered_bytes: int = 0
    operator_parameters: int = 0
    dtype: str = "float32"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Ceilings:
    """The best this device does, measured by :func:`~ghostexport.benchmarking.ideal.measure_ceilings`.

    Attributes:
        bytes_per_second: read bandwidth of a matrix-vector product far larger than the caches.
        flops_per_second: of a large matrix product in ``dtype``.
        dtype: of both.
        method: one line, for the card.
    """

    bytes_per_second: float
    flops_per_second: float
    dtype: str
    method: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def moved_bytes(workload: Workload, facts: VariantFacts) -> float:
    """Bytes one visit must read: the weights once per forward pass and the KV cache of every sequence."""
    return _read(workload.forward_passes(), workload.batch, facts)


def _read(passes: Sequence[tuple[int, int]], batch: int, facts: VariantFacts) -> float:
    streamed = facts.weight_bytes - facts.gathered_bytes
    return float(sum(streamed + batch * past * facts.kv_bytes_per_token for _, past in passes))


def flops(workload: Workload, facts: VariantFacts) -> float:
    """FLOPs of one visit: linear layers, and attention over causal (query, key) pairs."""
    total = 0
    for tokens, past in workload.forward_passes():
        pairs = tokens * past + tokens * (tokens + 1) // 2
        total += workload.batch * (tokens * facts.flops_per_token + pairs * facts.attention_flops)
    return float(total)


def roofline_seconds(workload: Workload, facts: VariantFacts, ceilings: Ceilings) -> float:
    """Least time of one visit: per forward pass the longer of moving its bytes and doing its FLOPs."""
    total = 0.0
    for tokens, past in workload.forward_passes():
        one = (
            Workload("prefill", workload.batch, tokens)
            if past == 0
            else Workload("decode", workload.batch, tokens, past)
        )
        moving = moved_bytes(one, facts) / ceilings.bytes_per_second
        total += max(moving, flops(one, facts) / ceilings.flops_per_second)
    return total


def ideal_speedup(
    workload: Workload, metric: str, facts: VariantFacts, dense: VariantFacts, ceilings: Ceilings | None
) -> float | None:
    """Speed-up over dense that the arithmetic allows: FLOPs ratio (prefill, TTFT), bytes ratio (decode, ITL).

    A request's latency mixes both, so it needs the ceilings: the ratio of the roofline times. None without them.
    """
    if workload.kind == "prefill":
        return flops(workload, dense) / flops(workload, facts)
    if workload.kind == "decode":
        return moved_bytes(workload, dense) / moved_bytes(workload, facts)
    if metric == "ttft":
        return ideal_speedup(Workload("prefill", workload.batch, workload.tokens), "seconds", facts, dense, ceilings)
    if metric == "itl":
        steps = workload.forward_passes()[1:]
        return _read(steps, workload.batch, dense) / _read(steps, workload.batch, facts)
    if ceilings is None:
        return None
    return roofline_seconds(workload, dense, ceilings) / roofline_seconds(workload, facts, ceilings)


def utilisation(
    workload: Workload, seconds_per_pass: float, facts: VariantFacts, ceilings: Ceilings | None
) -> Mapping[str, float]:
    """MBU (decode) or MFU (prefill): achieved bytes or FLOPs per second over the ceiling; empty where unknown.

    Args:
        seconds_per_pass: median of one forward pass.
    """
    if ceilings is None or workload.kind == "request":
        return {}
    per_pass = seconds_per_pass * len(workload.forward_passes())
    if workload.kind == "decode":
        return {"mbu": moved_bytes(workload, facts) / per_pass / ceilings.bytes_per_second}
    return {"mfu": flops(workload, facts) / per_pass / ceilings.flops_per_second}


#: Nodes between an initializer and the product that uses it.
_PASSED_THROUGH = {"Transpose", "Cast", "Identity", UNPACK, UNPACK_MX}
_PRODUCTS = {"MatMul", "Gemm", "MatMulNBits", "FusedMatMul"}
#: Buffers that exporters store among the initializers; they are not parameters.
_BUFFERS = ("inv_freq", "position_ids")


def read_facts(graph: Path, blocks: int | None = None, query_heads: int | None = None) -> VariantFacts:
    """Facts of one variant, from its ONNX graph.

    Args:
        graph: the variant's graph (not the runtime's optimised one).
        blocks: decoder blocks left; None for as many as have a KV cache.
        query_heads: query heads of a block, for attention's FLOPs; None leaves attention out.

    Raises:
        BuildError: the graph is not a readable decoder.
    """
    interface = read_interface(graph)
    proto = load_graph(graph).graph
    unpack = [node for node in proto.node if node.op_type in (UNPACK, UNPACK_MX)]
    scaled_by = {name for node in unpack for name in node.input[1:]}
    rounded = {node.input[0] for node in unpack if node.output[0] not in scaled_by}  # not the scales of NVFP4
    scales = {name for node in unpack for name in node.input} - rounded
    weights = {
        i.name: tuple(i.dims)
        for i in proto.initializer
        if i.name in rounded or (ir.DataType(i.data_type).is_floating_point() and i.name not in scales)
    }
    sizes = {name: math.prod(dims) for name, dims in weights.items() if not name.endswith(_BUFFERS) and dims}
    itemsize = {i.name: ir.DataType(i.data_type).itemsize for i in proto.initializer}
    multiplied = _multiplied(proto, weights)
    looked_up = {node.input[0] for node in proto.node if node.op_type == "Gather"} & sizes.keys()
    caches = {t.name: name for t in interface.inputs if (name := parse_kv_name(t.name))}
    kv = [t for t in interface.inputs if t.name in caches and not caches[t.name].is_state]
    numbers = sum(math.prod(d for d in t.dims if isinstance(d, int)) for t in kv)
    blocks = len({name.block for name in caches.values()}) if blocks is None else blocks
    head_size = next((t.dims[-1] for t in kv if isinstance(t.dims[-1], int)), 0)
    return VariantFacts(
        blocks=blocks,
        parameters=sum(sizes.values()),
        weight_bytes=interface.weight_bytes,
        kv_bytes_per_token=numbers * (2 if "16" in interface.dtype else 4),
        flops_per_token=2 * sum(math.prod(weights[name]) for name in multiplied),
        attention_flops=4 * blocks * (query_heads or 0) * int(head_size),
        gathered_bytes=sum(sizes[n] * itemsize[n] for n in looked_up if n not in set(multiplied)),
        operator_parameters=sum(size for name, size in sizes.items() if name.startswith("ghost.")),
        dtype=interface.dtype,
    )


def _multiplied(graph: Any, weights: dict[str, tuple[int, ...]]) -> list[str]:
    """Names of the matrices that a product uses, once per product."""
    source = {}
    for node in graph.node:
        if node.op_type in _PASSED_THROUGH:
            source[node.output[0]] = node.input[0]
    found = []
    for node in graph.node:
        if node.op_type in _PRODUCTS:
            for name in node.input[:2]:
                while name in source:
                    name = source[name]
                if len(weights.get(name, ())) >= 2:
                    found.append(name)
    return found


#: Bytes of the matrix read for the bandwidth: far beyond any last-level cache of an edge board or desktop.
READ_BYTES = 256 << 20
#: Side of the square matrix product.
SIDE = 2048
_COLUMNS = 4096
BEST_OF = 5


def measure_ceilings(device: str = "cpu", dtype: str = "float32", *, read_bytes: int = READ_BYTES) -> Ceilings | None:
    """Best of a few matrix-vector products (bytes/s) and matrix products (FLOP/s) on ``device``.

    The two are what decode and prefill do at best. With PyTorch, whose threads are the physical cores, as ONNX
    Runtime's; without it NumPy measures a CPU in float32, and nothing a GPU (None).
    """
    try:
        import torch
    except ImportError:
        if device != "cpu" or dtype != "float32":
            return None
        library: Any = np
        who, place = f"numpy {np.__version__} on cpu", {}
    else:
        library, place = torch, {"device": device}
        who = f"torch {torch.__version__} on {device}, {torch.get_num_threads()} threads"
    kind = getattr(library, dtype)
    rows = read_bytes // np.dtype("float32" if dtype == "float32" else "float16").itemsize // _COLUMNS
    matrix, vector = library.zeros((rows, _COLUMNS), dtype=kind, **place), library.ones(_COLUMNS, dtype=kind, **place)
    square = library.ones((SIDE, SIDE), dtype=kind, **place)
    return Ceilings(
        bytes_per_second=matrix.nbytes / _best(lambda: matrix @ vector, device),
        flops_per_second=2 * SIDE**3 / _best(lambda: square @ square, device),
        dtype=dtype,
        method=f"best of {BEST_OF}: {read_bytes >> 20} MiB matrix-vector product, {SIDE}^3 matrix product, {who}",
    )


def _best(run: Callable[[], Any], device: str) -> float:
    def seconds() -> float:
        start = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - start) * 1e-9

    if device.startswith("cuda"):
        import torch

        compute, run = run, lambda: (compute(), torch.cuda.synchronize(device))  # type: ignore[func-returns-value]
    seconds()  # warm-up: allocation, kernel selection
    return min(seconds() for _ in range(BEST_OF))
