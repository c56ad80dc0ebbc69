"""Inputs of linears rounded as well (W8A8): one scale per tensor, from the largest value of the calibration text.

MXFP8 and NVFP4 find the scales of their blocks while they run: :mod:`ghostexport.quantization.dynamic`.

::

    x @ W   ->   DequantizeLinear(QuantizeLinear(x * 1/s, a), a) @ DequantizeLinear(q, w)

``a = max |x / s| / grid``; ``s [K]`` is SmoothQuant's (arXiv 2211.10438): ``s_k = max|x_k|^alpha / max|W_k|^(1-alpha)``
moves what is large in an input into the weight, which becomes ``diag(s) W``; without smoothing there is no ``s``.

A massive activation would take the grid from all others: with ``keep: auto`` an input whose largest value is more than
:data:`OUTLIER` times that of the middle input stays as it is, and its linears are rounded in their weights alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ghostexport.onnxfile import initializer, values
from ghostexport.quantization import dynamic
from ghostexport.quantization.forms import SCALE_DTYPES, UNPACK, Form
from ghostexport.quantization.inputs import Inputs
from ghostexport.quantization.linears import Linear
from ghostexport.quantization.targets import DYNAMIC

#: SmolLM2's inputs of down_proj reach 3065 and 2371 where the others stay below 105: rounding those doubles the
#: perplexity.
OUTLIER = 8.0


@dataclass(frozen=True, eq=False)
class Rounding:
    """How the input of some linears is rounded.

    Attributes:
        source: the value they read.
        linears: those that read it.
        scale: of the tensor; MXFP8 has none and passes over it.
        smooth: ``s [K]``, or None.
    """

    source: ir.Value
    linears: tuple[Linear, ...]
    scale: float
    smooth: NDArray[np.float32] | None


def choose(
    linears: Iterable[Linear], inputs: Mapping[str, Inputs], form: Form, smooth: float | None, keep: str
) -> tuple[list[Rounding], dict[str, str]]:
    """Which inputs are rounded, and why others are not, by the weight's name.

    Args:
        linears: the body's; the head's input is never rounded.
        inputs: what was seen of them.
        smooth: SmoothQuant's ``alpha`` in ``(0, 1)``.
        keep: ``auto`` keeps outliers, ``none`` rounds every input.
    """
    groups: dict[ir.Value, list[Linear]] = {}
    for linear in linears:
        source = linear.products[0].inputs[0]
        assert source is not None
        groups.setdefault(source, []).append(linear)
    reaches = {source: float(inputs[own[0].name].largest.max()) for source, own in groups.items()}
    limit = OUTLIER * float(np.median(list(reaches.values()))) if keep == "auto" and reaches else np.inf
    chosen, kept = [], dict[str, str]()
    for source, own in groups.items():
        if reaches[source] > limit:
            reason = f"the input reaches {reaches[source]:.0f}, {OUTLIER:g} times the usual and more: not rounded"
            kept |= {linear.name: reason for linear in own}
            continue
        largest = inputs[own[0].name].largest
        s = None if smooth is None else _smoothing(own, largest, smooth)
        reach = float((largest if s is None else largest / s).max())
        chosen.append(Rounding(source, tuple(own), max(reach, 1e-30) / form.reach, s))
    return chosen, kept


def insert(graph: ir.Graph, rounding: Rounding, form: Form) -> list[ir.Value]:
    """Puts the nodes before the products; returns their constants, which are to be registered and written."""
    source, name = rounding.source, rounding.linears[0].name
    dtype = rounding.linears[0].weight.dtype
    assert dtype is not None
    stored = SCALE_DTYPES[dtype]
    new, nodes, x = list[ir.Value](), list[ir.Node](), source
    if rounding.smooth is not None:
        inverted = (1 / rounding.smooth).astype(stored)
        inverse = initializer(ir.tensor(inverted, dtype=dtype, name=f"{name}.input.smooth"))
        new.append(inverse)
        nodes.append(ir.node("Mul", [x, inverse], name=f"{name}.input.smoothed"))
        x = _typed(nodes[-1], dtype, source)
    made, constants = (dynamic.nodes if form.name in DYNAMIC else _static)(x, form, rounding.scale, dtype, name)
    nodes, new = [*nodes, *made], [*new, *constants]
    products = {product: None for linear in rounding.linears for product in linear.products}
    graph.insert_before(min(products, key=list(graph).index), nodes)
    for product in products:
        product.replace_input_with(0, nodes[-1].outputs[0])
    return new


def _static(
    x: ir.Value, form: Form, scale: float, dtype: ir.DataType, name: str
) -> tuple[list[ir.Node], list[ir.Value]]:
    """As :func:`dynamic.nodes`, with one scale for the tensor."""
    stored = np.asarray(scale, SCALE_DTYPES[dtype])
    constants = [
        initializer(ir.tensor(stored, dtype=dtype, name=f"{name}.input.scale")),
        initializer(ir.tensor(np.zeros((), form.numpy), dtype=form.dtype, name=f"{name}.input.zero")),
    ]
    quantize = ir.node("QuantizeLinear", [x, *constants], name=f"{name}.input.quantize")
    unpack = ir.node(UNPACK, [_typed(quantize, form.dtype, x), *constants], name=f"{name}.input.dequantize")
    _typed(unpack, dtype, x)
    return [quantize, unpack], constants


def _typed(node: ir.Node, dtype: ir.DataType, like: ir.Value) -> ir.Value:
    """The node's value, named, with the shape of another."""
    value = node.outputs[0]
    value.name, value.shape, value.type = f"{node.name}.value", like.shape, ir.TensorType(dtype)
    return value


def _smoothing(linears: Sequence[Linear], largest: NDArray[np.float32], alpha: float) -> NDArray[np.float32]:
    """``s [K]``, one for all linears that read the input; ones where an input or its weights are zero."""
    rows = np.zeros(len(largest), np.float32)
    for linear in linears:
        assert linear.weight.const_value is not None
        W = np.abs(values(linear.weight.const_value)).max(axis=1 - linear.inputs_axis)
        rows = np.maximum(rows, W.astype(np.float32))
    usable = (largest > 0) & (rows > 0)
    s = np.where(usable, largest, 1) ** alpha / np.where(usable, rows, 1) ** (1 - alpha)
    return np.asarray(s, np.float32)
