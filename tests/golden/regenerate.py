"""The reviewed text graphs: which fixtures they show, and which cut."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx_ir as ir

from ghostexport.plan import PrunePlan
from ghostexport.surgery import operate
from tests.golden.graph_text import graph_text
from tests.surgery_cases import dense_operators

FIXTURES = Path(__file__).parent.parent / "fixtures"
#: folder under graphs/ -> fixture
GOLDEN = {
    "transformers": "transformers-llama",
    "optimum": "optimum-llama",
    "genai": "genai-llama-fp32",
    "edge-llm": "edge-llm-llama",
    "torch": "torch-llama-no-cache",
}
PLAN = PrunePlan.from_spans(6, [(1, 2), (3, 5)])
VARIANTS = ("dense", "pruned", "linearpatch", "ghost")


def golden_texts(producer: str) -> dict[str, str]:
    """Text of the four variants of one producer's graph: dense, bare cut, and two operators of the same shape."""
    source = FIXTURES / GOLDEN[producer] / "model.onnx"
    texts = {"dense": graph_text(ir.load(source))}
    with tempfile.TemporaryDirectory() as folder:
        for variant in VARIANTS[1:]:
            operators = None if variant == "pruned" else dense_operators(PLAN, 32, bias=False)
            path = Path(folder) / f"{variant}.onnx"
            operate(source, PLAN, operators, path)
            texts[variant] = graph_text(ir.load(path))
    return texts


def write_golden(folder: Path) -> None:
    """Writes ``<folder>/<producer>/<variant>.txt`` for every producer whose fixture is there."""
    for producer, fixture in GOLDEN.items():
        if (FIXTURES / fixture / "model.onnx").exists():
            for variant, text in golden_texts(producer).items():
                target = folder / producer / f"{variant}.txt"
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
