"""Devices by name: what to build for each, and why. ``--hardware NAME`` fills the recipe; flags beside it win."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ghostexport.errors import RecipeError
from ghostexport.quantization.targets import HOLDS, SMALLEST_SM, refusal
from ghostexport.validation import require_name


@dataclass(frozen=True)
class Hardware:
    """One kind of device.

    Attributes:
        title: what people call it.
        capability: of its GPU, ``SM87``; empty for a CPU.
        runtime: that executes there.
        dtype: of the stream; an edge target never means float32.
        form: of the weights by default.
        opset: of the export.
        ahead_of_time: engines for it can be built on another machine, without the device.
        why: choice -> reason.
        bandwidth: published memory bandwidth in GB/s of one device that goes by the name; None where it is measured.
        bandwidth_of: that device, and what others have.
    """

    title: str
    capability: str
    runtime: str
    dtype: str
    form: str
    opset: int
    ahead_of_time: bool
    why: Mapping[str, str]
    bandwidth: float | None = None
    bandwidth_of: str = ""

    def bytes_per_second(self, given: float | None = None) -> float:
        """Memory bandwidth: that given in GB/s, else the published one, else that of this machine, measured."""
        if given is not None or self.bandwidth is not None:
            return 1e9 * (given or self.bandwidth or 0.0)
        from ghostexport.benchmarking.ideal import measure_ceilings

        measured = measure_ceilings()
        assert measured is not None  # float32 on the CPU can be measured everywhere
        return measured.bytes_per_second

    def whose_bandwidth(self, given: float | None = None) -> str:
        """Where :meth:`bytes_per_second` is from, in words."""
        if given is not None:
            return "as given"
        return f"published for {self.bandwidth_of}" if self.bandwidth_of else "measured on this machine"

    @property
    def forms(self) -> tuple[str, ...]:
        """Forms of weights that it holds."""
        capabilities = (self.capability,) if self.capability else ()
        return tuple(form for form in HOLDS[self.runtime] if refusal(form, self.runtime, capabilities) is None)

    def require(self, forms: Iterable[str]) -> None:
        """Raises RecipeError for a form that it does not hold."""
        for form in forms:
            if form != "none" and require_name(form, SMALLEST_SM, "format") not in self.forms:
                reason = refusal(form, self.runtime, (self.capability,) if self.capability else ())
                raise RecipeError(f"{self.title}: {reason}", f"Give --quantize {self.form}.")

    @property
    def recipe(self) -> dict[str, dict[str, Any]]:
        """Recipe section -> key -> value."""
        build: dict[str, Any] = {"runtimes": [self.runtime]}
        if self.ahead_of_time and self.capability:
            build["compute_capability"] = [self.capability]
        return {
            "model": {"dtype": self.dtype},
            "export": {"opset": self.opset},
            "quantize": {"format": [self.form]},
            "build": build,
        }

    @property
    def lines(self) -> list[str]:
        """Every choice with its reason."""
        chosen = {"runtime": self.runtime, "dtype": self.dtype, "format": self.form, "opset": str(self.opset)}
        lines = [
            f"{self.title}{f' ({self.capability})' if self.capability else ''}: weights in {', '.join(self.forms)}"
        ]
        return lines + [f"  {key} {value}: {self.why[key]}" for key, value in chosen.items()]


_HALF = "half the bytes of float32 at every step, and what the tensor cores multiply in"
_FOUR_BITS = "decode reads every weight for every token, and these are a quarter of float16's bytes"
_OPSET = "the first with block-wise DequantizeLinear, which int4 needs"
_JETSON = "TensorRT comes with JetPack; TensorRT-RTX has no engines for Jetson. Build on the device itself"
_RTX = "TensorRT-RTX engines are compiled here, ahead of time, and finished on the card in seconds"

_ORIN = {
    "runtime": f"{_JETSON} (10.x in JetPack 6)",
    "dtype": _HALF,
    "format": f"{_FOUR_BITS}; Orin has no fp8 or fp4 units",
    "opset": _OPSET,
}


def _jetson(title: str, bandwidth: float, bandwidth_of: str) -> Hardware:
    return Hardware(title, "SM87", "tensorrt", "float16", "int4", 21, False, _ORIN, bandwidth, bandwidth_of)


def _rtx(title: str, capability: str, bandwidth: float, bandwidth_of: str) -> Hardware:
    why = {"runtime": _RTX, "dtype": _HALF, "format": _FOUR_BITS, "opset": _OPSET}
    return Hardware(title, capability, "tensorrt-rtx", "float16", "int4", 21, True, why, bandwidth, bandwidth_of)


HARDWARE: Mapping[str, Hardware] = {
    "orin": _jetson("Jetson AGX Orin or Orin NX", 102.4, "Orin NX; AGX Orin has 204.8"),
    "orin-nano": _jetson("Jetson Orin Nano", 68.0, "the 8 GB module; 102 in its Super mode, 34 the 4 GB module"),
    "thor": Hardware(
        "Jetson Thor",
        "SM110",
        "tensorrt",
        "float16",
        "int4",
        21,
        False,
        {"runtime": _JETSON, "dtype": _HALF, "format": f"{_FOUR_BITS}; nvfp4 is the alternative", "opset": _OPSET},
        273.0,
        "T5000",
    ),
    "rtx30": _rtx("GeForce RTX 30 series", "SM86", 360.0, "RTX 3060 12 GB; RTX 3050 8 GB has 224, RTX 3090 936"),
    "rtx40": _rtx("GeForce RTX 40 series", "SM89", 272.0, "RTX 4060; RTX 4090 has 1008"),
    "rtx50": _rtx("GeForce RTX 50 series", "SM120", 448.0, "RTX 5060; RTX 5090 has 1792"),
    "cpu": Hardware(
        "a CPU",
        "",
        "onnxruntime",
        "float32",
        "int4",
        21,
        True,
        {
            "runtime": "it runs everywhere",
            "dtype": "ONNX Runtime's CPU kernels are float32; half precision is widened at every step",
            "format": _FOUR_BITS,
            "opset": _OPSET,
        },
    ),
}


def find_hardware(name: str) -> Hardware:
    """The device called ``name``.

    Raises:
        RecipeError: unknown; the message names the nearest.
    """
    return HARDWARE[require_name(name, HARDWARE, "hardware")]
