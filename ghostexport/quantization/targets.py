"""What can be asked for, and what a device and a runtime can hold (as real builds showed): refused in time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

SCALES = ("search", "absmax")
HEADS = ("keep", "int8", "same")

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
