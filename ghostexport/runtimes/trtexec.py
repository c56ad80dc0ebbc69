"""The vendor's command lines that build and time an engine without us, as 10.x, 11.x and TensorRT-RTX spell them.

Timing defaults differ: 10.x copies inputs and outputs, sleeps between launches and uses no CUDA graph unless told
otherwise; 11.x and TensorRT-RTX do the opposite. Both lines here time the same thing: no copies, spin wait, CUDA graph.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ghostexport.recipe import BuildSection
from ghostexport.runtimes.base import Tensor
from ghostexport.runtimes.profiles import Profile

_HARDWARE = {"ampere-plus": "ampere+", "same-compute-capability": "sameComputeCapability"}


def trtexec_lines(
    command: str,
    graph: Path,
    plans: Mapping[Path, Sequence[Profile]],
    inputs: tuple[Tensor, ...],
    settings: BuildSection,
) -> dict[str, list[str]]:
    """Command lines by release (``10.x``, ``11.x``; ``rtx`` for TensorRT-RTX), one per plan and profile timed.

    The first line of a plan builds it and times its first profile; the others load it and time one profile each, all
    at the shapes the profile is tuned for.
    """
    styles: dict[str, tuple[list[str], list[str]]]
    if command == "tensorrt_rtx":
        styles = {"rtx": ([], [])}
    else:
        styles = {
            "10.x": (["--stronglyTyped"], ["--noDataTransfers", "--useSpinWait", "--useCudaGraph"]),
            "11.x": ([], []),
        }
    lines: dict[str, list[str]] = {}
    for style, (typed, timing) in styles.items():
        lines[style] = []
        for plan, profiles in plans.items():
            build = [f"--onnx={graph.name}", f"--saveEngine={plan.name}", *typed, *_options(settings)]
            for index, profile in enumerate(profiles):
                build += [f"--profile={index}", *_shapes(profile, inputs)]
            for index, profile in enumerate(profiles):
                opt = _spec({name: shapes[1] for name, shapes in profile.shapes(inputs).items()})
                start = build if index == 0 else [f"--loadEngine={plan.name}"]
                lines[style].append(shlex.join([command, *start, f"--useProfile={index}", f"--shapes={opt}", *timing]))
    return lines


def _options(settings: BuildSection) -> list[str]:
    options = []
    if settings.workspace is not None:
        options.append(f"--memPoolSize=workspace:{settings.workspace}")
    if settings.opt_level is not None:
        options.append(f"--builderOptimizationLevel={settings.opt_level}")
    if settings.hardware_compatibility in _HARDWARE:
        options.append(f"--hardwareCompatibilityLevel={_HARDWARE[settings.hardware_compatibility]}")
    if settings.version_compatible:
        options.append("--versionCompatible")
    if settings.weight_streaming:
        options.append("--allowWeightStreaming")
    if settings.strip_plan:
        options.append("--stripWeights")
    if settings.refittable:
        options.append("--refit")  # trtexec can only mark all weights
    return options


def _shapes(profile: Profile, inputs: tuple[Tensor, ...]) -> list[str]:
    shapes = profile.shapes(inputs)
    return [
        f"--{point}Shapes={_spec({name: triple[i] for name, triple in shapes.items()})}"
        for i, point in enumerate(("min", "opt", "max"))
    ]


def _spec(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())
