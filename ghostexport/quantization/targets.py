"""What can be asked for, and what a device and a runtime can hold (as real builds showed): refused in time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ghostexport.errors import RecipeError
from ghostexport.validation import require_name

SCALES = ("search", "absmax")
HEADS = ("keep", "int8", "same")
OPERATORS = ("keep", "int8")
ACTIVATIONS = ("none", "static")
KEEPS = ("auto", "none")

#: Forms whose kernels multiply rounded inputs by rounded weights, with one scale per tensor found on calibration text.
STATIC = ("int8", "fp8")


@dataclass(frozen=True)
class Settings:
    """How a graph is quantised, beside the form.

    Attributes:
        block: inputs per scale; None takes the form's first that divides every linear's inputs.
        scales: ``search`` them (see :mod:`ghostexport.quantization.scales`), or ``absmax``: largest magnitude.
        head: what becomes of the head, and with it of a tied embedding: ``keep``, ``int8`` or ``same`` as the rest. One
            quantised table then serves both; TensorRT keeps it small, ONNX Runtime's CPU unpacks it at every step.
        operator: what becomes of operators: ``keep``, or ``int8`` per channel.
        activations: ``none``: weights alone; ``static``: inputs too (see :mod:`ghostexport.quantization.activations`).
        smooth: SmoothQuant's exponent for static inputs; None leaves them as they are.
        keep: ``auto``: inputs with massive values stay as they are; ``none``: every input is rounded.
    """

    block: int | None = None
    scales: str = "search"
    head: str = "keep"
    operator: str = "keep"
    activations: str = "none"
    smooth: float | None = None
    keep: str = "auto"

    def __post_init__(self) -> None:
        require_name(self.scales, SCALES, "way to scale")
        require_name(self.head, HEADS, "way to treat the head")
        require_name(self.operator, OPERATORS, "way to treat operators")
        require_name(self.activations, ACTIVATIONS, "way to treat activations")
        require_name(self.keep, KEEPS, "rule of what is kept")

    @property
    def needs_inputs(self) -> bool:
        """Whether calibration text is run through the graph first."""
        return self.scales == "search" or self.activations == "static"

    def require_form(self, form: str) -> None:
        """Raises: RecipeError: the form has no kernels for rounded inputs, or needs other blocks for them."""
        if self.activations == "static" and form not in STATIC:
            raise RecipeError(
                f"{form} weights with eight-bit inputs: no TensorRT has kernels for them.",
                f"Static activations go with {' and '.join(STATIC)}; give {form} with activations none.",
            )
        if self.activations == "static" and self.block is not None:
            raise RecipeError("Kernels for rounded inputs take one scale per output channel.", "Leave the block out.")


DEFAULTS = Settings()

#: form -> smallest compute capability whose engines hold it. TensorRT-RTX 1.7 refuses the others at build time
#: ("model contains HW-specific datatypes"); Orin is SM87.
SMALLEST_SM: Mapping[str, int] = {"int8": 75, "int4": 75, "fp8": 89, "nvfp4": 120}

#: Data-centre Blackwell (SM100) and Thor (SM110 in TensorRT 10.16) have FP4 units below RTX's 120.
_FP4_TOO = (100, 101, 103, 110)

#: forms that a runtime executes.
HOLDS: Mapping[str, tuple[str, ...]] = {
    "onnxruntime": ("int8", "int4"),
    "tensorrt": ("int8", "int4", "fp8", "nvfp4"),
    "tensorrt-rtx": ("int8", "int4", "fp8", "nvfp4"),
}


def weight_form(types: Iterable[str]) -> str | None:
    """The form that a graph holds its weights in, by the ONNX types of its initializers; None for a float graph."""
    found = set(types)
    for form, type_ in (("nvfp4", "FLOAT4E2M1"), ("fp8", "FLOAT8E4M3FN"), ("int4", "INT4"), ("int8", "INT8")):
        if type_ in found:
            return form
    return None


def refusal(form: str, runtime: str, capabilities: Iterable[str] = ()) -> str | None:
    """Why ``runtime`` cannot hold ``form`` on the targets (``SM86``, ...), and what would fit; None when it can."""
    held = HOLDS[runtime]
    if form not in held:
        return f"{runtime} has no kernels for {form} weights; it holds {', '.join(held)}."
    for capability in capabilities:
        number = re.fullmatch(r"SM(\d+)", capability)
        if number is None or int(number[1]) >= SMALLEST_SM[form]:
            continue
        if form == "nvfp4" and runtime == "tensorrt" and int(number[1]) in _FP4_TOO:
            continue
        fits = [name for name in held if SMALLEST_SM[name] <= int(number[1])]
        return f"{form} needs SM{SMALLEST_SM[form]} or newer and {capability} is older; it holds {', '.join(fits)}."
    return None
