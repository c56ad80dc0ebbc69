"""What the functions of the API take: the keys of a recipe section as keywords, files by path or by what wrote them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar

from pydantic import BaseModel

from ghostexport.operators import OperatorSet, load_operators
from ghostexport.plan import BlockSpan, PrunePlan
from ghostexport.recipe import Dtype

if TYPE_CHECKING:
    from ghostexport.calibration import CalibrationSet, Tokens

_Function = TypeVar("_Function", bound=Callable[..., Any])


class OnDisk(Protocol):
    """What a function wrote: an exported graph, a surgery's report, an engine."""

    @property
    def path(self) -> Path: ...


#: A file: its path, or what wrote it.
File = str | Path | OnDisk

#: What is removed: a plan, or half-open spans such as ``[[10, 17]]``.
Plan = PrunePlan | Iterable[Sequence[int] | BlockSpan]


class LoadOptions(TypedDict, total=False):
    """Keys of :class:`ModelSection`."""

    dtype: Dtype
    revision: str | None
    trust_remote_code: bool


class CalibrateOptions(TypedDict, total=False):
    """Keys of :class:`CalibrationSection`."""

    sequences: int
    length: int
    held_out_sequences: int
    seed: int
    bos: bool


class SelectOptions(TypedDict, total=False):
    """Keys of :class:`SelectSection`."""

    prune: int | None
    spans: Iterable[Sequence[int]] | None
    criterion: str
    protect_first: int | None
    protect_last: int | None
    base: str
    search_minutes: float


class RecoverOptions(TypedDict, total=False):
    """Keys of :class:`RecoverSection`."""

    quality: str
    refit_downstream: bool
    ridge: float | Literal["cv"]
    rank: int | None
    refit_upstream: int
    solver: str
    statistics: str
    per_block: bool
    ratio: str
    epochs: int | None
    learning_rate: float | None
    heal_rank: int | None
    weights: str | None


class EvaluateOptions(TypedDict, total=False):
    """Keys of :class:`EvalSection` that concern one model."""

    windows: int | None
    tasks: Sequence[str]
    task_folder: str | Path | None
    limit: int | None


class ExportOptions(TypedDict, total=False):
    """Keys of :class:`ExportSection`."""

    exporter: str
    opset: int


class BuildOptions(TypedDict, total=False):
    """Keys of :class:`BuildSection`."""

    profiles: str
    max_batch: int
    opt_batch: int
    max_tokens: int
    max_past: int
    batch_points: Sequence[int]
    token_points: Sequence[int]
    workspace: int | None
    hardware_compatibility: str
    version_compatible: bool
    weight_streaming: bool
    strip_plan: bool
    refittable: bool
    opt_level: int | None
    compute_capability: Sequence[str]
    providers: Sequence[str]


class BenchOptions(TypedDict, total=False):
    """Keys of :class:`BenchSection`."""

    preset: str
    batches: Sequence[int]
    prefill_tokens: Sequence[int]
    decode_past: Sequence[int]
    decode_steps: int
    request: Sequence[int]
    repeats: int
    warmup: int
    eval_tokens: int
    seed: int


def options_of(defaults: BaseModel, options: Any) -> Callable[[_Function], _Function]:
    """Shows options in a function's signature, each with its default in a section of the recipe."""

    def shown(function: _Function) -> _Function:
        signature = inspect.signature(function)
        keywords = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(defaults, name, None),
                annotation=hint.__forward_arg__,
            )
            for name, hint in options.__annotations__.items()
        ]
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*own, *keywords])  # type: ignore[attr-defined]
        return function

    return shown


def path_of(file: File) -> Path:
    """Path of a graph or engine."""
    return Path(file) if isinstance(file, str | Path) else file.path


def plan_of(plan: Plan, num_blocks: int) -> PrunePlan:
    """The plan that spans of a model of so many blocks make."""
    return plan if isinstance(plan, PrunePlan) else PrunePlan.from_spans(num_blocks, plan)


def operators_of(operators: OperatorSet | str | Path) -> OperatorSet:
    """Operators, read where a file is named."""
    return operators if isinstance(operators, OperatorSet) else load_operators(Path(operators))


def drawn_of(tokens: Tokens | CalibrationSet) -> CalibrationSet:
    """The windows to choose and fit on."""
    return tokens.calibration if isinstance(tokens, tuple) else tokens


def held_out_of(tokens: Tokens | CalibrationSet) -> CalibrationSet:
    """The windows to measure on."""
    return tokens.held_out if isinstance(tokens, tuple) else tokens
