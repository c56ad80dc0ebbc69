"""Which build setting concerns which runtime: an option that nothing asked for understands is refused, not ignored."""

from __future__ import annotations

from ghostexport.errors import RecipeError
from ghostexport.recipe import BuildSection

_NVINFER = ("tensorrt", "tensorrt-rtx")

#: Settings that only some runtimes understand.
CONCERNS: dict[str, tuple[str, ...]] = {
    "profiles": _NVINFER,
    "batch_points": _NVINFER,
    "token_points": _NVINFER,
    "workspace": _NVINFER,
    "hardware_compatibility": _NVINFER,
    "version_compatible": _NVINFER,
    "weight_streaming": _NVINFER,
    "strip_plan": _NVINFER,
    "opt_level": _NVINFER,
    "compute_capability": ("tensorrt-rtx",),
    "providers": ("onnxruntime",),
}


def refuse_foreign(runtime: str, settings: BuildSection) -> None:
    """Raises RecipeError when a setting is not at its default and none of the runtimes to build for understands it."""
    default = BuildSection()
    building = {runtime, *settings.runtimes}
    for name, runtimes in CONCERNS.items():
        value = getattr(settings, name)
        if value != getattr(default, name) and building.isdisjoint(runtimes):
            raise RecipeError(
                f"build.{name} = {value!r} means nothing to {', '.join(sorted(building))}.",
                f"It concerns {' and '.join(runtimes)}: remove it, or build for one of these.",
            )
