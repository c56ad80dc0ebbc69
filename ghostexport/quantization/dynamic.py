"""Inputs of linears rounded in blocks whose scales the runtime finds (MXFP8 in W8A8, NVFP4 in W4A4).

::

    MXFP8    q, s = TRT_MXFP8DynamicQuantize(x)      x' = TRT_MXFP8DequantizeLinear(q, s)
    NVFP4    q, s = TRT_FP4DynamicQuantize(x, u)     x' = DequantizeLinear(q, DequantizeLinear(s, u))

``u`` is the tensor's own float, ``max |x| / (6 * 448)`` on the calibration text. TensorRT alone has these operators: a
twin for ONNX Runtime's CPU computes them with functions of the model, written here by their definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
from numpy.typing import NDArray

from ghostexport.onnxfile import initializer
from ghostexport.quantization.forms import FORMS, SCALE_DTYPES, UNPACK, UNPACK_MX, Form
from ghostexport.quantization.scales import largest_scales

OPERATORS = {"TRT_MXFP8DynamicQuantize": "mxfp8", "TRT_FP4DynamicQuantize": "nvfp4"}
_OPERATOR_OF = {form: operator for operator, form in OPERATORS.items()}
_DOMAIN = "ghostexport"

#: Rows of blocks, rounded, laid out as before; what comes between is the form's.
_FRAME = """
<opset_import: ["" : {opset}], domain: "{domain}">
{name} (x{unit}) => (y) {{
  shape = Shape(x)
  wide = Cast<to = 1>(x)
  rows = Constant<value = int64[2] {{-1, {block}}}>()
  last = Constant<value = int64[1] {{1}}>()
  zero = Constant<value = float {{0.0}}>()
  half = Constant<value = float {{0.5}}>()
  one = Constant<value = float {{1.0}}>()
  two = Constant<value = float {{2.0}}>()
  four = Constant<value = float {{4.0}}>()
  grid = Constant<value = float {{{grid}}}>()
  tiny = Constant<value = float {{1e-37}}>()
  blocks = Reshape(wide, rows)
  size = Abs(blocks)
  largest = ReduceMax<keepdims = 1>(size, last)
  share = Div(largest, grid)
  {body}
  rounded = Mul(q, scale)
  flat = Reshape(rounded, shape)
  y = CastLike(flat, x)
}}
"""
_BODIES = {
    "mxfp8": """
  above = Max(share, tiny)
  ln = Log(above)
  ln2 = Constant<value = float {0.6931471805599453}>()
  exponent = Div(ln, ln2)
  slack = Constant<value = float {1e-5}>()
  less = Sub(exponent, slack)
  next = Ceil(less)
  scale = Pow(two, next)
  ratio = Div(blocks, scale)
  packed = Cast<to = 17>(ratio)
  q = Cast<to = 1>(packed)
""",
    "nvfp4": """
  u = Cast<to = 1>(unit)
  relative = Div(share, u)
  packed = Cast<to = 17>(relative)
  unpacked = Cast<to = 1>(packed)
  scale = Mul(unpacked, u)
  divisor = Max(scale, tiny)
  ratio = Div(blocks, divisor)
  lowest = Neg(grid)
  clipped = Clip(ratio, lowest, grid)
  magnitude = Abs(clipped)
  fine = LessOrEqual(magnitude, two)
  middle = LessOrEqual(magnitude, four)
  coarse = Where(middle, one, two)
  step = Where(fine, half, coarse)
  steps = Div(clipped, step)
  whole = Round(steps)
  q = Mul(whole, step)
""",
}


def nodes(x: ir.Value, form: Form, unit: float, dtype: ir.DataType, name: str) -> tuple[list[ir.Node], list[ir.Value]]:
    """The nodes that round ``x``, the last of which makes the rounded value, and their constants."""
    block = form.blocks[0]
    shared: dict[str, Any] = {"axis": -1, "block_size": block}
    constants = []
    if form.double:
        stored = np.asarray(unit, SCALE_DTYPES[dtype])
        constants.append(initializer(ir.tensor(stored, dtype=dtype, name=f"{name}.input.scale")))
    more = {"scale_type": ir.DataType.FLOAT8E4M3FN} if form.double else {"output_dtype": form.dtype}
    quantize = ir.node(
        _OPERATOR_OF[form.name],
        [x, *constants],
        shared | more,
        domain="trt",
        num_outputs=2,
        name=f"{name}.input.quantize",
    )
    q, s = quantize.outputs
    q.name, s.name = f"{quantize.name}.value", f"{quantize.name}.scale"
    kinds = [form.dtype, ir.DataType.FLOAT8E4M3FN if form.double else ir.DataType.UINT8]
    made = [quantize]
    if form.double:
        made.append(ir.node(UNPACK, [s, *constants], name=f"{name}.input.scales"))
        made.append(ir.node(UNPACK, [q, made[-1].outputs[0]], shared, name=f"{name}.input.dequantize"))
    else:
        more = {"output_dtype": dtype}
        made.append(ir.node(UNPACK_MX, [q, s], shared | more, domain="trt", name=f"{name}.input.dequantize"))
    for node in made[1:]:
        node.outputs[0].name, node.outputs[0].type = f"{node.name}.value", ir.TensorType(dtype)
    q.type, s.type = map(ir.TensorType, kinds)
    q.shape = made[-1].outputs[0].shape = x.shape
    return made, constants


def round_blocks(x: NDArray[np.float32], form: Form, unit: float) -> NDArray[np.float32]:
    """What ``x`` is after the nodes: blocks along its last axis, scales from the largest magnitude of each."""
    rows = x.reshape(-1, form.blocks[0] or 1, 1)
    scale = largest_scales(rows, form, np.float32(unit), form.scale_dtype(np.dtype(np.float32)))
    return np.asarray(form.nearest(rows, scale) * scale, np.float32).reshape(x.shape)


def write_as_functions(model: ir.Model) -> None:
    """Puts functions of the model in the operators' place, for runtimes without them."""
    opset = model.opset_imports[""]
    for node in [node for node in model.graph if node.op_type in OPERATORS]:
        form = OPERATORS[node.op_type]
        last = _last(node)
        call = ir.node(f"Round{form.upper()}", node.inputs, domain=_DOMAIN, name=f"{node.name}.function")
        value, old = call.outputs[0], last.outputs[0]
        value.name, value.type, value.shape = f"{call.name}.value", old.type, old.shape
        model.graph.insert_before(node, call)
        old.replace_all_uses_with(value)
        for done in reversed(_between(node, last)):
            model.graph.remove(done, safe=True)
        if model.opset_imports.get(_DOMAIN) is None or call.op_identifier() not in model.functions:
            model.opset_imports[_DOMAIN] = 1
            function = _function(form, opset)
            model.functions[function.identifier()] = function


def _last(node: ir.Node) -> ir.Node:
    """The node that makes the rounded value."""
    return next(user for user, _ in node.outputs[0].uses())


def _between(node: ir.Node, last: ir.Node) -> Sequence[ir.Node]:
    return [node, *(user for user, _ in node.outputs[1].uses() if user is not last), last]


def _function(form: str, opset: int | None) -> ir.Function:
    block, grid = FORMS[form].blocks[0], FORMS[form].grid
    unit = ", unit" if FORMS[form].double else ""
    text = _FRAME.format(
        name=f"Round{form.upper()}", opset=opset, domain=_DOMAIN, unit=unit, block=block, grid=grid, body=_BODIES[form]
    )
    return ir.serde.deserialize_function(onnx.parser.parse_function(text))
