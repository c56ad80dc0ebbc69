"""Graphs for the runtime tests, exported and cut by the real stages, once per test process."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.surgery import operate
from tests.exports import exported
from tests.tiny import tiny

BLOCKS = 3
HIDDEN = 64


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="ghostexport-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def model(dtype: str = "float32", **overrides: Any) -> Any:
    """A tiny llama of three blocks, GQA 4/2, hidden size 64."""
    return tiny("llama", num_hidden_layers=BLOCKS, **overrides).to(getattr(torch, dtype))


def dense_graph(dtype: str = "float32", opset: int = 20) -> Path:
    """The exported model, in a folder of its own so that variants can be cut beside it."""
    return _dense_graph(dtype, opset)


@cache
def _dense_graph(dtype: str, opset: int) -> Path:
    folder = _folder() / f"{dtype}-{opset}"
    folder.mkdir(exist_ok=True)
    source = exported("llama", dtype, opset, num_hidden_layers=BLOCKS).path
    for name in ("dense.onnx", "dense.onnx.data"):
        shutil.copyfile(source.with_name(name), folder / name)
    return folder / "dense.onnx"


def operators(name: str = "ghost", seed: int = 0, spans: tuple[tuple[int, int], ...] = ((1, 2),)) -> OperatorSet:
    """Random operators in the form the named variant has: dense, dense with bias (affine), or diagonal."""
    rng = np.random.default_rng(seed)
    plan = PrunePlan.from_spans(BLOCKS, spans)
    made = []
    for boundary in plan.boundaries:
        delta = (0.3 * rng.standard_normal((HIDDEN, HIDDEN)) / HIDDEN**0.5).astype(np.float32)
        bias = (0.1 * rng.standard_normal(HIDDEN)).astype(np.float32) if name == "affine" else None
        if name == "linearpatch-diag":
            made.append(Operator(boundary, name, diagonal=np.diag(delta).copy()))
        else:
            made.append(Operator(boundary, name, delta=delta, bias=bias))
    return OperatorSet(name, tuple(made), plan)


def variant_graph(
    name: str, dtype: str = "float32", opset: int = 20, spans: tuple[tuple[int, int], ...] = ((1, 2),)
) -> Path:
    """``pruned`` or an operator's name: the graph cut (and repaired) beside the dense one."""
    return _variant_graph(name, dtype, opset, spans)


@cache
def _variant_graph(name: str, dtype: str, opset: int, spans: tuple[tuple[int, int], ...]) -> Path:
    dense = dense_graph(dtype, opset)
    path = dense.with_name(f"{name}{len(spans) if len(spans) > 1 else ''}.onnx")
    operate(dense, PrunePlan.from_spans(BLOCKS, spans), None if name == "pruned" else operators(name, 0, spans), path)
    return path
