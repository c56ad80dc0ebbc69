"""Toy decoders written node by node, in many dialects, and the same computed with NumPy.

One head, no mask, no rotary embedding, width ``C = 8``: small enough to check by hand, complete enough to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (NumPy learns the names of 8-bit floats)
import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from ghostexport.operators import OperatorSet
from ghostexport.plan import PrunePlan

C, VOCABULARY = 8, 20


@dataclass(frozen=True)
class Toy:
    """What to build.

    Attributes:
        blocks: number of decoder blocks.
        parallel: attention and MLP read the same stream and are added in one sum.
        cache: KV inputs and outputs; the first block's number is ``first``.
        rank: 3 ``(B, T, C)``, or 2 for a token-major stream ``(T, C)``.
        embeds: the embedding is outside the graph (input ``inputs_embeds``).
        casts: an identity Cast after every sum, which all consumers read.
        qdq: weights are stored as this dtype (``int8``, ``float8_e4m3fn``) with DequantizeLinear.
        positions: a second lookup by position is added to the embedding.
        function: every block is a call of a function.
        plugin: attention is one opaque operator with a packed, aliased cache, as TensorRT Edge-LLM writes it.
        skip: LayerNorm with bias, fused with the sum before it (``SkipLayerNormalization``); the last sum is plain.
        epsilon: of all norms.
        masks: attention adds a mask of zeros whose length is read off a cache: even blocks one read off block 0's,
            odd blocks one read off block 1's, whose caches may be of another length.
        flaw: ``unet``, ``shared_kv``, ``per_layer_embedding``, ``deepstack``, ``tap`` or none.
    """

    blocks: int = 4
    parallel: bool = False
    cache: bool = True
    first: int = 0
    rank: int = 3
    embeds: bool = False
    casts: bool = False
    qdq: str = ""
    positions: bool = False
    function: bool = False
    plugin: bool = False
    skip: bool = False
    epsilon: float = 1e-6
    masks: bool = False
    flaw: str = ""
    seed: int = 0
    kv: tuple[str, str, str, str] = (
        "past_key_values.{}.key",
        "past_key_values.{}.value",
        "present.{}.key",
        "present.{}.value",
    )


class Builder:
    """Appends nodes to a list; names are meaningless on purpose."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self.weights: dict[str, ir.Value] = {}
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []

    def op(
        self, kind: str, *inputs: ir.Value | None, domain: str = "", outputs: int = 1, **attributes: Any
    ) -> ir.Value:
        converted = [ir.convenience.convert_attribute(key, value) for key, value in attributes.items()]
        node = ir.Node(domain, kind, list(inputs), converted, num_outputs=outputs, name=f"n{len(self.nodes)}")
        for i, value in enumerate(node.outputs):
            value.name = f"v{len(self.nodes)}_{i}"
        self.nodes.append(node)
        return node.outputs[0]

    def weight(self, name: str, array: NDArray[Any]) -> ir.Value:
        if name not in self.weights:
            tensor = ir.Tensor(array, name=name)
            self.weights[name] = ir.Value(
                name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
            )
        return self.weights[name]

    def input(self, name: str, dtype: ir.DataType, dims: Sequence[int | str]) -> ir.Value:
        if known := [value for value in self.inputs if value.name == name]:
            return known[0]
        self.inputs.append(ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(dtype)))
        return self.inputs[-1]

    def output(self, value: ir.Value, name: str, dims: Sequence[int | str]) -> None:
        value.name, value.shape, value.type = name, ir.Shape(dims), ir.TensorType(ir.DataType.FLOAT)
        self.outputs.append(value)

    def model(self) -> ir.Model:
        graph = ir.Graph(
            self.inputs,
            self.outputs,
            nodes=self.nodes,
            initializers=list(self.weights.values()),
            opset_imports={"": 20, "com.microsoft": 1},
            name="toy",
        )
        return ir.Model(graph, ir_version=10, producer_name="toy")


def weights(toy: Toy) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(toy.seed)
    result = {"embed": generator.normal(size=(VOCABULARY, C)), "head": generator.normal(size=(C, VOCABULARY))}
    result["positions"] = generator.normal(size=(64, C))
    result["shift"], result["skip_bias"] = 0.3 * generator.normal(size=(2, C))
    for k in range(toy.blocks):
        for name, shape in (
            ("q", (C, C)),
            ("k", (C, C)),
            ("v", (C, C)),
            ("o", (C, C)),
            ("up", (C, 12)),
            ("down", (12, C)),
        ):
            values = generator.normal(size=shape) / shape[0] ** 0.5
            result[f"{name}{k}"] = _stored(values, toy.qdq).astype(np.float32) / 32 if toy.qdq else values
        result[f"g{k}"], result[f"h{k}"] = 1 + 0.2 * generator.normal(size=(2, C))
    return {name: array.astype(np.float32) for name, array in result.items()}


def _stored(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """32 times the values in a dtype of one byte, scale 1/32."""
    scaled = values * 32
    return np.round(scaled).clip(-127, 127).astype(np.int8) if dtype == "int8" else scaled.astype(np.dtype(dtype))


@dataclass
class _State:
    builder: Builder
    toy: Toy
    arrays: Mapping[str, NDArray[np.float32]]
    keys: list[ir.Value] = field(default_factory=list)
    values: list[ir.Value] = field(default_factory=list)
    streams: list[ir.Value] = field(default_factory=list)
    packed: list[ir.Value] = field(default_factory=list)
    past: bool = True
    branch: ir.Value | None = None
    masks: dict[int, ir.Value] = field(default_factory=dict)


def build(toy: Toy) -> ir.Model:
    """The graph of a toy decoder."""
    b = Builder()
    _decoder(_State(b, toy, weights(toy), past=toy.cache))
    model = b.model()
    if toy.function:
        function = ir.from_proto(onnx.parser.parse_function(BLOCK))
        model.functions[function.identifier()] = function
        model.graph.opset_imports["pkg.toy"] = 1
    return model


def build_merged(toy: Toy) -> ir.Model:
    """One ``If`` with a decoder in each branch, with and without cache, as optimum once merged them."""
    outer = Builder()
    branches = []
    for past in (True, False):
        inner = Builder()
        inner.weights, inner.inputs = outer.weights, outer.inputs
        _decoder(_State(inner, toy, weights(toy), past=past))
        branches.append(ir.Graph([], inner.outputs, nodes=inner.nodes, name="with_past" if past else "no_past"))
    flag = outer.input("use_cache_branch", ir.DataType.BOOL, [1])
    outer.op("If", flag, outputs=len(branches[0].outputs), then_branch=branches[0], else_branch=branches[1])
    for value, twin in zip(outer.nodes[-1].outputs, branches[0].outputs, strict=True):
        assert twin.name is not None and twin.shape is not None
        outer.output(value, twin.name, [d if isinstance(d, int) else str(d.value) for d in twin.shape])
    for branch in branches:
        for value in branch.outputs:
            value.name = f"{branch.name}.{value.name}"
    return outer.model()


def _decoder(s: _State) -> None:
    b, toy = s.builder, s.toy
    lead: list[int | str] = ["tokens"] if toy.rank == 2 else ["batch", "tokens"]
    if toy.embeds:
        x = b.input("inputs_embeds", ir.DataType.FLOAT, [*lead, C])
    else:
        ids = b.input("input_ids", ir.DataType.INT64, lead)
        x = b.op("Gather", b.weight("embed", s.arrays["embed"]), ids)
    if toy.positions:
        positions = b.input("position_ids", ir.DataType.INT64, lead)
        x = b.op("Add", x, b.op("Gather", b.weight("positions", s.arrays["positions"]), positions))
    extra = b.input("visual_embeds", ir.DataType.FLOAT, [*lead, C]) if toy.flaw == "deepstack" else None
    for k in range(toy.blocks):
        s.streams.append(x)
        x = _block(s, x, k)
        if toy.flaw == "per_layer_embedding":
            x = b.op("Add", x, b.op("Gather", b.weight(f"own{k}", s.arrays["embed"]), ids))
        if extra is not None and k == 1:
            x = b.op("Add", x, extra)
        if toy.flaw == "unet" and k == toy.blocks - 1:
            x = b.op("Add", x, s.streams[1])
        if toy.flaw == "tap" and k == 1:
            b.output(b.op("Identity", x), "hidden_states", [*lead, C])
    b.output(b.op("MatMul", x, b.weight("head", s.arrays["head"])), "logits", [*lead, VOCABULARY])
    for k, (key, value) in enumerate(zip(s.keys, s.values, strict=True)):
        if toy.cache:
            dims = [*lead[:-1], "total", C]
            b.output(key, toy.kv[2].format(k + toy.first), dims)
            b.output(value, toy.kv[3].format(k + toy.first), dims)
    for k, present in enumerate(s.packed):
        b.output(present, f"present_key_values_{k}", [2, *lead[:-1], "total", C])


def _block(s: _State, x: ir.Value, k: int) -> ir.Value:
    toy = s.toy
    if toy.function:
        return _call(s, x, k)
    if toy.skip:
        return _skip_block(s, x, k)
    attention = _linear(s, _attention(s, _norm(s, x, f"g{k}"), k), f"o{k}")
    if toy.parallel:
        return _sum(s, _sum(s, attention, _mlp(s, _norm(s, x, f"h{k}"), k), cast=False), x)
    middle = _sum(s, x, attention)
    return _sum(s, middle, _mlp(s, _norm(s, middle, f"h{k}"), k))


BLOCK = """
<opset_import: ["" : 20], domain: "pkg.toy">
Block (x, pk, pv, g, wq, wk, wv, wo, h, up, down, axes, epsilon) => (y, key, value)
{
   xx = Mul (x, x)
   xm = ReduceMean <keepdims = 1> (xx, axes)
   xe = Add (xm, epsilon)
   xr = Sqrt (xe)
   xd = Div (x, xr)
   a = Mul (xd, g)
   q = MatMul (a, wq)
   k = MatMul (a, wk)
   v = MatMul (a, wv)
   key = Concat <axis = -2> (pk, k)
   value = Concat <axis = -2> (pv, v)
   kt = Transpose <perm = [0, 2, 1]> (key)
   s = MatMul (q, kt)
   p = Softmax <axis = -1> (s)
   c = MatMul (p, value)
   o = MatMul (c, wo)
   m = Add (x, o)
   mm = Mul (m, m)
   mn = ReduceMean <keepdims = 1> (mm, axes)
   me = Add (mn, epsilon)
   mr = Sqrt (me)
   md = Div (m, mr)
   n = Mul (md, h)
   u = MatMul (n, up)
   z = Sigmoid (u)
   d = MatMul (z, down)
   y = Add (m, d)
}
"""

PLUGIN = """
<opset_import: ["" : 20], domain: "trt">
AttentionPlugin (q, k, v, past) => (y, present)
{
   zero = Constant <value_ints = [0]> ()
   kv0 = Unsqueeze (k, zero)
   kv1 = Unsqueeze (v, zero)
   kv = Concat <axis = 0> (kv0, kv1)
   present = Concat <axis = 2> (past, kv)
   key2, value2 = Split <axis = 0, num_outputs = 2> (present)
   key = Squeeze (key2, zero)
   value = Squeeze (value2, zero)
   kt = Transpose <perm = [0, 2, 1]> (key)
   s = MatMul (q, kt)
   p = Softmax <axis = -1> (s)
   y = MatMul (p, value)
}
"""


def define_plugin(model: ir.Model) -> None:
    """Gives the opaque attention a body, so that ONNX Runtime can run the graph."""
    function = ir.from_proto(onnx.parser.parse_function(PLUGIN))
    model.functions[function.identifier()] = function
    model.graph.opset_imports["trt"] = 1


def _call(s: _State, x: ir.Value, k: int) -> ir.Value:
    b, toy = s.builder, s.toy
    past = [b.input(toy.kv[i].format(k), ir.DataType.FLOAT, ["batch", "past", C]) for i in (0, 1)]
    names = [f"g{k}", *(f"{n}{k}" for n in ("q", "k", "v", "o")), f"h{k}", f"up{k}", f"down{k}"]
    constants = [b.weight("axes", np.array([-1], np.int64)), b.weight("epsilon", np.array(1e-6, np.float32))]
    arguments = [b.weight(name, s.arrays[name]) for name in names]
    y = b.op("Block", x, *past, *arguments, *constants, domain="pkg.toy", outputs=3)
    s.keys.append(b.nodes[-1].outputs[1])
    s.values.append(b.nodes[-1].outputs[2])
    return y


def _skip_block(s: _State, x: ir.Value, k: int) -> ir.Value:
    """Between blocks the stream is the pair that the next norm adds: ``s.branch`` joins ``x`` there."""
    b = s.builder
    normed, total = _skip_norm(s, x, s.branch, f"g{k}")
    attention = _linear(s, _attention(s, normed, k), f"o{k}")
    normed, middle = _skip_norm(s, total, attention, f"h{k}")
    s.branch = _mlp(s, normed, k)
    return middle if k < s.toy.blocks - 1 else b.op("Add", middle, s.branch)


def _skip_norm(s: _State, x: ir.Value, branch: ir.Value | None, name: str) -> tuple[ir.Value, ir.Value]:
    b = s.builder
    gain, shift = b.weight(name, s.arrays[name]), b.weight("shift", s.arrays["shift"])
    if branch is None:
        return b.op("LayerNormalization", x, gain, shift, axis=-1, epsilon=s.toy.epsilon), x
    bias = b.weight("skip_bias", s.arrays["skip_bias"])
    arguments = (x, branch, gain, shift, bias)
    normed = b.op("SkipLayerNormalization", *arguments, domain="com.microsoft", outputs=4, epsilon=s.toy.epsilon)
    b.nodes[-1].outputs[1].name = b.nodes[-1].outputs[2].name = ""
    return normed, b.nodes[-1].outputs[3]


def _sum(s: _State, a: ir.Value, c: ir.Value, *, cast: bool = True) -> ir.Value:
    total = s.builder.op("Add", a, c)
    return s.builder.op("Cast", total, to=1) if s.toy.casts and cast else total


def _norm(s: _State, x: ir.Value, name: str) -> ir.Value:
    b = s.builder
    axes = b.weight("axes", np.array([-1], np.int64))
    mean = b.op("ReduceMean", b.op("Mul", x, x), axes, keepdims=1)
    root = b.op("Sqrt", b.op("Add", mean, b.weight("epsilon", np.array(s.toy.epsilon, np.float32))))
    return b.op("Mul", b.op("Div", x, root), b.weight(name, s.arrays[name]))


def _attention(s: _State, x: ir.Value, k: int) -> ir.Value:
    b, toy = s.builder, s.toy
    query = _linear(s, x, f"q{k}")
    if toy.plugin:
        past = b.input(f"past_key_values_{k}", ir.DataType.FLOAT, [2, "batch", "past", C])
        key, value = _linear(s, x, f"k{k}"), _linear(s, x, f"v{k}")
        mixed = b.op("AttentionPlugin", query, key, value, past, domain="trt", outputs=2)
        s.packed.append(b.nodes[-1].outputs[1])
        return mixed
    if toy.flaw == "shared_kv" and k >= toy.blocks - 2:
        key, value = s.keys[1], s.values[1]
    else:
        key, value = _linear(s, x, f"k{k}"), _linear(s, x, f"v{k}")
        if s.past:
            dims: list[int | str] = ["past", C] if toy.rank == 2 else ["batch", "past", C]
            past = [b.input(toy.kv[i].format(k + toy.first), ir.DataType.FLOAT, dims) for i in (0, 1)]
            if toy.masks and k < 2:
                s.masks[k] = _mask(s, past[0])
            key, value = b.op("Concat", past[0], key, axis=-2), b.op("Concat", past[1], value, axis=-2)
        s.keys.append(key)
        s.values.append(value)
    scores = b.op("MatMul", query, b.op("Transpose", key, perm=[1, 0] if toy.rank == 2 else [0, 2, 1]))
    if toy.masks:
        scores = b.op("Add", scores, s.masks[k % 2])
    return b.op("MatMul", b.op("Softmax", scores, axis=-1), value)


def _mask(s: _State, past: ir.Value) -> ir.Value:
    """Zeros ``[1, past + tokens]``."""
    b = s.builder
    one = b.weight("one", np.array([1], np.int64))
    ids = b.input("input_ids", ir.DataType.INT64, ["batch", "tokens"])
    lengths = (b.op("Gather", b.op("Shape", value), one) for value in (past, ids))
    return b.op("ConstantOfShape", b.op("Concat", one, b.op("Add", *lengths), axis=0))


def _mlp(s: _State, x: ir.Value, k: int) -> ir.Value:
    return _linear(s, s.builder.op("Sigmoid", _linear(s, x, f"up{k}")), f"down{k}")


def _linear(s: _State, x: ir.Value, name: str) -> ir.Value:
    b = s.builder
    if not s.toy.qdq:
        return b.op("MatMul", x, b.weight(name, s.arrays[name]))
    stored = b.weight(f"{name}.{s.toy.qdq}", _stored(s.arrays[name], s.toy.qdq))
    scale = b.weight(f"{name}.scale", np.array(1 / 32, np.float32))
    return b.op("MatMul", x, b.op("DequantizeLinear", stored, scale))


def compute(
    toy: Toy,
    plan: PrunePlan,
    operators: OperatorSet | None,
    x: NDArray[Any],
    past: Mapping[int, Any],
    changed: Mapping[str, NDArray[Any]] | None = None,
) -> NDArray[np.float64]:
    """Logits of the cut toy decoder, with NumPy in double precision.

    Args:
        x: embeddings ``(B, T, C)`` (or ``(T, C)``) that enter block 0.
        past: dense block -> (key, value) of the cache.
        changed: weights to use instead of the toy's own.
    """
    w = {name: array.astype(np.float64) for name, array in (weights(toy) | dict(changed or {})).items()}
    skip_bias = w["skip_bias"] if toy.skip else 0.0

    def norm(x: NDArray[Any], g: NDArray[Any]) -> NDArray[Any]:
        return _layer_norm(x, g, w["shift"], toy.epsilon) if toy.skip else _rms(x, g, toy.epsilon)

    x = x.astype(np.float64)
    starts = {boundary.span.start: boundary.index for boundary in plan.boundaries}
    for k in range(toy.blocks):
        if k in starts and operators is not None:
            x = operators.operators[starts[k]].apply(x)
        if k not in plan.kept:
            continue
        a = norm(x, w[f"g{k}"])
        key, value = a @ w[f"k{k}"], a @ w[f"v{k}"]
        if toy.cache:
            key = np.concatenate([past[k][0], key], -2)
            value = np.concatenate([past[k][1], value], -2)
        scores = (a @ w[f"q{k}"]) @ np.swapaxes(key, -1, -2)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        attention = (scores / scores.sum(-1, keepdims=True)) @ value @ w[f"o{k}"]
        middle = x + attention + skip_bias
        m = norm(x if toy.parallel else middle, w[f"h{k}"])
        x = middle + (1 / (1 + np.exp(-(m @ w[f"up{k}"])))) @ w[f"down{k}"]
        x = x + (skip_bias if k < toy.blocks - 1 else 0.0)
    return np.asarray(x @ w["head"])


def _layer_norm(x: NDArray[Any], g: NDArray[Any], shift: NDArray[Any], epsilon: float) -> NDArray[Any]:
    return np.asarray((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * g + shift)


def _rms(x: NDArray[Any], g: NDArray[Any], epsilon: float) -> NDArray[Any]:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * g)


def save(toy: Toy, path: Path) -> Path:
    ir.save(build(toy), path, external_data=f"{path.name}.data", size_threshold_bytes=64)
    return path
