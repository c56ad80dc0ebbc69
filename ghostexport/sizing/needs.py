"""What every stage needs of memory, disk and time, from the sizes of a model and the recipe alone.

The figures are counted, not fitted to measurements: memory is what the process itself takes, files that it maps left
out where nothing is copied; disk is what is there at the stage's peak and was not before. Times are products over the
machine's own rate, and bytes over an assumed one of the disk; they tell minutes from hours. What one run took:
``benchmarks/results/scale.json``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghostexport.recipe import BEST, HEAL, REFIT, Recipe, base_operator
from ghostexport.recovery.registry import OPERATORS
from ghostexport.sizing.capacity import DISK_RATE

if TYPE_CHECKING:
    from ghostexport.models.shape import ModelShape

#: Bytes of a number.
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

#: Python with PyTorch, transformers and ONNX Runtime, before any weight.
LIBRARIES = 700e6

#: Tokens of one forward pass over the calibration set, at least one sequence (:data:`calibration.BATCH_TOKENS`).
BATCH = 2048

#: Float32 values of width ``C``, and of width ``I``, that a block holds per token on its way.
STREAMS, INNERS = 12, 3

#: Forward passes that a trained operator takes per epoch: forward and backward, and its teacher's.
TRAINED_PASSES = 4.0


@dataclass(frozen=True)
class Need:
    """What one stage needs.

    Attributes:
        stage: its name.
        memory: bytes of its process at its peak, that it must have to itself.
        disk: bytes on the disk at its peak that were not there before.
        seconds: about.
        parts: what the memory is for -> bytes.
    """

    stage: str
    memory: float
    disk: float
    seconds: float
    parts: dict[str, float]


def operators_of(recipe: Recipe) -> list[str]:
    """Names of the operators; ``best`` and ``heal`` as what they stand for on most models."""
    meant = {BEST: f"ghost-split{REFIT}", HEAL: "ghost-healed"}
    return [meant.get(base_operator(name), name) for name in recipe.recover.operators]


@dataclass(frozen=True)
class _Sizes:
    """Bytes that the stages' needs are made of."""

    shape: ModelShape
    recipe: Recipe

    @property
    def number(self) -> int:
        return BYTES[self.recipe.model.dtype]

    @property
    def weights(self) -> float:
        return self.shape.parameters * self.number

    @property
    def tokens(self) -> int:
        return self.recipe.calibration.sequences * self.recipe.calibration.length

    @property
    def removed(self) -> int:
        spans = self.recipe.select.spans
        return self.recipe.select.prune or sum(stop - start for start, stop in spans or ())

    @property
    def cuts(self) -> int:
        return len(self.recipe.select.spans or (0,))

    @property
    def kept(self) -> float:
        """Share of the weights that a cut model keeps."""
        return 1 - self.removed / self.shape.blocks * self.shape.in_blocks / self.shape.parameters

    @property
    def behind(self) -> float:
        """Numbers of the weights behind the first cut: half of the kept blocks, while it is not known where it is."""
        first = self.recipe.select.spans[0][1] if self.recipe.select.spans else self.shape.blocks // 2 + self.removed
        return self.shape.in_blocks / self.shape.blocks * max(0, self.shape.blocks - first)

    @property
    def pass_products(self) -> float:
        """Multiply-adds of one pass of the calibration set through the blocks."""
        return float(self.shape.in_blocks) * self.tokens

    @property
    def activations(self) -> float:
        width = STREAMS * self.shape.hidden + INNERS * self.shape.widest
        return 4.0 * max(BATCH, self.recipe.calibration.length) * width

    @property
    def moments(self) -> float:
        """Gram and cross products of one cut, float64."""
        return 16.0 * self.shape.hidden**2

    @property
    def new_weights(self) -> float:
        """Bytes of what each variant stores of its own, all variants together."""
        changed = [name for name in operators_of(self.recipe) if _changes_weights(name)]
        return 4.0 * self.cuts * self.shape.hidden**2 * len(operators_of(self.recipe)) + (
            len(changed) * self.behind * self.number
        )


def _changes_weights(name: str) -> bool:
    return name.endswith(REFIT) or OPERATORS[base_operator(name)].train is not None


#: ``parts of the memory, disk, bytes moved, multiply-adds``
_Figures = tuple[dict[str, float], float, float, float]


def _calibrate(sizes: _Sizes) -> _Figures:
    return {"text": 200e6}, 16.0 * sizes.tokens, 16.0 * sizes.tokens, 0.0


def _select(sizes: _Sizes) -> _Figures:
    gathered = sizes.cuts * (sizes.moments + 8 * 4096 * sizes.shape.hidden)
    gradients = sizes.weights * ("taylor" in (sizes.recipe.select.criterion, sizes.recipe.select.base))
    parts = {"weights": sizes.weights, "activations": sizes.activations, "moments": gathered, "gradients": gradients}
    return parts, gathered, sizes.weights + gathered, 1.125 * sizes.pass_products


def _recover(sizes: _Sizes) -> _Figures:
    from ghostexport.recovery.recover import PASS, REFIT_PASSES

    names = operators_of(sizes.recipe)
    kinds = [OPERATORS[base_operator(name)] for name in names]
    inner = sizes.shape.hidden + sizes.shape.widest
    inside = any("last-block" in kind.needs for kind in kinds)
    refits = sum(name.endswith(REFIT) for name in names)
    healed = any(kind.heals for kind in kinds)
    trained = sizes.behind * (0.1 if sizes.recipe.recover.heal_rank else 1)  # gradient, two moments, float32 copy
    epochs = sizes.recipe.recover.epochs or 8
    sets = 1 + any("weighted" in kind.needs for kind in kinds)
    folds = 4 if sizes.recipe.recover.ridge == "cv" else 1
    parts = {
        "weights": sizes.weights,
        "activations": sizes.activations,
        "moments": sizes.cuts * sets * folds * sizes.moments,
        "moments inside a block": 8.0 * inside * (2 * inner * (inner + sizes.shape.hidden) + 2 * inner**2),
        "refits": refits * sizes.behind * sizes.number + bool(refits) * 24.0 * sizes.shape.widest**2,
        "training": 16.0 * trained * healed,
    }
    folded = sum(OPERATORS[base_operator(name)].folded for name in names) * sizes.kept * sizes.weights
    disk = sizes.new_weights + folded
    passes = PASS + REFIT_PASSES * refits + TRAINED_PASSES * epochs * healed
    return parts, disk, sizes.weights + disk, passes * sizes.pass_products


def _export(sizes: _Sizes) -> _Figures:
    return {"weights": sizes.weights, "trace": 0.2 * sizes.weights}, sizes.weights, 3 * sizes.weights, 0.0


def _surgery(sizes: _Sizes) -> _Figures:
    return {"new weights": sizes.new_weights}, sizes.new_weights, 2 * sizes.new_weights, 0.0


def _quantize(sizes: _Sizes) -> _Figures:
    bits = {"int8": 9, "fp8": 9, "mxfp8": 9, "int4": 5, "nvfp4": 5}  # with scales
    variants = len(sizes.recipe.float_variants) - 1
    kept = 1 + (variants - 1) * sizes.kept
    disk = sum(bits[form] / 8 for form in sizes.recipe.quantize.format) * kept * sizes.shape.parameters
    return {"weights": 2 * sizes.weights}, disk, variants * 2 * sizes.weights + disk, 0.0


def _verify(sizes: _Sizes) -> _Figures:
    outside = sizes.shape.parameters - sizes.shape.in_blocks
    twin = 4.0 * sizes.shape.parameters if sizes.recipe.model.dtype == "bfloat16" else 0.0
    half = 4.0 - sizes.number  # what is widened
    parts = {
        "weights": sizes.weights,
        "widened parts": (2 * outside + sizes.shape.largest_block) * half,
        "outputs": 4.0 * 2 * 64 * sizes.shape.vocabulary * 3,
    }
    return parts, twin, len(sizes.recipe.variants) * (sizes.weights + 2 * twin), 100.0 * sizes.shape.parameters


def _build(sizes: _Sizes) -> _Figures:
    variants, runtimes = len(sizes.recipe.variants), sizes.recipe.build.runtimes or ("onnxruntime",)
    kept = 1 + (variants - 1) * sizes.kept
    engines = {"onnxruntime": 2 * sizes.weights + sizes.new_weights}
    disk = sum(engines.get(runtime, kept * sizes.weights) for runtime in runtimes)
    factor = max({"onnxruntime": 1.5}.get(runtime, 3.0) for runtime in runtimes)
    return {"weights": factor * sizes.weights}, disk, 4 * variants * len(runtimes) * sizes.weights, 0.0


def _bench(sizes: _Sizes) -> _Figures:
    held = 1 + (len(sizes.recipe.variants) - 1) * sizes.kept
    return {"engines": held * sizes.weights}, 0.0, held * sizes.weights, 0.0


NEEDS: dict[str, Callable[[_Sizes], _Figures]] = {
    "calibrate": _calibrate,
    "select": _select,
    "recover": _recover,
    "export": _export,
    "surgery": _surgery,
    "quantize": _quantize,
    "verify": _verify,
    "build": _build,
    "bench": _bench,
}


def needs_of(shape: ModelShape, recipe: Recipe, rate: float) -> list[Need]:
    """What every stage of the main job needs, in order; ``rate`` is the machine's, in multiply-adds a second."""
    stages = ("calibrate", "select", "recover", "export", "surgery", "quantize", "verify", "build", "bench")
    return [need_of(stage, shape, recipe, rate) for stage in stages if stage != "quantize" or recipe.quantize.format]


#: Stages that can leave the weights in their files -> residual values kept per token at a time, over those of a run.
STREAMING = {"select": 2, "recover": 4}

#: Bytes of residual values in memory, of a few shelves (:data:`ghostexport.models.walking.ROOM` each).
SHELVES = 1.5e9


def need_of(stage: str, shape: ModelShape, recipe: Recipe, rate: float = 1e11, streamed: bool = False) -> Need:
    """What one stage needs; ``streamed``: its weights stay in the files they are mapped from, read block by block."""
    sizes = _Sizes(shape, recipe)
    parts, disk, moved, products = NEEDS[stage](sizes)
    if streamed:
        kept = STREAMING[stage] + sizes.removed * (stage == "select")
        streams = float(kept) * sizes.tokens * shape.hidden * sizes.number
        parts |= {"weights": 0.0, "residual values": min(streams, SHELVES)}
        disk += max(0.0, streams - SHELVES)
    parts = {"libraries": LIBRARIES, **{name: size for name, size in parts.items() if size}}
    return Need(stage, sum(parts.values()), disk, products / rate + moved / DISK_RATE, parts)
