"""Graph in, graph out: every linear's weight becomes ``DequantizeLinear(q, s)``; on request its input is rounded too.

::

    x @ W             ->   x @ DequantizeLinear(q, s)                              axis 0, blocks along the inputs
    Gather(E), E'     ->   one DequantizeLinear(q, s) feeding Gather and Transpose  axis 1

(of MXFP8 TensorRT's ``TRT_MXFP8DequantizeLinear``).

Weights are read, rounded and written one at a time, in graph order, so memory is bounded by the largest tensor and the
data file is written once. Equal input gives equal bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ghostexport.errors import NameCollision, RecipeError, SurgeryError
from ghostexport.files import write_json
from ghostexport.onnxfile import initializer, load_graph, save_graph, weight_bytes
from ghostexport.quantization import activations
from ghostexport.quantization.forms import FORMS, SCALE_DTYPES, UNPACK, UNPACK_MX, Form
from ghostexport.quantization.gptq import round_in_turn
from ghostexport.quantization.inputs import Inputs
from ghostexport.quantization.linears import Linear, find_linears
from ghostexport.quantization.scales import dequantize, quantize, relative_error
from ghostexport.quantization.targets import DEFAULTS, Settings
from ghostexport.validation import require_name

#: Oldest opset whose decoders read the same when a newer one is declared.
OLDEST = 18
#: IR version that introduced the types of an opset.
IR_VERSION_OF: Mapping[int, int] = {21: 10, 23: 11}

_QUANTISED = (
    UNPACK,
    UNPACK_MX,
    "QuantizeLinear",
    "MatMulNBits",
    "MatMulInteger",
    "QLinearMatMul",
    "DynamicQuantizeLinear",
)


@dataclass(frozen=True)
class QuantizedLinear:
    """One row of the report.

    Attributes:
        weight: name of the float initializer; ``<weight>.q``, ``<weight>.scale`` stand in the graph.
        shape: ``(inputs, outputs)``.
        form: its name, or None where the weight was kept.
        block: inputs that share a scale; None for a scale per output channel.
        relative_error: of the layer's output for uncorrelated inputs, weighted by what was measured of them.
        bytes: of the weight and its scales now.
        activations: whether its input is rounded to the same form.
        output_error: relative error of the output on the calibration text, with nearest rounding and with rounding in
            turn; None where that was not asked for.
        reason: why it was kept, its input was not rounded, or it took another form than asked.
    """

    weight: str
    shape: tuple[int, int]
    form: str | None
    block: int | None
    relative_error: float
    bytes: int
    activations: bool = False
    output_error: tuple[float, float] | None = None
    reason: str = ""


@dataclass(frozen=True)
class QuantizationReport:
    """What was done.

    Attributes:
        source, output: file names.
        form: asked for.
        settings: how.
        weighted: the search was weighted by measured inputs.
        opset_before, opset_after: of the default domain.
        weight_bytes_before, weight_bytes_after: of all initializers.
        linears: one row each, in graph order.
    """

    source: str
    output: str
    form: str
    settings: Settings
    weighted: bool
    opset_before: int
    opset_after: int
    weight_bytes_before: int
    weight_bytes_after: int
    linears: tuple[QuantizedLinear, ...]

    @property
    def summary(self) -> str:
        """One line: how many weights, how large."""
        rounded = sum(linear.form is not None for linear in self.linears)
        before, after = self.weight_bytes_before / 1e6, self.weight_bytes_after / 1e6
        inputs = sum(linear.activations for linear in self.linears)
        said = f" ({inputs} with their inputs)" if inputs else ""
        return f"{rounded} of {len(self.linears)} matrices in {self.form}{said}, weights {before:.1f} -> {after:.1f} MB"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON-ready data."""
        return asdict(self)


def quantize_graph(
    source: Path,
    output: Path,
    form: str,
    settings: Settings = DEFAULTS,
    *,
    inputs: Mapping[str, Inputs] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> QuantizationReport:
    """Quantises the weights of a decoder graph, and the inputs they meet where asked.

    Args:
        source: a float ONNX graph, ours or another producer's.
        output: the new file; its weights go to ``<output>.data``, the report to ``<output stem>.quantization.json``.
        form: a name of :data:`ghostexport.quantization.forms.FORMS`.
        settings: block, scales, head, operator, activations.
        inputs: from :func:`ghostexport.quantization.inputs.measure_inputs`; rounded activations need them.
        progress: called with weights done and their number.

    Raises:
        RecipeError: an unknown form, rounded activations without ``inputs`` or with a form that has none, or
            rounding in turn without ``X'X``.
        SurgeryError: nothing to quantise, quantised already, or ``block`` does not divide a linear's inputs.
    """
    require_name(form, FORMS, "format")
    settings.require_form(form)
    rounds, turned = settings.activations != "none", settings.rounding == "gptq"
    _require_inputs(settings, inputs)
    model = load_graph(source)
    linears = [linear for linear in find_linears(model, settings.operator != "keep") if linear.products]
    _refuse(model, linears, source)
    chosen = _chosen(FORMS[form], settings, linears)
    before, opset = weight_bytes(model), model.opset_imports[""]
    jobs = [
        _Job(linear, *chosen[linear.kind], settings.scales == "search", turned, (inputs or {}).get(linear.name))
        for linear in linears
    ]
    raise_opset(model, max([opset, *(job.form.opset for job in jobs if job.form is not None)]))
    new = _round_inputs(model.graph, jobs, settings, inputs) if rounds and inputs is not None else []
    new += [value for job in jobs if job.form is not None for value in _replace(model.graph, job)]
    if any(node.domain == "trt" for node in model.graph):
        model.opset_imports["trt"] = 1
    for done, job in enumerate(jobs):
        job.written = functools.partial(progress, done + 1, len(jobs))
    save_graph(model, output, new, self_contained=True)
    report = QuantizationReport(
        source=source.name,
        output=output.name,
        form=form,
        settings=settings,
        weighted=inputs is not None,
        opset_before=opset,
        opset_after=model.opset_imports[""],
        weight_bytes_before=before,
        weight_bytes_after=weight_bytes(model),
        linears=tuple(job.row() for job in jobs),
    )
    write_json(output.with_suffix(".quantization.json"), report.to_json())
    return report


class _Job:
    """One weight on its way: rounded when the first of its tensors is written, let go with the last."""

    def __init__(
        self,
        linear: Linear,
        form: Form | None,
        block: int | None,
        reason: str,
        search: bool,
        turned: bool,
        inputs: Inputs | None,
    ) -> None:
        self.linear, self.form, self.block, self.reason, self.search = linear, form, block, reason, search
        self.importance = None if inputs is None else inputs.squares
        self.rounds_input = False
        self.smooth: NDArray[np.float32] | None = None
        self.tensor = linear.weight.const_value
        self.written: Callable[[], None] = lambda: None
        self.gram = inputs.gram if turned and inputs is not None else None
        self.error, self.output_error = 0.0, None if self.gram is None or form is None else (0.0, 0.0)
        self._parts: dict[str, NDArray[Any]] = {}

    def part(self, name: str) -> NDArray[Any]:
        """``q``, ``scale`` or ``unit``, laid out as the graph holds it; each is asked for once, in this order."""
        if name not in self._parts:
            self._round()
        part = self._parts.pop(name)
        if not self._parts:
            self.written()
        return part

    def _round(self) -> None:
        assert self.form is not None and self.tensor is not None
        stored, axis = self.tensor.numpy(), self.linear.inputs_axis
        weight, importance = stored if axis == 0 else stored.T, self.importance
        if self.smooth is not None:  # the input is divided by it
            weight = weight.astype(np.float32) * self.smooth[:, None]
            importance = None if importance is None else importance / self.smooth.astype(np.float64) ** 2
        scale_dtype = SCALE_DTYPES[self.tensor.dtype]
        q, scale, unit = quantize(weight, self.form, self.block, scale_dtype, importance, self.search)
        if self.gram is not None:
            gram = np.load(self.gram, mmap_mode="r")
            if self.smooth is not None:
                gram = gram / np.outer(self.smooth, self.smooth)
            q, *errors = round_in_turn(weight, q, scale, unit, self.form, gram)
            self.output_error = (errors[0], errors[1])
        self.error = relative_error(weight, dequantize(q, scale, unit), importance)
        if axis == 1:
            q, scale = np.ascontiguousarray(q.T), np.ascontiguousarray(scale.T)
        self._parts = {"q": q, "scale": scale.view(np.uint8) if self.form.powers else scale}
        if self.form.double:
            self._parts["unit"] = unit.astype(scale_dtype)

    def row(self) -> QuantizedLinear:
        linear = self.linear
        name = None if self.form is None else self.form.name
        values = [linear.weight] if self.form is None else [v for v in self.values if v is not None]
        size = sum(v.const_value.nbytes for v in values if v.const_value is not None)
        rounded = self.rounds_input
        errors, reason = self.output_error, self.reason
        return QuantizedLinear(linear.name, linear.shape, name, self.block, self.error, size, rounded, errors, reason)

    @functools.cached_property
    def values(self) -> tuple[ir.Value, ir.Value, ir.Value | None]:
        """``q``, ``scale`` and, of a double form, ``unit`` as initializers whose data is made when it is written."""
        assert self.form is not None and self.tensor is not None
        inputs, outputs = self.linear.shape
        scale_shape = [outputs] if self.block is None else [inputs // self.block, outputs]
        q_shape = [inputs, outputs]
        if self.linear.inputs_axis == 1:
            q_shape, scale_shape = q_shape[::-1], scale_shape[::-1]
        scale_dtype = self.tensor.dtype
        if self.form.double or self.form.powers:
            scale_dtype = ir.DataType.UINT8 if self.form.powers else ir.DataType.FLOAT8E4M3FN
        unit = self._value("unit", self.tensor.dtype, []) if self.form.double else None
        return self._value("q", self.form.dtype, q_shape), self._value("scale", scale_dtype, scale_shape), unit

    def _value(self, part: str, dtype: ir.DataType, shape: list[int]) -> ir.Value:
        name = f"{self.linear.name}.{part}"
        lazy = ir.LazyTensor(
            lambda: ir.tensor(self.part(part), dtype=dtype, name=name), dtype=dtype, shape=ir.Shape(shape), name=name
        )
        return initializer(lazy)


Choice = tuple[Form | None, int | None, str]


def _chosen(form: Form, settings: Settings, linears: list[Linear]) -> dict[str, Choice]:
    """Form, block and reason of the body's linears, of the head and of operators, by :attr:`Linear.kind`."""
    head, block = settings.head, settings.block
    same = [linear for linear in linears if linear.kind == "body" or (head == "same" and linear.head)]
    wrong = [linear for linear in same if block is not None and linear.shape[0] % block]
    if block is not None and (block not in form.blocks or wrong):
        what = f"{wrong[0].name} has {wrong[0].shape[0]} inputs" if wrong else f"{form.name} takes {form.blocks}"
        raise SurgeryError(f"Blocks of {block} do not fit: {what}.", "Leave the block out; one that fits is taken.")
    try:
        static = settings.activations == "static"
        size = form.block_for(linear.shape[0] for linear in same) if block is None and not static else block
        heads = [linear.shape[0] for linear in linears if linear.head]
        choices: dict[str, Choice] = {
            "same": (form, size, ""),
            "int8": (FORMS["int8"], FORMS["int8"].block_for(heads), "the head is int8"),
            "keep": (None, None, "the head is kept"),
        }
    except ValueError as error:
        raise SurgeryError(f"The graph cannot be held in {form.name}: {error}.", "Use int8 or fp8.") from None
    operator = FORMS["int8"], None, "an operator, int8 per channel"
    return {"body": choices["same"], "head": choices[head], "operator": operator}


def _round_inputs(
    graph: ir.Graph, jobs: list[_Job], settings: Settings, inputs: Mapping[str, Inputs]
) -> list[ir.Value]:
    """Rounds what the body's linears read; returns the new constants."""
    body = {job.linear.name: job for job in jobs if job.linear.kind == "body" and job.form is not None}
    form = next(job.form for job in body.values())
    assert form is not None
    linears = [job.linear for job in body.values()]
    roundings, kept = activations.choose(linears, inputs, form, settings.smooth, settings.keep)
    new = []
    for rounding in roundings:
        constants = activations.insert(graph, rounding, form)
        register(graph, constants)
        new += constants
        for linear in rounding.linears:
            body[linear.name].rounds_input, body[linear.name].smooth = True, rounding.smooth
    for name, reason in kept.items():
        body[name].reason = reason
    return new


def _replace(graph: ir.Graph, job: _Job) -> list[ir.Value]:
    """Puts the DequantizeLinear in the weight's place; returns the new initializers in writing order."""
    linear, weight = job.linear, job.linear.weight
    q, scale, unit = job.values
    new = [value for value in (q, scale, unit) if value is not None]
    register(graph, new)
    first = min(linear.readers, key=list(graph).index)
    scale_in: ir.Value = scale
    if unit is not None:
        widen = _dequantize(f"{linear.name}.scales", [scale, unit], {}, scale.shape, weight.dtype)
        graph.insert_before(first, widen)
        scale_in = widen.outputs[0]
    axis = linear.inputs_axis if job.block is not None else 1 - linear.inputs_axis
    attributes = {"axis": axis} | ({} if job.block is None else {"block_size": job.block})
    mx = job.form is not None and job.form.powers
    node = _dequantize(f"{linear.name}.dequantize", [q, scale_in], attributes, weight.shape, weight.dtype, mx)
    graph.insert_before(first, node)
    weight.replace_all_uses_with(node.outputs[0])
    del graph.initializers[linear.name]
    return new


def register(graph: ir.Graph, new: list[ir.Value]) -> None:
    """Makes values initializers of the graph.

    Raises:
        NameCollision: it has one of that name.
    """
    for value in new:
        if value.name in graph.initializers:
            raise NameCollision(f"The graph already has {value.name}.", "Rename it, or quantise the float graph.")
        graph.register_initializer(value)


def _dequantize(
    name: str,
    inputs: list[ir.Value],
    attributes: dict[str, int],
    shape: Any,
    dtype: ir.DataType | None,
    mx: bool = False,
) -> ir.Node:
    dtype = dtype or ir.DataType.FLOAT
    if mx:
        node = ir.node(UNPACK_MX, inputs, attributes | {"output_dtype": dtype}, name=name, domain="trt")
    else:
        node = ir.node(UNPACK, inputs, attributes, name=name)
    value = node.outputs[0]
    value.name, value.shape, value.type = f"{name}.value", shape, ir.TensorType(dtype)
    return node


def raise_opset(model: ir.Model, opset: int) -> None:
    """Declares a newer opset. From 20 on, the operators of decoders only gained types, but for the ones refused.

    Raises:
        SurgeryError: the graph is too old, or has an operator that changed.
    """
    if opset <= (model.opset_imports[""] or 0):
        return
    changed = {"GroupNormalization"} & {node.op_type for node in model.graph.all_nodes()}
    if model.opset_imports[""] < OLDEST or changed:
        raise SurgeryError(
            f"The graph is of opset {model.opset_imports['']} and cannot simply be declared opset {opset}.",
            "Export it again with opset 20 or newer.",
        )
    model.opset_imports[""] = opset
    model.ir_version = max(model.ir_version, IR_VERSION_OF[opset])


def _require_inputs(settings: Settings, inputs: Mapping[str, Inputs] | None) -> None:
    if settings.activations != "none" and inputs is None:
        raise RecipeError("Rounded activations take their scales from calibration text.", "Give a calibration.")
    if settings.rounding == "gptq" and not any(seen.gram for seen in (inputs or {}).values()):
        raise RecipeError("gptq rounds by what the linears see on calibration text.", "Give a calibration.")


def _refuse(model: ir.Model, linears: list[Linear], source: Path) -> None:
    quantised = [n.op_type for n in model.graph.all_nodes() if n.op_type in _QUANTISED]
    if quantised:
        raise SurgeryError(f"{source} is quantised already (it has {quantised[0]}).", "Give the float graph.")
    if not linears:
        raise SurgeryError(f"{source} has no float weights of linears to quantise.", "Give a float decoder graph.")
