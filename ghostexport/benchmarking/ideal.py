"""What the arithmetic allows: ideal speed-ups from bytes and FLOPs, and utilisation of the measured ceilings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ghostexport.benchmarking.workloads import Workload


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
    """The best this device does, measured by :func:`~ghostexport.benchmarking.ceilings.measure_ceilings`.

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
