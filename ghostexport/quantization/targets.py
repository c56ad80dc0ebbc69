"""What can be asked for, and what a device and a runtime can hold (as real builds showed): refused in time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ghostexport.errors import RecipeError
from ghostexport.validation import require_name

SCALES = ("search", "absmax")
ROUNDINGS = ("nearest", "gptq")
HEADS = ("keep", "int8", "same")
OPERATORS = ("keep", "int8")
ACTIVATIONS = ("none", "static", "dynamic")
KEEPS = ("auto", "none")

#: Forms whose kernels multiply rounded inputs by rounded weights, with one scale per tensor found on calibration text.
STATIC = ("int8", "fp8")
#: Those whose kernels find the scales of an input's blocks while they run.
DYNAMIC = ("mxfp8", "nvfp4")


@dataclass(frozen=True)
class Settings:
    """How a graph is quantised, beside the form.

    Attributes:
        block: inputs per scale; None takes the form's first that divides every linear's inputs.
        scales: ``search`` them (see :mod:`ghostexport.quantization.scales`), or ``absmax``: largest magnitude.
        rounding: to the ``nearest``, or in turn (``gptq``, :mod:`ghostexport.quantization.gptq`).
        head: what becomes of the head, and with it of a tied embedding: ``keep``, ``int8`` or ``same`` as the rest. One
            quantised table then serves both; TensorRT keeps it small, ONNX Runtime's CPU unpacks it at every step.
        operator: what becomes of operators: ``keep``, or ``int8`` per channel.
        activations: ``none``: weights alone; inputs too: ``static`` (:mod:`ghostexport.quantization.activations`), or
            ``dynamic``, whose scales are found at run time (:mod:`ghostexport.quantization.dynamic`).
        smooth: SmoothQuant's exponent for rounded inputs; None leaves them as they are.
        keep: ``auto``: inputs with massive values stay as they are; ``none``: every input is rounded.
    """

    block: int | None = None
    scales: str = "search"
    rounding: str = "nearest"
    head: str = "keep"
    operator: str = "keep"
    activations: str = "none"
    smooth: float | None = None
    keep: str = "auto"

    def __post_init__(self) -> None:
        require_name(self.scales, SCALES, "way to scale")
        require_name(self.rounding, ROUNDINGS, "way to round")
        require_name(self.head, HEADS, "way to treat the head")
        require_name(self.operator, OPERATORS, "way to treat operators")
        require_name(self.activations, ACTIVATIONS, "way to treat activations")
        require_name(self.keep, KEEPS, "rule of what is kept")

    @property
    def needs_inputs(self) -> bool:
        """Whether calibration text is run through the graph first."""
        return self.scales == "search" or self.rounding == "gptq" or self.activations != "none"

    def require_form(self, form: str) -> None:
        """Raises: RecipeError: the form has no kernels for rounded inputs, or needs other blocks for them."""
        if self.activations == "static" and form not in STATIC:
            raise RecipeError(
                f"{form} weights with eight-bit inputs: no TensorRT has kernels for them.",
                f"Static activations go with {' and '.join(STATIC)}; give {form} with activations none.",
            )
        if self.activations == "dynamic" and form not in DYNAMIC:
            raise RecipeError(
                f"{form} weights with inputs whose scales are found at run time: TensorRT has no kernels for them.",
                f"Dynamic activations go with {' and '.join(DYNAMIC)}; static ones with {' and '.join(STATIC)}.",
            )
        if self.activations == "static" and self.block is not None:
            raise RecipeError("Kernels for rounded inputs take one scale per output channel.", "Leave the block out.")


DEFAULTS = Settings()

#: form -> smallest compute capability whose engines hold it. TensorRT-RTX 1.7 refuses the others at build time
#: ("model contains HW-specific datatypes"); Orin is SM87.
SMALLEST_SM: Mapping[str, int] = {"int8": 75, "int4": 75, "fp8": 89, "mxfp8": 89, "nvfp4": 120}

#: Where TensorRT differs: the units of data-centre Blackwell (SM100) and Thor (SM110 in 10.16) lie below RTX's 120, and
#: its documentation has blocks with scales of eight bits since Blackwell.
_SMALLEST_OF_TENSORRT = {"mxfp8": 100, "nvfp4": 100}

#: forms that a runtime executes.
HOLDS: Mapping[str, tuple[str, ...]] = {
    "onnxruntime": ("int8", "int4"),
    "tensorrt": ("int8", "int4", "fp8", "mxfp8", "nvfp4"),
    "tensorrt-rtx": ("int8", "int4", "fp8", "mxfp8", "nvfp4"),
}


#: form -> ONNX types that a graph of it has; the first that are all there is it.
_HELD_AS: Mapping[str, set[str]] = {
    "nvfp4": {"FLOAT4E2M1"},
    "mxfp8": {"FLOAT8E4M3FN", "UINT8"},  # E8M0 scales, by their bits
    "fp8": {"FLOAT8E4M3FN"},
    "int4": {"INT4"},
    "int8": {"INT8"},
}


def weight_form(types: Iterable[str]) -> str | None:
    """The form that a graph holds its weights in, by the ONNX types of its initializers; None for a float graph."""
    found = set(types)
    return next((form for form, held in _HELD_AS.items() if held <= found), None)


def refusal(form: str, runtime: str, capabilities: Iterable[str] = ()) -> str | None:
    """Why ``runtime`` cannot hold ``form`` on the targets (``SM86``, ...), and what would fit; None when it can."""
    held = HOLDS[runtime]
    if form not in held:
        return f"{runtime} has no kernels for {form} weights; it holds {', '.join(held)}."
    smallest = dict(SMALLEST_SM) | (_SMALLEST_OF_TENSORRT if runtime == "tensorrt" else {})
    for capability in capabilities:
        number = re.fullmatch(r"SM(\d+)", capability)
        if number is None or int(number[1]) >= smallest[form]:
            continue
        fits = [name for name in held if smallest[name] <= int(number[1])]
        return f"{form} needs SM{smallest[form]} or newer and {capability} is older; it holds {', '.join(fits)}."
    return None
