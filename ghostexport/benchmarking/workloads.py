"""The workloads: what one visit of a session runs and which raw samples it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ghostexport.benchmarking.statistics import inter_token_latency
from ghostexport.recipe import BenchSection
from ghostexport.runtimes.base import EngineFile, KVCache, Session

Kind = Literal["prefill", "decode", "request"]
#: A clock in nanoseconds: ``time.perf_counter_ns``, or a test's.
Clock = Callable[[], int]
TokenIds = NDArray[np.int64]

#: Metrics of each kind: name -> unit. Times are what a user waits for; all are "less is better" but tokens_per_second.
METRICS: dict[Kind, dict[str, str]] = {
    "prefill": {"seconds": "s"},
    "decode": {"seconds": "s"},
    "request": {"ttft": "s", "itl": "s", "latency": "s"},
}


@dataclass(frozen=True)
class Workload:
    """One cell of the grid.

    Attributes:
        kind: ``prefill`` (``tokens`` at once into an empty cache), ``decode`` (a single token after ``past``,
            ``steps`` times over), ``request`` (a prompt of ``tokens``, then greedy generation of ``steps`` tokens).
        batch, tokens, past, steps: sizes.
    """

    kind: Kind
    batch: int = 1
    tokens: int = 1
    past: int = 0
    steps: int = 1

    @property
    def name(self) -> str:
        """Stable and readable: ``prefill-b1-t256``, ``decode-b1-p512``, ``request-b1-t64-g16``."""
        sizes = {
            "prefill": f"t{self.tokens}",
            "decode": f"p{self.past}",
            "request": f"t{self.tokens}-g{self.steps}",
        }
        return f"{self.kind}-b{self.batch}-{sizes[self.kind]}"

    @property
    def tokens_per_visit(self) -> int:
        """Tokens processed in one visit, the prompt and a decode workload's untimed first step included."""
        passes = {"prefill": 1, "decode": self.steps + 1, "request": self.steps}[self.kind]
        return self.batch * (self.tokens + passes - 1)

    def forward_passes(self) -> tuple[tuple[int, int], ...]:
        """``(tokens, past)`` of every forward pass of one visit."""
        if self.kind == "prefill":
            return ((self.tokens, 0),)
        if self.kind == "decode":
            return ((1, self.past),) * self.steps
        return ((self.tokens, 0), *((1, self.tokens + step) for step in range(self.steps - 1)))

    def token_ids(self, vocabulary: int, seed: int) -> TokenIds:
        """Random token ids ``(batch, tokens)``, the same for every variant."""
        return np.random.default_rng(seed).integers(0, vocabulary, (self.batch, self.tokens), dtype=np.int64)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}


def grid(section: BenchSection) -> tuple[Workload, ...]:
    """All workloads of a bench section: prefill and decode over batches x lengths, one request at batch 1."""
    prefill = [Workload("prefill", b, t) for b in section.batches for t in section.prefill_tokens]
    decode = [
        Workload("decode", b, past=p, steps=section.decode_steps) for b in section.batches for p in section.decode_past
    ]
    prompt, generate = section.request
    return (*prefill, *decode, Workload("request", 1, prompt, steps=generate))


def why_not(workload: Workload, engine: EngineFile) -> str | None:
    """The reason why ``workload`` does not fit the optimization profiles of ``engine``; None when it fits."""
    if not engine.profiles:
        return None
    capacity = engine.extra.get("kv_capacity")
    for tokens, past in workload.forward_passes():
        if capacity is not None and past + tokens > capacity:
            return f"the KV cache of {engine.variant} holds {capacity} tokens, not {past + tokens}"
        shapes = {"input_ids": (workload.batch, tokens), "attention_mask": (workload.batch, past + tokens)}
        if not any(_fits(profile, shapes) for profile in engine.profiles.values()):
            return f"no profile of {engine.variant} holds batch {workload.batch}, {tokens} tokens, past {past}"
    return None


def _fits(profile: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    for name, shape in shapes.items():
        if name in profile:
            low, _, high = profile[name]
            if not all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True)):
                return False
    return True


@dataclass(frozen=True)
class Visit:
    """What one visit measured.

    Attributes:
        samples: metric -> raw samples in seconds.
        enqueue: host seconds of each timed forward pass, where the session tells (GPU); else empty.
        cache_bytes: bytes of the KV cache at the end.
    """

    samples: Mapping[str, tuple[float, ...]]
    enqueue: tuple[float, ...]
    cache_bytes: int


def visit(session: Session, workload: Workload, token_ids: TokenIds, clock: Clock) -> Visit:
    """Runs one workload once. Building the start cache is outside the timing.

    Args:
        token_ids: ``(batch, tokens)``.
        clock: host clock, for requests; prefill and decode use the session's own (device events on a GPU).
    """
    if workload.kind == "request":
        return _request(session, workload, token_ids, clock)
    cache = session.new_cache(workload.batch, workload.past)
    if workload.kind == "decode":
        session.timed_forward(token_ids, cache)  # not counted: a GPU binds shapes here and captures its CUDA graph next
    seconds: list[float] = []
    enqueue: list[float] = []
    longer: KVCache = cache
    for _ in range(workload.steps):
        elapsed, longer = session.timed_forward(token_ids, cache)  # always at the same past, so a GPU replays
        seconds.append(elapsed)
        enqueue += _enqueue_seconds(session)
    return Visit({"seconds": tuple(seconds)}, tuple(enqueue), longer.nbytes)


def _request(session: Session, workload: Workload, prompt: TokenIds, clock: Clock) -> Visit:
    # Greedy generation as a user runs it: logits come to the host, the next token is chosen there.
    cache: KVCache = session.new_cache(workload.batch)
    token_ids = prompt
    arrivals = []
    start = clock()
    for _ in range(workload.steps):
        logits, cache = session.forward(token_ids, cache)
        token_ids = logits[:, -1:].argmax(axis=-1).astype(np.int64)  # (B, 1)
        arrivals.append((clock() - start) * 1e-9)
    itl = inter_token_latency(arrivals)
    samples = {"ttft": (arrivals[0],), "itl": (itl,), "latency": (arrivals[-1],)}
    return Visit(samples, (), cache.nbytes)


def _enqueue_seconds(session: Session) -> tuple[float, ...]:
    """Host time of the last timed forward, from sessions that measure it (``enqueue_seconds``); a CPU has none."""
    value = getattr(session, "enqueue_seconds", None)
    return () if value is None else (float(value),)
