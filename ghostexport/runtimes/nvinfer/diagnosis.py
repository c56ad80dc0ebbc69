"""What the vendor's library says: its log, known messages as one line each, and its layers with their times."""

from __future__ import annotations

import json
import re
from typing import Any

#: (pattern in the raw text, what it means, what to do); the first match wins.
_KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        r"libnvinfer_lean",
        "a version-compatible plan needs the lean runtime, which is not installed here",
        "Build without --version-compatible.",
    ),
    (
        r"lib(nvinfer|nvonnxparser|tensorrt_rtx|cudart|cublas)[\w.]*: cannot open shared object",
        "the vendor's Python bindings are installed, but not its libraries",
        "Install the full package, or put the libraries' folder on LD_LIBRARY_PATH.",
    ),
    (
        r"No module named '(tensorrt|tensorrt_rtx)",
        "the Python package is not installed",
        "Install it with the extra of the same name.",
    ),
    (
        r"GroupQueryAttention|com\.microsoft|Plugin not found|failed to load \w+ plugin",
        "the graph uses an operator that only ONNX Runtime's providers supply (com.microsoft)",
        "Build with --runtime onnxruntime (its nv-tensorrt-rtx or tensorrt provider handles it), "
        "or export with plain ONNX operators.",
    ),
    (
        r"FP32 GEMM is not supported",
        "this compute capability has no float32 kernels (Turing, SM75)",
        "Export with --dtype float16, or drop SM75 from --compute-capability.",
    ),
    (
        r"graph_jit\.cpp",
        "the builder needs a GPU for a refittable or stripped plan",
        "Build it on the machine that will run it, or build without --refittable and --strip-plan.",
    ),
    (
        r"violate shape constraints|Shape provided for \w+ is inconsistent",
        "a profile contradicts the graph's shapes",
        "Check --max-batch, --max-tokens and --max-past against the graph.",
    ),
    (
        r"(?i)out of ?memory|bad_alloc|Cannot allocate memory|insufficient memory",
        "the builder ran out of memory (it needs three to four times the bytes of the weights)",
        "Lower --max-batch, --max-tokens or --workspace, add swap, or build in half precision.",
    ),
    (
        r"same type|Half.*Float|Float.*Half|type mismatch|mismatched types",
        "operands of one node have different dtypes, which a strongly typed network does not convert",
        "Insert a Cast in the graph, or export the model and its operators in one dtype.",
    ),
    (
        r"Attention operation was not supported by a dedicated kernel",
        "a fused attention of the graph has no kernel for its dtype and shapes",
        "Export with --opset 20, which spells attention out.",
    ),
    (
        r"(?i)could not find any implementation",
        "no kernel fits a node over the profile's whole range",
        "Narrow the range: --profiles split, a smaller --max-tokens, or inner --token-points.",
    ),
    (
        r"(?i)magic tag|serialization assertion|incompatible|version tag|plan file|not compatible|header",
        "the plan was built by another version, flavour or GPU, or is damaged",
        "Build the engine again on this machine.",
    ),
    (
        r"(?i)cuda initialization failure with error:? 2\b",
        "CUDA is out of memory or another process holds the GPU",
        "Free the GPU (nvidia-smi lists its processes).",
    ),
    (
        r"(?i)cuda initialization failure|cudaError(?:_t)?[ :]*35|error:? 35|factory function returned nullptr"
        r"|Unable to determine GPU memory usage|Error reading CUDA GPU properties",
        "there is no usable NVIDIA GPU or driver here",
        "Run on a machine with a GPU and a driver that nvidia-smi can see.",
    ),
)


#: Logged on every machine without a driver whatever the reason of a failure: it counts only when it stands alone.
_NOISE = r"catchCudaError.*cudaError 35"


def explain(raw: str) -> tuple[str, str] | None:
    """``(meaning, remedy)`` of the first known message in ``raw``; None when it is not a known one."""
    lines = raw.splitlines()
    telling = [line for line in lines if not re.search(_NOISE, line)]
    text = "\n".join(telling or lines)
    for pattern, meaning, remedy in _KNOWN:
        if re.search(pattern, text):
            return meaning, remedy
    return None


_LIMIT = 400  # lines; a parser can warn once per node


def capture_log(trt: Any) -> Any:
    """A vendor logger with ``lines`` and ``text``: what was logged at WARNING or worse, oldest first."""

    class Capture(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            kind = {trt.ILogger.INTERNAL_ERROR: "F", trt.ILogger.ERROR: "E", trt.ILogger.WARNING: "W"}.get(severity)
            if kind and len(self.lines) < _LIMIT:
                self.lines.append(f"[{kind}] {message}")

        @property
        def text(self) -> str:
            """Errors, or all lines when there is no error."""
            errors = [line for line in self.lines if not line.startswith("[W]")]
            return "\n".join(errors or self.lines)

    return Capture()


def layer_information(trt: Any, cuda_engine: Any, context: Any) -> dict[str, Any]:
    """The inspector's JSON, ``{"Layers": [...], "Bindings": [...]}``, for the shapes that ``context`` is bound to."""
    inspector = cuda_engine.create_engine_inspector()
    inspector.execution_context = context
    found: dict[str, Any] = json.loads(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
    return found


def layer_timer(trt: Any) -> Any:
    """A vendor profiler with ``milliseconds``: layer name -> time, added up until it is replaced."""

    class Timer(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.milliseconds: dict[str, float] = {}

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.milliseconds[layer_name] = self.milliseconds.get(layer_name, 0.0) + ms

    return Timer()
