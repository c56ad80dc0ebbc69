"""What a recipe leaves open and the model or the machine decides; and the model that it names."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from ghostexport.errors import ModelLayoutError, RecipeError
from ghostexport.execution import Execution
from ghostexport.recipe import BEST, HEAL, Dtype, Recipe, base_operator

if TYPE_CHECKING:
    from ghostexport.models import LoadedModel


def source_of(recipe: Recipe, execution: Execution) -> Path:
    """The model as a local folder; converted (GGUF) or downloaded (Hub) on first use."""
    from ghostexport import models

    return models.resolve_source(recipe.model.source, recipe.model.revision, execution)


def config_of(recipe: Recipe) -> Path:
    """The model's ``config.json``, without its weights where the source allows.

    Raises:
        RecipeError: there is none.
    """
    from ghostexport.first_recipe import find_config

    with contextlib.suppress(RecipeError):  # such as a repository of GGUF files
        return find_config(recipe.model.source, "", recipe.model.revision)
    return source_of(recipe, Execution()) / "config.json"


def loaded_of(recipe: Recipe, execution: Execution) -> LoadedModel:
    """The model, loaded as the recipe says."""
    from ghostexport import models

    section = recipe.model
    execution.progress("load the model", 0, None)
    loaded = models.load_model(
        section.source, section.dtype, execution, section.revision, trust_remote_code=section.trust_remote_code
    )
    execution.progress("load the model", 1, 1)
    return loaded


def resolve(recipe: Recipe, execution: Execution, fitting: bool) -> tuple[Recipe, LoadedModel | None]:
    """The recipe with nothing left to choose, and the model where that had to be looked at.

    Args:
        recipe: of :func:`resolve_machine`.
        execution: how to run.
        fitting: operators will be fitted.

    Raises:
        GhostExportError: what is named does not exist or does not apply.
    """
    loaded = None
    if recipe.recover.weights is not None and recipe.select.prune is None and recipe.select.spans is None:
        from ghostexport.recovery.trained.tuned import removed_spans

        loaded = loaded_of(recipe, execution)
        spans = removed_spans(loaded, recipe.recover, execution)
        recipe = recipe.model_copy(update={"select": recipe.select.model_copy(update={"spans": spans})})
    recipe.select.require_removal()
    if fitting and {BEST, HEAL} & {*map(base_operator, recipe.recover.operators)}:
        from ghostexport.recovery.recover import resolve_best

        cuts = None if recipe.select.spans is None else [start for start, _ in recipe.select.spans]
        loaded, sequences = loaded or loaded_of(recipe, execution), recipe.calibration.sequences
        section = resolve_best(recipe.recover, loaded, cuts, sequences, execution)
        recipe = recipe.model_copy(update={"recover": section})
    return recipe, loaded


def resolve_machine(recipe: Recipe, execution: Execution, building: bool, memory: int | None = None) -> Recipe:
    """The recipe with the runtime that this machine has, where it names none and builds, and with a dtype.

    ``memory``: of another machine, in bytes.

    Raises:
        RuntimeUnavailableError: it has none.
        GhostExportError: the model's configuration cannot be read.
    """
    if building and not recipe.build.runtimes:
        from ghostexport import runtimes

        name, reason = runtimes.default_runtime()
        execution.say(f"runtime: {name} ({reason})")
        recipe = recipe.model_copy(update={"build": recipe.build.model_copy(update={"runtimes": (name,)})})
    if recipe.model.dtype != "auto":
        return recipe
    dtype, reason = choose_dtype(recipe, execution, memory)
    execution.say(f"dtype: {dtype} ({reason})")
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})


def choose_dtype(recipe: Recipe, execution: Execution, memory: int | None = None) -> tuple[Dtype, str]:
    """What ``auto`` stands for, and why.

    A GPU gets the checkpoint's own half precision: bfloat16 of a bfloat16 checkpoint, whose activations float16 may
    not hold, else float16. A CPU gets float32, which its kernels are for, unless its memory is too small for that.
    """
    from ghostexport.models.shape import read_shape
    from ghostexport.sizing.capacity import has_gpu, measure_machine
    from ghostexport.sizing.estimate import gigabytes
    from ghostexport.sizing.needs import needs_of

    try:
        shape = read_shape(config_of(recipe), recipe.model.trust_remote_code)
    except ModelLayoutError:  # loading it will say what is wrong
        return "float32", "its configuration does not say what it is"
    half: Dtype = "bfloat16" if shape.dtype == "bfloat16" else "float16"
    named, gpu = recipe.build.runtimes, has_gpu(execution.device)
    providers = recipe.build.providers or (() if gpu else ("cpu",))
    on_cpu = "onnxruntime" in named and "cpu" in providers[:1]
    if not on_cpu and (named or gpu):
        return half, f"the checkpoint is {shape.dtype}, and {', '.join(named) or 'PyTorch'} runs on a GPU"
    wide = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": "float32"})})
    stages = ("select", "export", "verify") + (("build",) if named else ())
    wanted = max(need.memory for need in needs_of(shape, wide, 1.0) if need.stage in stages)
    total = memory or measure_machine(Path()).total_memory
    if wanted <= total:
        return "float32", "a CPU's kernels are for it"
    if named:
        half = "float16"  # ONNX Runtime's CPU provider has no bfloat16 kernels
    return half, f"float32 would take {gigabytes(wanted)} of memory, and there are {gigabytes(total)}"
