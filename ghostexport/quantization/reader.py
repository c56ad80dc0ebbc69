"""What the rounded numbers of a quantised graph stand for: weight by weight, or as a float graph; rounded inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ghostexport.errors import SurgeryError
from ghostexport.onnxfile import initializer, load_graph, values
from ghostexport.quantization import dynamic
from ghostexport.quantization.forms import UNPACK, UNPACK_MX
from ghostexport.quantization.linears import products_of

_SUFFIX = ".q"


@dataclass(frozen=True, eq=False)
class RoundedInput:
    """What is done to the input of a weight before the product: ``round(x * inverse / scale) * scale``.

    Attributes:
        form: of the numbers: ``int8`` or ``fp8``; ``mxfp8`` or ``nvfp4`` in blocks.
        scale: of the tensor; 1 of MXFP8.
        inverse: ``1 / s [K]`` of SmoothQuant; None without.
    """

    form: str
    scale: float
    inverse: NDArray[np.float32] | None


def rounded_inputs(graph: Path) -> dict[str, RoundedInput]:
    """By the name of the float weight, how the input that it meets is rounded; empty when weights alone are."""
    found = {}
    for node in _unpacking(load_graph(graph)):
        for product, _ in products_of(node.outputs[0]):
            unpack = product.inputs[0].producer() if product.inputs[0] is not None else None
            rounding = unpack.inputs[0].producer() if unpack is not None and unpack.inputs[0] is not None else None
            if unpack is None or rounding is None or rounding.op_type not in ("QuantizeLinear", *dynamic.OPERATORS):
                continue
            smooth = rounding.inputs[0].producer() if rounding.inputs[0] is not None else None
            inverse = None
            if smooth is not None and (smooth.name or "").endswith(".input.smoothed"):
                inverse = values(_constant(smooth.inputs[1])).astype(np.float32)
            scale = float(values(_constant(rounding.inputs[1])).astype(np.float32)) if len(rounding.inputs) > 1 else 1.0
            name = (node.inputs[0].name or "").removesuffix(_SUFFIX)  # type: ignore[union-attr]
            found[name] = RoundedInput(_form_of_inputs(rounding), scale, inverse)
    return found


def _form_of_inputs(rounding: ir.Node) -> str:
    if rounding.op_type in dynamic.OPERATORS:
        return dynamic.OPERATORS[rounding.op_type]
    return "int8" if _constant(rounding.inputs[2]).dtype == ir.DataType.INT8 else "fp8"


def rounded_weights(graph: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Name of each float weight that was quantised, and ``q * s`` in the weight's own layout, one at a time.

    Raises:
        SurgeryError: a ``DequantizeLinear`` of the graph is not one that :mod:`ghostexport.quantization.writer` makes.
    """
    for node in _unpacking(load_graph(graph)):
        yield (node.inputs[0].name or "").removesuffix(_SUFFIX), _unpacked(_parts(node))  # type: ignore[union-attr]


def write_unpacked(graph: Path, folder: Path) -> Path:
    """Writes the graph with float weights in the rounded ones' place into ``folder``: for runtimes without kernels."""
    model = load_graph(graph)
    dynamic.write_as_functions(model)
    for node in _unpacking(model):
        weight = _float_weight(node)
        model.graph.register_initializer(weight)
        node.outputs[0].replace_all_uses_with(weight)
        model.graph.remove(node, safe=True)
    for node in [n for n in model.graph if n.op_type == UNPACK and not n.outputs[0].uses()]:
        model.graph.remove(node, safe=True)  # scales of a double form
    for name in [name for name, value in model.graph.initializers.items() if not value.uses()]:
        del model.graph.initializers[name]
    target = folder / graph.name
    ir.save(model, target, external_data=f"{graph.name}.data")
    return target


def _float_weight(node: ir.Node) -> ir.Value:
    """The weight that a node makes, as an initializer that is computed when it is written."""
    value, parts = node.outputs[0], _parts(node)
    dtype, name = value.dtype or ir.DataType.FLOAT, f"{value.name}.float"
    shape = ir.Shape([int(str(dim)) for dim in value.shape or ()])
    tensor = ir.LazyTensor(
        lambda: ir.tensor(_unpacked(parts).astype(dtype.numpy()), dtype=dtype), dtype=dtype, shape=shape, name=name
    )
    return initializer(tensor)


def _unpacking(model: ir.Model) -> list[ir.Node]:
    """The nodes that make a weight; those that make the scales of a double form are not among them."""
    return [
        node
        for node in model.graph
        if node.op_type in (UNPACK, UNPACK_MX) and node.inputs[0] is not None and _is_weight(node.inputs[0])
    ]


def _is_weight(value: ir.Value) -> bool:
    return value.const_value is not None and (value.name or "").endswith(_SUFFIX)


#: ``q``, what multiplies to its scales, the axis, and the block along it (0: a scale per slice of the axis).
Parts = tuple[ir.TensorProtocol, tuple[ir.TensorProtocol, ...], int, int]


def _parts(node: ir.Node) -> Parts:
    widened = node.inputs[1].producer() if node.inputs[1] is not None else None  # scales of a double form
    scales = node.inputs[1:2] if widened is None else widened.inputs[:2]
    block = node.attributes["block_size"].as_int() if "block_size" in node.attributes else 0
    return _constant(node.inputs[0]), tuple(map(_constant, scales)), node.attributes["axis"].as_int(), block


def _unpacked(parts: Parts) -> NDArray[np.float32]:
    """``DequantizeLinear``, or TensorRT's of MXFP8, by its definition."""
    q, factors, axis, block = parts
    scale = np.ones(1, np.float32)
    for factor in factors:
        stored = values(factor)
        powers = factor.dtype == ir.DataType.UINT8  # E8M0 by its bits
        scale = scale * (stored.view(ml_dtypes.float8_e8m0fnu) if powers else stored).astype(np.float32)
    spread = np.repeat(scale, block, axis=axis) if block else np.expand_dims(scale, 1 - axis)
    return np.asarray(values(q).astype(np.float32) * spread, np.float32)


def _constant(value: ir.Value | None) -> ir.TensorProtocol:
    if value is None or value.const_value is None:
        raise SurgeryError("A DequantizeLinear of the graph reads no constant.", "Give a graph made by quantize.")
    return value.const_value
