"""Plans and operators that every surgery fixture is put through."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from tests.golden.graph_text import graph_text

#: name -> removed spans of a 6-block model
SPANS: dict[str, list[tuple[int, int]]] = {
    "first": [(0, 2)],
    "middle": [(2, 4)],
    "last": [(4, 6)],
    "two": [(1, 2), (3, 5)],
    "all-but-one": [(0, 3), (4, 6)],
}


def plan_of(name: str, num_blocks: int = 6) -> PrunePlan:
    return PrunePlan.from_spans(num_blocks, SPANS[name])


def dense_operators(plan: PrunePlan, hidden_size: int, *, bias: bool = True, seed: int = 3) -> OperatorSet:
    """A random operator per boundary, large enough that a missing or misplaced one cannot pass."""
    generator = np.random.default_rng(seed)
    operators = tuple(
        Operator(
            boundary,
            "ghost",
            delta=(0.5 * generator.standard_normal((hidden_size, hidden_size)) / hidden_size**0.5).astype(np.float32),
            bias=(0.3 * generator.standard_normal(hidden_size)).astype(np.float32) if bias else None,
        )
        for boundary in plan.boundaries
    )
    return OperatorSet("ghost", operators, plan)


def same_graph(a: Path, b: Path) -> bool:
    """Equal nodes, names and records of surgery, whatever the order of nodes and the place of weights."""
    x, y = ir.load(a), ir.load(b)
    lines = [sorted(graph_text(model).splitlines()) for model in (x, y)]
    return lines[0] == lines[1] and x.metadata_props == y.metadata_props


#: Sizes of the fixture models: every fixture stays far below 1 MB.
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
_SMALL_GQA = _SMALL | {"head_dim": 8}
_FUSED = {"head_dim": 16}  # ONNX Runtime's GroupQueryAttention takes multiples of 16


@dataclass(frozen=True)
class Fixture:
    """One exported tiny model under ``tests/fixtures/<name>/``.

    Attributes:
        model: name in :data:`tests.tiny.CONFIGS`.
        producer: who exports it, in which way.
        dtype: of its weights.
        standard: only ONNX operators, so TensorRT can parse it.
        tolerance: largest relative difference of logits to the PyTorch model.
    """

    model: str
    producer: str
    dtype: str = "float32"
    standard: bool = True
    tolerance: float = 1e-5


FIXTURES: dict[str, Fixture] = {
    "transformers-llama": Fixture("llama", "transformers"),
    "transformers-llama-tied": Fixture("llama-tied", "transformers"),
    "transformers-llama-opset23": Fixture("llama", "transformers opset 23"),
    "transformers-qwen3": Fixture("qwen3", "transformers"),
    "transformers-gemma3": Fixture("gemma3", "transformers"),
    "transformers-gpt-neox": Fixture("gpt-neox", "transformers"),
    "transformers-phi": Fixture("phi", "transformers"),
    "transformers-llama-ort-fused": Fixture("llama", "transformers ort_fusions=cuda", standard=False),
    "optimum-llama": Fixture("llama", "optimum"),
    "genai-llama-fp32": Fixture("llama", "genai fp32", standard=False),
    "genai-llama-fp16": Fixture("llama", "genai fp16", "float16", standard=False, tolerance=2e-2),
    "genai-llama-int4": Fixture("llama", "genai int4", standard=False),
    "edge-llm-llama": Fixture("llama", "edge-llm", "float16", standard=False, tolerance=2e-2),
    "torch-llama-no-cache": Fixture("llama", "torch"),
}


def fixture_model(name: str) -> Any:
    """The PyTorch model a fixture was exported from: the same seed gives the same weights."""
    from tests.tiny import tiny

    fixture = FIXTURES[name]
    sizes = _SMALL if fixture.model in ("gpt-neox", "phi") else _SMALL_GQA
    return tiny(fixture.model, **(sizes if fixture.standard else sizes | _FUSED))
