"""What to do: a :class:`Recipe` is strict, hashed and kept in the run folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from ghostexport.errors import RecipeError
from ghostexport.quantization.targets import SMALLEST_SM, Settings
from ghostexport.recipe_measuring import BENCH_PRESETS as BENCH_PRESETS
from ghostexport.recipe_measuring import BenchSection as BenchSection
from ghostexport.recipe_measuring import EvalSection as EvalSection
from ghostexport.recovery.registry import OPERATORS
from ghostexport.selection.criteria import CRITERIA
from ghostexport.validation import WHOLE, Section, explain, require_each_once, require_name

Dtype = Literal["auto", "float32", "float16", "bfloat16"]

#: Suffix of an operator's name: the blocks after the cut are refitted too (``ghost-weighted+refit``).
REFIT = "+refit"

#: Stands for the best closed form that applies to the model: ghost-split+refit, else ghost-weighted+refit, else
#: ghost-weighted. A run's ``recipe.yaml`` has the name it stands for.
BEST = "best"

#: Stands for ghost-healed, or ghost-weighted-healed where no ghost-split can be solved to start from.
HEAL = "heal"

#: ``--quality``, in the order of cost: the published operator, the best closed form, and that healed with gradients.
QUALITIES: dict[str, tuple[str, ...]] = {"paper": ("ghost",), "best": (BEST,), "heal": (HEAL,)}


def _operators(names: tuple[str, ...]) -> tuple[str, ...]:
    return require_each_once(names, [base_operator(name) for name in names], (*OPERATORS, BEST, HEAL), "operator")


def _runtimes(names: tuple[str, ...]) -> tuple[str, ...]:
    from ghostexport.runtimes import RUNTIMES  # reads recipes itself

    return require_each_once(names, names, RUNTIMES, "runtime")


def _forms(names: tuple[str, ...]) -> tuple[str, ...]:
    return require_each_once(names, names, SMALLEST_SM, "format")


def _listed(given: Any) -> Any:
    return () if given in ("none", ["none"], ("none",)) else [given] if isinstance(given, str) else given


class ModelSection(Section):
    """Which model, in which precision; ``trust_remote_code`` runs the Python code that the source brings.

    ``auto``: half precision as the checkpoint has it where a GPU will run the engines, float32 where a CPU will and
    has room for it. A run's ``recipe.yaml`` has the dtype it stands for.
    """

    source: str
    revision: str | None = None
    dtype: Dtype = "auto"
    trust_remote_code: bool = False


class CalibrationSection(Section):
    """Text: where from (one source, or several with shares, ``c4:96``), how many windows of how many tokens to fit and
    to measure on, which draw, BOS in front."""

    source: str | Annotated[tuple[str, ...], Field(min_length=1)] = "wikitext2"
    sequences: Annotated[int, Field(ge=1)] = 128
    length: Annotated[int, Field(ge=2)] = 2048
    held_out_sequences: Annotated[int, Field(ge=1)] = 16
    seed: int = 0
    bos: bool = True


class SelectSection(Section):
    """Which blocks go.

    Attributes:
        criterion: chooses them, unless ``spans`` says which.
        prune: how many.
        spans: half-open runs, instead of a criterion.
        protect_first, protect_last: blocks at the ends that stay; None for what the criterion's paper protects.
        base: score that ``prune-and-comp`` ranks by: shortgpt, taylor, magnitude or perplexity.
        search_minutes: time that ``search`` takes, at most, beyond the plan that it is judging.
    """

    criterion: Annotated[str, AfterValidator(lambda name: require_name(name, CRITERIA, "criterion"))] = "streamline"
    prune: Annotated[int, Field(ge=1)] | None = None
    spans: tuple[tuple[int, int], ...] | None = None
    protect_first: Annotated[int, Field(ge=0)] | None = None
    protect_last: Annotated[int, Field(ge=0)] | None = None
    base: str = "shortgpt"
    search_minutes: Annotated[float, Field(gt=0)] = 15.0

    def require_removal(self) -> None:
        """Raises RecipeError unless the section says what to remove, once."""
        if (self.prune is None) == (self.spans is None):
            raise RecipeError(
                "It must be said what to remove: either a number of blocks or a plan.",
                "Give --prune 7 (a criterion chooses), or --plan '[[10, 17]]' (half-open spans).",
            )


class RecoverSection(Section):
    """How the cut is repaired.

    Attributes:
        operators: kinds, each optionally with the suffix ``+refit``.
        solver: of ``ghost``: ``normal`` equations under ``ridge``, or the truncated pseudo-inverse (``svd``).
        statistics: of cuts behind the first: ``dense`` = all on the dense model; ``sequential`` = each on the model
            that is already cut and repaired before it, towards the dense model's stream.
        per_block: plans of several runs get the product of one map per removed block instead of one map per run.
        ratio: LinearPatch's scale: mean over sequences of the ratio (its code), or ratio of the means (its paper).
        epochs: passes of the trained kinds over the calibration set; None for their published number.
        learning_rate: highest one of the healed kinds; None for 2e-4, and ten times that with a rank.
        heal_rank: healed linear layers change by a matrix of this rank: less memory; None for whole weights.
        weights: checkpoint folder of the cut model, trained elsewhere: operator ``tuned``, alone where none is named.
        ridge: absolute ``lambda`` of the least-squares kinds; ``cv`` chooses it by 4-fold cross-validation.
        rank: rank of their matrices; None for full.
        refit_upstream: kept blocks before each cut that ``+refit`` also refits.

    Two more keys are read and resolved into ``operators``: ``quality`` (:data:`QUALITIES`) replaces the list, and
    ``refit_downstream`` puts ``+refit`` behind every name (true) or takes it away (false).
    """

    resolved: ClassVar[tuple[str, ...]] = ("quality", "refit_downstream")
    operators: Annotated[tuple[str, ...], AfterValidator(_operators)] = ("ghost", "linearpatch-rotate")
    ridge: Annotated[float, Field(ge=0)] | Literal["cv"] = 1e-6
    rank: Annotated[int, Field(ge=1)] | None = None
    refit_upstream: Annotated[int, Field(ge=0)] = 0
    solver: Literal["normal", "svd"] = "normal"
    statistics: Literal["dense", "sequential"] = "dense"
    per_block: bool = False
    ratio: Literal["mean-of-ratios", "ratio-of-means"] = "mean-of-ratios"
    epochs: Annotated[int, Field(ge=1)] | None = None
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    heal_rank: Annotated[int, Field(ge=1)] | None = None
    weights: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = dict(data)
        quality, everywhere = given.pop("quality", None), given.pop("refit_downstream", None)
        if given.get("weights") is not None:
            given.setdefault("operators", ("tuned",))
        if quality is not None:
            require_name(str(quality), QUALITIES, "quality")
            given["operators"] = QUALITIES[str(quality)]
        if everywhere is not None:
            names = given.get("operators", cls.model_fields["operators"].default)
            if not isinstance(everywhere, bool):
                raise RecipeError(f"recover.refit_downstream: {everywhere!r} is not true or false.")
            if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):  # else refused below
                given["operators"] = tuple(base_operator(name) + REFIT * everywhere for name in names)
        return given


class ExportSection(Section):
    """Who exports, and to which ONNX operator set."""

    exporter: Literal["auto", "transformers", "optimum"] = "auto"
    opset: Annotated[int, Field(ge=18, le=26)] = 20


class QuantizeSection(Section):
    """Which quantised variants there are beside the float ones; see :mod:`ghostexport.quantization`.

    Attributes:
        format: a form, ``none`` or a list; every variant but ``pruned`` exists in each: ``dense.int4``, ``ghost.int4``.
        block, scales, rounding, head, operator, activations, smooth, keep:
            :class:`ghostexport.quantization.targets.Settings`.
    """

    format: Annotated[tuple[str, ...], BeforeValidator(_listed), AfterValidator(_forms)] = ()
    block: Annotated[int, Field(ge=1)] | None = None
    scales: str = "search"
    rounding: str = "nearest"
    head: str = "keep"
    operator: str = "keep"
    activations: str = "none"
    smooth: Annotated[float, Field(gt=0, lt=1)] | None = None
    keep: str = "auto"

    @model_validator(mode="after")
    def _supported(self) -> QuantizeSection:
        settings = self.settings
        for form in self.format:
            settings.require_form(form)
        return self

    @property
    def settings(self) -> Settings:
        """All but the formats."""
        return Settings(**self.model_dump(exclude={"format"}))


class BuildSection(Section):
    """How engines are shaped. Sizes are in sequences (batch) and tokens; an option a runtime lacks is refused.

    Attributes:
        runtimes: runtimes to build for; empty chooses the best one usable here.
        profiles: ``joint`` = prefill and decode profiles in one plan, ``split`` = one plan each, ``single`` = one
            profile for both.
        max_batch, opt_batch: largest batch and the one kernels are tuned for.
        max_tokens, max_past: most new tokens of one call, and most tokens in the KV cache before it (at least 0).
        batch_points, token_points: inner upper limits; each splits the prefill (and decode) range once more.
        workspace: builder workspace limit in MiB.
        hardware_compatibility: GPUs other than the building one that may load the plan.
        version_compatible: later TensorRT versions may load the plan.
        weight_streaming: weights may stay in host memory (models larger than the GPU's).
        strip_plan: leave refittable weights out of the plan.
        refittable: operators can be swapped without a rebuild.
        opt_level: builder optimization level, 0 (fast build) to 5.
        compute_capability: TensorRT-RTX ahead-of-time targets such as ``SM86``, or ``CURRENT``.
        providers: ONNX Runtime providers in order; empty chooses by what is installed.
    """

    runtimes: Annotated[tuple[str, ...], AfterValidator(_runtimes)] = ()
    profiles: Literal["joint", "split", "single"] = "joint"
    max_batch: Annotated[int, Field(ge=1)] = 4
    opt_batch: Annotated[int, Field(ge=1)] = 1
    max_tokens: Annotated[int, Field(ge=1)] = 512
    max_past: Annotated[int, Field(ge=1)] = 1023
    batch_points: tuple[Annotated[int, Field(ge=1)], ...] = ()
    token_points: tuple[Annotated[int, Field(ge=1)], ...] = ()
    workspace: Annotated[int, Field(ge=1)] | None = None
    hardware_compatibility: Literal["none", "ampere-plus", "same-compute-capability"] = "none"
    version_compatible: bool = False
    weight_streaming: bool = False
    strip_plan: bool = False
    refittable: bool = False
    opt_level: Annotated[int, Field(ge=0, le=5)] | None = None
    compute_capability: tuple[Annotated[str, Field(pattern=r"^(SM\d+|CURRENT)$")], ...] = ()
    providers: tuple[Literal["tensorrt", "nv-tensorrt-rtx", "cuda", "cpu"], ...] = ()


class Recipe(Section):
    """Everything that changes an artefact. A run folder's ``recipe.yaml`` is one, with all defaults written out."""

    whole: ClassVar[bool] = True

    model: ModelSection
    calibration: CalibrationSection = CalibrationSection()
    select: SelectSection = SelectSection()
    recover: RecoverSection = RecoverSection()
    export: ExportSection = ExportSection()
    quantize: QuantizeSection = QuantizeSection()
    build: BuildSection = BuildSection()
    bench: BenchSection = BenchSection()
    eval: EvalSection = EvalSection()

    @property
    def variants(self) -> tuple[str, ...]:
        """``dense``, ``pruned``, one per operator, then the quantised ones, in report order."""
        return (*self.float_variants, *self.quantized_variants)

    @property
    def float_variants(self) -> tuple[str, ...]:
        return ("dense", "pruned", *self.recover.operators)

    @property
    def quantized_variants(self) -> tuple[str, ...]:
        """``dense.int4``, ``ghost.int4``, ...: nobody deploys ``pruned``, so it stays float."""
        sources = [variant for variant in self.float_variants if variant != "pruned"]
        return tuple(f"{variant}.{form}" for form in self.quantize.format for variant in sources)

    def section_sha256(self, names: Iterable[str]) -> str:
        """Hash of some sections; a stage is stale when the hash of the sections it reads changes."""
        data = {name: getattr(self, name).model_dump(mode="json") for name in sorted(names)}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    @property
    def sha256(self) -> str:
        return self.section_sha256(type(self).model_fields)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def parse_recipe(data: Any, origin: str = "recipe") -> Recipe:
    """Validates plain data (from YAML or flags) into a recipe.

    Raises:
        RecipeError: the message names the field path, the valid names and the nearest one.
    """
    try:
        return Recipe.model_validate_json(json.dumps(data), context=WHOLE)
    except ValidationError as error:
        raise RecipeError("\n".join(explain(Recipe, origin, e) for e in error.errors())) from None
    except TypeError as error:
        raise RecipeError(f"{origin}: {error}", "A recipe has mappings, lists, strings and numbers.") from None


def read_recipe(path: Path) -> dict[str, Any]:
    """Reads a recipe file as plain data, not yet validated (flags may complete it)."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"Recipe {path} does not exist.", "Give the path of a YAML file.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"Recipe {path} is not readable YAML: {error}") from None
    if not isinstance(data, dict):
        sections = ", ".join(Recipe.model_fields)
        raise RecipeError(f"Recipe {path} is not a mapping of sections.", f"Sections: {sections}.")
    return data


def float_variant(name: str) -> str:
    """The float variant that a variant is made from: ``ghost`` for ``ghost`` and for ``ghost.int4``."""
    return name.partition(".")[0]


def is_repaired(variant: str) -> bool:
    """Whether a variant, float or quantised, has operators; ``dense.int4`` has none."""
    return float_variant(variant) not in ("dense", "pruned")


def base_operator(name: str) -> str:
    """The kind of an operator name, without ``+refit``."""
    return name.removesuffix(REFIT)
