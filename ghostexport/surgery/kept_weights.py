"""Changes weights of surviving blocks, located by structure: output projections are replaced, whole blocks scaled.

From a residual sum, back along its non-stream operands to the first products with a weight::

    fold    sum <- [post-norm] <- [Add bias] <- MatMul | Gemm <- weight       replaced
    scale   Add, Sum           every operand        MatMul | Gemm   the weight (and bias)
            Mul(a, constant)   the constant         a norm          its gain (and bias): post-norm blocks
            Cast, Reshape, ... the operand

With two sums per block the first belongs to attention, the second to the MLP. A parallel block has one sum and two
such products: the one that depends on the attention is its output projection. No node is added, but for a bias that
the layer did not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from ghostexport.errors import SurgeryError
from ghostexport.onnxfile import values
from ghostexport.operators import FloatArray, WeightFold
from ghostexport.plan import PrunePlan
from ghostexport.quantization.forms import UNPACK, UNPACK_MX
from ghostexport.quantization.requantization import requantize
from ghostexport.surgery.flow import is_constant, is_weight
from ghostexport.surgery.layout import DecoderLayout, bias_index, is_attention, point_at
from ghostexport.surgery.splice import weight

_PRODUCTS = frozenset({"MatMul", "Gemm", "FusedMatMul"})
_QUANTISED = frozenset({UNPACK, UNPACK_MX, "MatMulNBits", "MatMulInteger", "QLinearMatMul", "GatherBlockQuantized"})
_NORMS = frozenset({"RMSNormalization", "SimplifiedLayerNormalization", "LayerNormalization"})
_LAYOUT = frozenset({"Cast", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity"})


@dataclass(frozen=True)
class FoldTarget:
    """A linear layer of the graph.

    Attributes:
        product: MatMul or Gemm node.
        weight: the initializer.
        transposed: the initializer is ``[out, in]``.
        bias_node: Add node of the bias (the product itself for Gemm); None without a bias.
        unpack: the DequantizeLinear that makes the weight, which then is its numbers; None for a float layer.
    """

    product: ir.Node
    weight: ir.Value
    transposed: bool
    bias_node: ir.Node | None
    unpack: ir.Node | None = None


def fold(layout: DecoderLayout, item: WeightFold, block: int) -> tuple[str, list[ir.Value]]:
    """Puts a new weight (and bias) into ``block`` of the layout; returns the old name and the new initializers.

    The new initializer is named ``ghost.fold.{block}.{role}.weight``; other users of the old one keep it. A gain is
    rescaled where it stands: ``ghost.fold.{role}.{block}.{n}``. A quantised layer is rounded again, in its own form.

    Raises:
        SurgeryError: the layer is quantised in an unknown way, not found, or of another shape.
    """
    if item.role.endswith("gain"):
        return _fold_gain(layout, item, block)
    target = locate(layout, block, item.role)
    array: FloatArray = item.weight.T if target.transposed else item.weight
    expected = tuple(target.weight.shape or ())
    if tuple(array.shape) != expected:
        raise SurgeryError(
            f"The folded weight for {item.role} of block {item.block} is {tuple(array.shape)}; "
            f"{target.weight.name!r} is {expected}.",
            "Fit the operator on the model that this graph was exported from.",
        )
    dtype = target.product.inputs[0].dtype if target.unpack is not None else target.weight.dtype  # type: ignore[union-attr]
    prefix = f"ghost.fold.{item.block}.{item.role}"
    if target.unpack is not None:
        new = requantize(target.unpack, np.ascontiguousarray(array), f"{prefix}.weight")
        dtype = dtype or new[1].dtype
    else:
        assert dtype is not None
        new = [weight(f"{prefix}.weight", np.ascontiguousarray(array), dtype)]
        reader = next(iter(_between(target)), target.product)
        _replace(reader, target.weight, new[0])
    assert dtype is not None
    if item.bias is not None:
        new += _fold_bias(layout, target, item.bias, prefix, dtype)
    return target.weight.name or "?", new


def _fold_gain(layout: DecoderLayout, item: WeightFold, block: int) -> tuple[str, list[ir.Value]]:
    sums = layout.sums[block]
    if len(sums) != 2:
        raise SurgeryError(
            f"The {item.role} of block {item.block} could not be located: it adds {len(sums)} times to the stream.",
            "Folded gains need one norm before each of two residual sums.",
        )
    total = sums[0 if item.role == "attention_gain" else 1]
    made = scale_gain(layout, block, total, item.weight, f"ghost.fold.{item.role}.{item.block}")
    return ", ".join(made), [value for new in made.values() for value in new]


def _fold_bias(
    layout: DecoderLayout, target: FoldTarget, bias: FloatArray, prefix: str, dtype: ir.DataType
) -> list[ir.Value]:
    new = weight(f"{prefix}.bias", bias, dtype)
    if target.bias_node is not None:
        index = 2
        if target.bias_node is not target.product:
            index = next(i for i, v in enumerate(target.bias_node.inputs) if v is not None and is_constant(v))
        target.bias_node.replace_input_with(index, new)
        return [new]
    out = target.product.outputs[0]
    uses = list(out.uses())
    node = ir.Node("", "Add", [out, new], name=f"{prefix}.add_bias")
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = node.name, out.type, out.shape
    layout.body.graph.insert_after(target.product, node)
    for use in uses:
        use.node.replace_input_with(use.idx, node.outputs[0])
    return [new]


def locate(layout: DecoderLayout, block: int, role: str) -> FoldTarget:
    """Finds the output projection of a block's ``attention_output`` or ``mlp_output``.

    Raises:
        SurgeryError: not found, ambiguous or quantised.
    """
    where = f"{role} of block {block}"
    sums = layout.sums[block]
    if len(sums) == 2:
        found = _first_products(layout, sums[0 if role == "attention_output" else 1], block)
    elif len(sums) == 1:
        products = _first_products(layout, sums[0], block)
        wanted = [p for p in products if _after_attention(layout, p, block) == (role == "attention_output")]
        found = products if len(products) == 1 else wanted
    else:
        found = []
    if len(found) != 1:
        raise SurgeryError(
            f"The {where} could not be located: {len(found)} products with a weight feed its residual sum.",
            "Folded operators need one linear layer before each residual sum.",
        )
    product = found[0]
    source = product.inputs[1]
    if product.op_type in _QUANTISED or source is None:
        raise SurgeryError(
            f"The {where} is quantised ({product.op_type}).",
            "Rewrite it first (ghostexport quantize GRAPH.onnx --convert -o OUT), or fold before quantising.",
        )
    unpack = None
    transposed = product.op_type == "Gemm" and bool(_int(product, "transB"))
    while not source.is_initializer():
        node = source.producer()
        assert node is not None
        if node.op_type == UNPACK and unpack is None:
            unpack = node
        elif node.op_type in _QUANTISED:
            twice = "" if unpack is None else " twice"
            raise SurgeryError(f"The {where} is quantised{twice} ({node.op_type}).", "Fold before quantising.")
        elif node.op_type == "Transpose":
            transposed = not transposed
        elif node.op_type not in ("Identity", "Cast"):
            raise SurgeryError(f"The weight of {where} is computed by {node.op_type}.", "It cannot be replaced.")
        source = node.inputs[0]
        assert source is not None
    return FoldTarget(product, source, transposed, _bias_node(product), unpack)


def _first_products(layout: DecoderLayout, total: ir.Node, block: int) -> list[ir.Node]:
    """Products with a weight met first when walking back from a residual sum, not past the stream itself."""
    stops = {layout.points[block].node, *layout.sums[block]} - {total}
    found: dict[ir.Node, None] = {}
    stack = [v.producer() for v in total.inputs[:2] if v is not None and v is not layout.points[block].value]
    seen: set[ir.Node] = set()
    while stack:
        node = stack.pop()
        if node is None or node in stops or node in seen:
            continue
        seen.add(node)
        if layout.flow.index(node) not in layout.stream:
            continue
        weighted = node.op_type in _PRODUCTS and node.inputs[1] is not None and is_constant(node.inputs[1])
        if weighted or node.op_type in _QUANTISED:
            found[node] = None
        else:
            stack.extend(v.producer() for v in node.inputs if v is not None)
    return list(found)


def _after_attention(layout: DecoderLayout, node: ir.Node, block: int) -> bool:
    vertex = layout.flow.index(node)
    assert vertex is not None
    for v in layout.flow.ancestors([vertex]):
        item = layout.flow.vertices[v]
        if isinstance(item, ir.Node) and layout.block_of(v) == block and is_attention(item):
            return True
    return False


def _between(target: FoldTarget) -> list[ir.Node]:
    """Nodes between the initializer and the product (Transpose, Cast), the initializer's reader first."""
    chain: list[ir.Node] = []
    value = target.product.inputs[1]
    while value is not None and value is not target.weight:
        node = value.producer()
        assert node is not None
        chain.insert(0, node)
        value = node.inputs[0]
    return chain


def _replace(node: ir.Node, old: ir.Value, new: ir.Value) -> None:
    node.replace_input_with(next(i for i, v in enumerate(node.inputs) if v is old), new)


def _bias_node(product: ir.Node) -> ir.Node | None:
    if product.op_type == "Gemm" and len(product.inputs) > 2 and product.inputs[2] is not None:
        return product
    readers = [use.node for use in product.outputs[0].uses()]
    if (
        len(readers) == 1
        and readers[0].op_type == "Add"
        and any(v is not None and is_constant(v) for v in readers[0].inputs)
    ):
        return readers[0]
    return None


def _int(node: ir.Node, name: str) -> int:
    return node.attributes[name].as_int() if name in node.attributes else 0


def scale_blocks(
    layout: DecoderLayout, plan: PrunePlan, scales: list[float | None], at: Mapping[int, int]
) -> dict[str, list[ir.Value]]:
    """Divides what every kept block behind a cut adds to the stream by the product of the scales before it.

    With ``alpha`` at a cut the stream should go on as ``alpha x + f_1 + f_2 + ...``; it goes on as ``x + f_1 / alpha +
    ...``, the same up to a factor, which the norms that read it remove.

    Args:
        scales: one per boundary; None for none.
        at: kept block of the plan -> block of the layout.

    Returns:
        New initializers by the name of the one they replace.

    Raises:
        SurgeryError: a path from a weight to the sum is not linear, is quantised or has other readers.
    """
    made: dict[str, list[ir.Value]] = {}
    for block in plan.kept:
        factor = 1.0
        for boundary, scale in zip(plan.boundaries, scales, strict=True):
            if scale is not None and boundary.span.stop <= block:
                factor /= scale
        if factor != 1.0:
            _Scaler(layout, at[block], factor, made, f"ghost.scale.{block}").run()
    return made


def scale_gain(
    layout: DecoderLayout, block: int, total: ir.Node, factor: FloatArray, prefix: str
) -> dict[str, list[ir.Value]]:
    """Multiplies the gain of the norm between a projection and a residual sum by ``factor`` ``[C]``.

    Returns:
        New initializers, named after ``prefix``, by the name of the one they replace.

    Raises:
        SurgeryError: no norm's gain stands there.
    """
    made: dict[str, list[ir.Value]] = {}
    _Scaler(layout, block, factor, made, prefix).run([total])
    return made


def with_new_addends(layout: DecoderLayout) -> DecoderLayout:
    """The layout whose fused sums are read again from their nodes."""
    points = [p if p.node is None or not p.is_fused else point_at(p.node) for p in layout.points]
    return replace(layout, points=tuple(points))


class _Scaler:
    """Walks one block's branches."""

    def __init__(
        self,
        layout: DecoderLayout,
        block: int,
        factor: float | FloatArray,
        made: dict[str, list[ir.Value]],
        prefix: str,
    ) -> None:
        self.layout = layout
        self.block = block
        self.factor = factor
        self.made = made
        self.prefix = prefix
        self.count = 0

    def run(self, sums: Iterable[ir.Node] | None = None) -> None:
        chain = {self.layout.points[self.block].node, *self.layout.sums[self.block]}
        for total in self.layout.sums[self.block] if sums is None else sums:
            for index in _summands(total):
                value = total.inputs[index]
                if value is not None and not self._on_stream(value, chain):
                    self.scale(total, index)

    def _on_stream(self, value: ir.Value, chain: set[ir.Node | None]) -> bool:
        """Whether a summand is the stream itself, possibly behind nodes that change only its form."""
        node = value.producer()
        while node not in chain and value is not self.layout.points[self.block].value:
            source = node.inputs[0] if node is not None and node.op_type in _LAYOUT else None
            if source is None:
                return False
            value, node = source, source.producer()
        return True

    def scale(self, reader: ir.Node, index: int) -> None:
        """Makes input ``index`` of ``reader`` the scaled value."""
        value = reader.inputs[index]
        assert value is not None
        if is_weight(value):
            self._replace(reader, index, value)
            return
        node = value.producer()
        if node is None or len(list(value.uses())) != 1:
            raise self._refusal(f"{value.name!r} is a graph input or has other readers")
        if node.op_type in ("Add", "Sum"):
            for operand in range(len(node.inputs)):
                self.scale(node, operand)
        elif node.op_type in _PRODUCTS and node.inputs[1] is not None and is_constant(node.inputs[1]):
            if not isinstance(self.factor, float):
                raise self._refusal("no norm stands between its projection and the residual sum")
            self.scale(node, 1)
            if len(node.inputs) > 2 and node.inputs[2] is not None:
                self.scale(node, 2)
        elif node.op_type in _NORMS:
            for operand in range(1, len(node.inputs)):
                if node.inputs[operand] is not None:
                    self.scale(node, operand)
        elif node.op_type == "Mul":
            constants = [i for i, v in enumerate(node.inputs) if v is not None and is_constant(v)]
            if not constants:
                raise self._refusal("two activations are multiplied")
            self.scale(node, constants[-1])
        elif node.op_type in _LAYOUT:
            self.scale(node, 0)
        else:
            raise self._refusal(f"{node.op_type} {node.name!r} is not linear in a weight, or quantised")

    def _replace(self, reader: ir.Node, index: int, old: ir.Value) -> None:
        tensor = old.const_value
        if tensor is None or old.dtype is None:
            raise self._refusal(f"the values of {old.name!r} are not in the file")
        scaled = values(tensor).astype("float32") * self.factor
        new = weight(f"{self.prefix}.{self.count}", scaled, old.dtype)
        self.count += 1
        reader.replace_input_with(index, new)
        self.made.setdefault(old.name or "?", []).append(new)

    def _refusal(self, why: str) -> SurgeryError:
        return SurgeryError(
            f"Block {self.block} cannot be scaled: {why}.", "Use an operator that acts at the boundary, such as ghost."
        )


def _summands(total: ir.Node) -> list[int]:
    """The inputs that are summed: all, or of a fused skip-norm the two addends and the bias."""
    if total.op_type in ("Add", "Sum"):
        return list(range(len(total.inputs)))
    bias = bias_index(total)
    return [0, 1, *([bias] if len(total.inputs) > bias and total.inputs[bias] is not None else [])]
