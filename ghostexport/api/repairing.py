"""From a model to a smaller, repaired one: load, calibrate, select, recover, apply, evaluate, save."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, overload

from typing_extensions import Unpack

from ghostexport.api.options import (
    CalibrateOptions,
    EvaluateOptions,
    LoadOptions,
    Plan,
    RecoverOptions,
    SelectOptions,
    drawn_of,
    held_out_of,
    operators_of,
    options_of,
    plan_of,
)
from ghostexport.errors import RecipeError
from ghostexport.execution import Execution
from ghostexport.operators import OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import CalibrationSection, EvalSection, ModelSection, Recipe, RecoverSection, SelectSection

if TYPE_CHECKING:
    from ghostexport.calibration import CalibrationSet, Tokens
    from ghostexport.evaluation.quality_meter import Quality
    from ghostexport.models import LoadedModel

_CALIBRATION, _RECOVER = CalibrationSection(), RecoverSection()
_DENSE = "dense model"  # no name that a user gives


@options_of(ModelSection(source=""), LoadOptions)
def load(
    source: str | Path, *, device: str | None = None, execution: Execution | None = None, **options: Unpack[LoadOptions]
) -> LoadedModel:
    """Loads a decoder-only causal LM and its tokenizer.

    Args:
        source: Hub id, local folder, ``.gguf`` file, ``smollm2``, or a folder that :func:`save` wrote.
        device: ``auto``, ``cpu``, ``cuda``, ...; default: that of ``execution``.
        execution: how to run.
        options: ``dtype``, ``revision``, ``trust_remote_code``.

    Raises:
        RecipeError: the source or the dtype does not exist.
        ModelLayoutError: not a decoder-only LM made of residual blocks.
    """
    from ghostexport.models import load_model
    from ghostexport.resolution import choose_dtype

    section = ModelSection.model_validate({"source": str(source), **options})
    execution = execution or Execution()
    if device is not None:
        execution = replace(execution, device=device)
    dtype = section.dtype
    if dtype == "auto":
        dtype, _ = choose_dtype(Recipe(model=section), execution)
    return load_model(section.source, dtype, execution, section.revision, section.trust_remote_code)


@options_of(_CALIBRATION, CalibrateOptions)
def calibrate(
    model: LoadedModel,
    source: str | Path | Sequence[str | Path] = "wikitext2",
    *,
    execution: Execution | None = None,
    **options: Unpack[CalibrateOptions],
) -> Tokens:
    """Draws token windows ``[N, T]`` with the model's tokenizer, and held-out windows from other documents.

    Args:
        source: ``wikitext2``, ``c4``, ``ptb``, ``demo``, or a ``.txt``, ``.jsonl`` or ``.parquet`` file; or several,
            with their shares: ``["c4:96", "chat.jsonl:32"]``.
        options: of :class:`CalibrationSection`.

    Raises:
        CalibrationError: no tokenizer, an unusable source, or too little text.
    """
    from ghostexport.calibration import draw

    named = str(source) if isinstance(source, str | Path) else tuple(map(str, source))
    return draw(CalibrationSection.model_validate({"source": named, **options}), model.tokenizer, execution)


@options_of(SelectSection(), SelectOptions)
def select(
    model: LoadedModel,
    tokens: Tokens | CalibrationSet,
    *,
    execution: Execution | None = None,
    **options: Unpack[SelectOptions],
) -> PrunePlan:
    """Chooses ``prune`` decoder blocks by a criterion, or takes the ``spans`` given.

    Args:
        options: of :class:`SelectSection`.

    Raises:
        RecipeError: not one of ``prune`` and ``spans`` is given; unknown criterion; more blocks than the model has.
        CalibrationError: tokens that do not suit the model, or non-finite activations.
    """
    from ghostexport.selection import choosing

    section = SelectSection.model_validate(options)
    section.require_removal()
    return choosing.select(model, drawn_of(tokens), section, execution)


@overload
def recover(  # type: ignore[overload-overlap]  # a str is an iterable of str, too
    model: LoadedModel,
    plan: Plan,
    tokens: Tokens,
    operators: str,
    *,
    execution: Execution | None = None,
    **options: Unpack[RecoverOptions],
) -> OperatorSet: ...
@overload
def recover(
    model: LoadedModel,
    plan: Plan,
    tokens: Tokens,
    operators: Iterable[str] = ...,
    *,
    execution: Execution | None = None,
    **options: Unpack[RecoverOptions],
) -> dict[str, OperatorSet]: ...
@options_of(_RECOVER, RecoverOptions)
def recover(
    model: LoadedModel,
    plan: Plan,
    tokens: Tokens,
    operators: str | Iterable[str] = _RECOVER.operators,
    *,
    execution: Execution | None = None,
    **options: Unpack[RecoverOptions],
) -> OperatorSet | dict[str, OperatorSet]:
    """Fits the operators that repair the cuts of a plan.

    Args:
        operators: one name, such as ``ghost-split+refit``, for one set; several for a dict of sets by name.
        options: of :class:`RecoverSection`; ``quality`` takes the place of ``operators``.

    Raises:
        RecipeError: unknown operator or option.
        CalibrationError: too few tokens, or tokens that do not suit the model.
        RecoveryError: a fit is singular, or an operator does not apply to this model.
    """
    from ghostexport.recovery import recover as recovery

    names = (operators,) if isinstance(operators, str) else tuple(operators)
    section = RecoverSection.model_validate({"operators": names, **options})
    sets = recovery.recover(model, plan_of(plan, model.num_blocks), *tokens, section, execution)
    return next(iter(sets.values())) if isinstance(operators, str) else sets


def apply(model: LoadedModel, plan: Plan, operators: OperatorSet | str | Path | None = None) -> LoadedModel:
    """The smaller model: the plan's blocks dropped, the operators inserted. It shares the dense model's weights.

    It generates and is called as the dense model is, with the arguments of transformers: ``small.generate(...)``.

    Args:
        operators: of this plan, or a file of them; None for the bare cut.

    Raises:
        RecipeError: the operators repair another plan, or the model is cut already.
        ModelLayoutError: the plan is about another number of blocks.
    """
    from ghostexport.models import patch

    if model.dense is not None or model.operators is not None:
        raise RecipeError("This model is cut already.", "Apply plan and operators to the dense model.")
    plan, known = plan_of(plan, model.num_blocks), None if operators is None else operators_of(operators)
    if known is not None:
        known.require_plan(plan)
    return patch(model, plan, known)


@overload
def evaluate(
    model: LoadedModel,
    tokens: Tokens | CalibrationSet,
    *,
    execution: Execution | None = None,
    **options: Unpack[EvaluateOptions],
) -> Quality: ...
@overload
def evaluate(
    model: Mapping[str, LoadedModel],
    tokens: Tokens | CalibrationSet,
    *,
    execution: Execution | None = None,
    **options: Unpack[EvaluateOptions],
) -> dict[str, Quality]: ...
@options_of(EvalSection(), EvaluateOptions)
def evaluate(
    model: LoadedModel | Mapping[str, LoadedModel],
    tokens: Tokens | CalibrationSet,
    *,
    execution: Execution | None = None,
    **options: Unpack[EvaluateOptions],
) -> Quality | dict[str, Quality]:
    """Quality of a model on held-out text: perplexity, and KL and agreement with the dense model it was made of.

    Args:
        model: one model, or several by name for a dict of results.
        tokens: their held-out windows are measured; of a :class:`CalibrationSet` all of its windows.
        options: ``windows``, and zero-shot ``tasks`` with their ``limit`` and ``task_folder`` (:class:`EvalSection`).

    Raises:
        RuntimeUnavailableError: lm-eval is missing and tasks were asked for.
    """
    from ghostexport.evaluation import text
    from ghostexport.evaluation.tasks import ask, summarise

    folder = options.pop("task_folder", None)
    section = EvalSection.model_validate(options | {"task_folder": None if folder is None else str(folder)})
    models = dict(model) if isinstance(model, Mapping) else {"model": model}
    dense = next((m.dense for m in models.values() if m.dense is not None), None)
    reference = next((name for name, m in models.items() if m is dense), _DENSE)
    windows, execution = held_out_of(tokens).first(section.windows), execution or Execution()
    measured = models if dense is None else models | {reference: dense}
    forwards = {name: text.forward_of(m, windows.batches(tokens=1), execution) for name, m in measured.items()}
    found = text.evaluate(forwards, windows, None if dense is None else reference, execution)
    if section.tasks:
        tokenizer = next(iter(models.values())).tokenizer
        asked = {name: m.model for name, m in models.items()}
        with tempfile.TemporaryDirectory(prefix="ghostexport-") as scratch:
            own = None if section.task_folder is None else Path(section.task_folder)
            given = ask(asked, tokenizer, section.tasks, own, section.limit, Path(scratch), execution)
        found |= {name: replace(found[name], tasks=figures) for name, figures in summarise(given).items()}
    return {name: found[name] for name in models} if isinstance(model, Mapping) else found["model"]


def save(model: LoadedModel, folder: str | Path) -> list[Path]:
    """Writes a model and its tokenizer as a checkpoint, and returns its files.

    An ordinary one for stock transformers where the operators are folded into weights, or there are none. Others add a
    node that no class of transformers has: they are written beside the weights, transformers refuses the folder, and
    :func:`load` gives the model back.

    Raises:
        RunFolderError: the folder holds other files, or cannot be written.
    """
    from ghostexport.models import save_model

    return save_model(model, Path(folder))
