"""The graph that surgery.py cuts: a decoder with KV cache whose weights lie in one external file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir


class Decoder:
    """A decoder with KV cache under construction; its weights lie one after the other in ``dense.onnx.data``."""

    def __init__(self, folder: Path, width: int, dtype: ir.DataType) -> None:
        self.folder, self.width, self.dtype = folder, width, dtype
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []
        self.data_bytes = 0

    def op(self, name: str, kind: str, *args: ir.Value, **attributes: Any) -> ir.Value:
        """The output of a new node, called like the node."""
        converted = [ir.convenience.convert_attribute(k, v) for k, v in attributes.items()]
        self.nodes.append(ir.Node("", kind, list(args), converted, name=name))
        self.nodes[-1].outputs[0].name = name
        return self.nodes[-1].outputs[0]

    def weight(self, name: str, *shape: int) -> ir.Value:
        """A new initializer behind the weights so far."""
        length = self.dtype.bitwidth // 8 * math.prod(shape)
        tensor = ir.ExternalTensor(
            "dense.onnx.data",
            self.data_bytes,
            length,
            self.dtype,
            shape=ir.Shape(shape),
            name=name,
            base_dir=self.folder,
        )
        self.data_bytes += length
        type_ = ir.TensorType(self.dtype)
        self.weights.append(ir.Value(name=name, shape=ir.Shape(shape), type=type_, const_value=tensor))
        return self.weights[-1]

    def declare(self, value: ir.Value, *shape: str | int) -> ir.Value:
        """Gives ``value`` the decoder's type and ``shape``."""
        value.type, value.shape = ir.TensorType(self.dtype), ir.Shape(shape)
        return value

    def block(self, k: int, x: ir.Value, inner: int) -> ir.Value:
        """Block ``k`` with stream ``x`` (b, t, width): attention, then an MLP of size ``inner``."""
        width, op, weight = self.width, self.op, self.weight
        a = op(f"n{k}", "LayerNormalization", x, weight(f"g{k}", width))
        keys, values = self.cache(k, "key", a), self.cache(k, "value", a)
        query = op(f"q{k}", "MatMul", a, weight(f"wq{k}", width, width))
        turned = op(f"kt{k}", "Transpose", keys, perm=[0, 2, 1])
        scores = op(f"s{k}", "Softmax", op(f"qk{k}", "MatMul", query, turned), axis=-1)
        mixed = op(f"o{k}", "MatMul", op(f"pv{k}", "MatMul", scores, values), weight(f"wo{k}", width, width))
        middle = op(f"m{k}", "Add", x, mixed)
        normed = op(f"nm{k}", "LayerNormalization", middle, weight(f"gm{k}", width))
        gate = op(f"ga{k}", "Sigmoid", op(f"u{k}", "MatMul", normed, weight(f"wu{k}", width, inner)))
        down = op(f"d{k}", "MatMul", gate, weight(f"wd{k}", inner, width))
        return self.declare(op(f"h_{k}", "Add", middle, down), "b", "t", width)

    def cache(self, k: int, role: str, a: ir.Value) -> ir.Value:
        """Keys or values of block ``k``, old and new (b, s, width)."""
        past = self.declare(ir.Value(name=f"past_key_values.{k}.{role}"), "b", "p", self.width)
        self.inputs.append(past)
        new = self.op(f"{role}{k}", "MatMul", a, self.weight(f"w{role}{k}", self.width, self.width))
        present = self.op(f"present.{k}.{role}", "Concat", past, new, axis=1)
        self.outputs.append(self.declare(present, "b", "s", self.width))
        return present


def decoder(folder: Path, blocks: int, width: int, inner: int, vocabulary: int, *, sparse: bool) -> Path:
    """Writes a decoder whose weights lie in one external file (sparse: float16, holes instead of numbers)."""
    built = Decoder(folder, width, ir.DataType.FLOAT16 if sparse else ir.DataType.FLOAT)
    ids = ir.Value(name="input_ids", shape=ir.Shape(["b", "t"]), type=ir.TensorType(ir.DataType.INT64))
    built.inputs.append(ids)
    x = built.op("h_-1", "Gather", built.weight("embed", vocabulary, width), ids)
    for k in range(blocks):
        x = built.block(k, x, inner)
    logits = built.op("logits", "MatMul", x, built.weight("head", width, vocabulary))
    built.outputs.insert(0, built.declare(logits, "b", "t", vocabulary))
    graph = ir.Graph(
        built.inputs,
        built.outputs,
        nodes=built.nodes,
        initializers=built.weights,
        opset_imports={"": 20},
        name="g",
    )
    fill(folder / "dense.onnx.data", built.data_bytes, sparse)
    path = folder / "dense.onnx"
    ir.save(ir.Model(graph, ir_version=10), path)
    return path


def fill(path: Path, size: int, sparse: bool) -> None:
    """Writes ``size`` bytes: random numbers, one MiB of them over and over, or a hole."""
    with path.open("wb") as file:
        if sparse:
            file.truncate(size)
            return
        numbers = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32).tobytes()
        for _ in range(size // len(numbers)):
            file.write(numbers)
        file.write(b"\0" * (size % len(numbers)))
