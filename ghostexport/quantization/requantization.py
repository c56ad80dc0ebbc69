"""A new weight for a layer that is quantised already: rounded in the layer's own form, into its own nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ghostexport.errors import SurgeryError
from ghostexport.onnxfile import initializer, values
from ghostexport.quantization.forms import FORMS, SCALE_DTYPES
from ghostexport.quantization.scales import quantize


def requantize(unpack: ir.Node, weight: NDArray[Any], prefix: str) -> list[ir.Value]:
    """Makes ``unpack`` give ``weight``, rounded as the old one was (blocks, type of the scales; scales searched).

    Args:
        unpack: a ``DequantizeLinear`` of a constant: symmetric; per block, per channel or per tensor.
        weight: in the layout of the node's output.
        prefix: beginning of the new initializers' names.

    Returns:
        The new numbers and scales; they are the node's inputs afterwards.

    Raises:
        SurgeryError: the form is not known, the numbers are asymmetric, or others read the weight too.
    """
    packed, stored = unpack.inputs[:2]
    where = f"{unpack.name or 'a DequantizeLinear'}"
    if packed is None or stored is None or packed.const_value is None or stored.const_value is None:
        raise SurgeryError(f"The scheme of {where} is not known: its scales are computed.", _ADVICE)
    form = next((form for form in FORMS.values() if form.dtype == packed.dtype and not form.double), None)
    kind = stored.const_value.dtype
    if form is None or kind not in SCALE_DTYPES:
        raise SurgeryError(f"The scheme of {where} is not known: {packed.dtype} times {kind}.", _ADVICE)
    zero = unpack.inputs[2] if len(unpack.inputs) > 2 else None
    if zero is not None and (zero.const_value is None or values(zero.const_value).astype(float).any()):
        raise SurgeryError(f"{where} has zero points; a new weight is rounded symmetrically.", _ADVICE)
    if len(list(unpack.outputs[0].uses())) != 1:
        raise SurgeryError(f"The weight of {where} is read by several nodes.", _ADVICE)
    axis = unpack.attributes["axis"].as_int() if "axis" in unpack.attributes else 1
    axis %= weight.ndim
    block = unpack.attributes["block_size"].as_int() if "block_size" in unpack.attributes else None
    inputs_axis = axis if block is not None else 1 - axis  # per channel, the axis names the outputs
    W = weight if inputs_axis == 0 else weight.T
    if stored.const_value.size == 1:  # one for the whole weight
        largest = float(np.abs(weight).max(initial=1e-30)) / form.grid
        scale = np.full(stored.const_value.shape.numpy(), largest, SCALE_DTYPES[kind])
        q = form.encode(weight.astype(np.float32), scale.astype(np.float32))
    else:
        q, scale, _ = quantize(W, form, block, SCALE_DTYPES[kind])
    if inputs_axis == 1 and scale.size > 1:
        q, scale = q.T, scale.T
    new = []
    for index, (part, array, dtype) in enumerate((("q", q, form.dtype), ("scale", scale, kind))):
        new.append(initializer(ir.tensor(np.ascontiguousarray(array), dtype=dtype, name=f"{prefix}.{part}")))
        unpack.replace_input_with(index, new[-1])
    return new


_ADVICE = "Cut and repair the float graph, then quantise it: ghostexport quantize GRAPH.onnx."
