"""Optimization profiles: the ranges of batch, tokens and past that an engine accepts, derived from one rule table."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ghostexport.errors import RecipeError
from ghostexport.recipe import BuildSection
from ghostexport.runtimes.base import Tensor

Range = tuple[int, int, int]
Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class Profile:
    """One optimization profile; every range is ``(min, opt, max)``.

    Attributes:
        name: ``prefill``, ``decode`` or ``single``, with the upper limits appended where there are several.
        batch: sequences. tokens: new tokens of the call. past: tokens in the KV cache before it.
    """

    name: str
    batch: Range
    tokens: Range
    past: Range

    @property
    def ranges(self) -> Mapping[str, Range]:
        """Ranges by role; total = past + tokens, point by point."""
        total = tuple(p + t for p, t in zip(self.past, self.tokens, strict=True))
        return {"batch": self.batch, "tokens": self.tokens, "past": self.past, "total": (total[0], total[1], total[2])}

    def shapes(self, inputs: tuple[Tensor, ...]) -> Shapes:
        """Input name -> ``(min, opt, max)`` shapes; only inputs with a dim of some role.

        Raises:
            RecipeError: a dim of the graph is static and outside the profile.
        """
        result: Shapes = {}
        for tensor in inputs:
            if any(isinstance(d, str) for d in tensor.dims):
                low, opt, high = (
                    tuple(d if isinstance(d, int) else self.ranges[d][point] for d in tensor.dims) for point in range(3)
                )
                result[tensor.name] = (low, opt, high)
        return result


def require_capacity(settings: BuildSection, capacity: int) -> None:
    """Checks the limits against the fixed capacity of a cache that the graph updates in place.

    Raises:
        RecipeError: a prompt, or a token after the longest past, would not fit.
    """
    tokens, past = min(settings.max_tokens, capacity), min(settings.max_past, capacity - 1)
    if (tokens, past) != (settings.max_tokens, settings.max_past):
        raise RecipeError(
            f"The graph's KV cache holds {capacity} tokens, too few for build.max_tokens {settings.max_tokens} or for "
            f"a token after build.max_past {settings.max_past}.",
            f"Give --max-tokens {tokens} --max-past {past}.",
        )


def plan_profiles(settings: BuildSection, inputs: tuple[Tensor, ...]) -> tuple[Profile, ...]:
    """The profiles that ``settings`` ask for, checked against the graph's static dims.

    Prefill: tokens 1..max, past 0..max, tuned for the longest prompt at past 0. Decode: one token, past 0..max, tuned
    for a half-full cache. Single: both ranges in one profile, tuned for the longest prompt.

    Raises:
        RecipeError: limits contradict each other or the graph.
    """
    _require_inside("batch_points", settings.batch_points, "max_batch", settings.max_batch)
    _require_inside("token_points", settings.token_points, "max_tokens", settings.max_tokens)
    if settings.opt_batch > settings.max_batch:
        raise RecipeError(
            f"build.opt_batch {settings.opt_batch} is above build.max_batch {settings.max_batch}.",
            "Need 1 <= opt <= max.",
        )
    batches = _split((*settings.batch_points, settings.max_batch), settings.opt_batch)
    tokens = _split((*settings.token_points, settings.max_tokens), settings.max_tokens)
    past: Range = (0, 0, settings.max_past)
    half: Range = (0, (settings.max_past + 1) // 2, settings.max_past)
    first = "single" if settings.profiles == "single" else "prefill"
    profiles = [Profile(_name(first, b, t, len(batches), len(tokens)), b, t, past) for b in batches for t in tokens]
    if settings.profiles != "single":
        profiles += [Profile(_name("decode", b, (1, 1, 1), len(batches), 1), b, (1, 1, 1), half) for b in batches]
    for role, value in _static(inputs).items():
        for profile in profiles:
            if set(profile.ranges[role]) != {value}:
                raise RecipeError(
                    f"The graph has a fixed {role} size of {value}, but profile {profile.name} asks for "
                    f"{profile.ranges[role]} (min, opt, max).",
                    "Export with dynamic axes, or ask for exactly that size.",
                )
    return tuple(profiles)


def _split(limits: tuple[int, ...], opt: int) -> list[Range]:
    # limits 128, 512 -> 1..128 and 129..512; opt is clipped into each range
    lows = (1, *(limit + 1 for limit in limits[:-1]))
    return [(low, min(max(opt, low), high), high) for low, high in zip(lows, limits, strict=True)]


def _name(base: str, batch: Range, tokens: Range, batches: int, lengths: int) -> str:
    return base + (f"-b{batch[2]}" if batches > 1 else "") + (f"-t{tokens[2]}" if lengths > 1 else "")


def _require_inside(name: str, points: tuple[int, ...], limit_name: str, limit: int) -> None:
    if list(points) != sorted(set(points)) or (points and points[-1] >= limit):
        raise RecipeError(
            f"build.{name} {list(points)} must ascend and stay below build.{limit_name} {limit}.",
            "They are inner limits: 128 with a maximum of 512 gives the ranges 1..128 and 129..512.",
        )


def _static(inputs: tuple[Tensor, ...]) -> dict[str, int]:
    """Roles that the token ids have fixed to a number."""
    ids = next((t for t in inputs if t.name in ("input_ids", "inputs_embeds")), None)
    return {r: d for r, d in zip(("batch", "tokens"), ids.dims if ids else (), strict=False) if isinstance(d, int)}


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
                opt = shape_spec({name: shapes[1] for name, shapes in profile.shapes(inputs).items()})
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
        f"--{point}Shapes={shape_spec({name: triple[i] for name, triple in shapes.items()})}"
        for i, point in enumerate(("min", "opt", "max"))
    ]


def shape_spec(shapes: Mapping[str, Sequence[int]]) -> str:
    """Shapes as trtexec takes them: ``input_ids:1x16,attention_mask:1x32``."""
    return ",".join(f"{name}:{'x'.join(map(str, shape))}" for name, shape in shapes.items())
