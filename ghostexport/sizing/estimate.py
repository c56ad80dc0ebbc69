"""Whether a machine has what the stages of a recipe need, said before they start; and the option that makes one fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ghostexport.errors import CapacityError, RecipeError
from ghostexport.recipe import BEST, Recipe, base_operator
from ghostexport.recovery.registry import OPERATORS
from ghostexport.sizing.capacity import Machine, measure_machine, multiplications_per_second
from ghostexport.sizing.needs import NEEDS, STREAMING, Need, need_of, needs_of, operators_of

if TYPE_CHECKING:
    from ghostexport.models.shape import ModelShape

#: A stage is refused where the machine has less than this share of the estimate: measured needs were above it.
CERTAIN = 0.8


@dataclass(frozen=True)
class Verdict:
    """Whether a stage fits a machine.

    Attributes:
        need: of the stage.
        lacks: ``memory``, ``GPU memory`` or ``disk`` that is too little for certain; empty where it fits.
        tight: it fits, with less room than the estimate wants.
        way: the option that makes it fit, with the figure it leads to; empty where none is known, or none needed.
    """

    need: Need
    lacks: str
    tight: bool
    way: str


def estimate(
    recipe: Recipe, config: Path, folder: Path, memory: int | None = None, device: str = "auto"
) -> list[Verdict]:
    """What every stage of the main job needs, and whether it fits.

    Args:
        recipe: what would be done.
        config: ``config.json`` of the model, or a folder that holds one; nothing else is read.
        folder: where the run would be.
        memory: bytes of another machine to ask about; None for this one, as it is now.
        device: PyTorch device.

    Raises:
        RecipeError: more blocks to remove than there are.
        ModelLayoutError: the configuration is not of a decoder-only LM.
    """
    from ghostexport.models.shape import read_shape

    shape = read_shape(config, recipe.model.trust_remote_code)
    if not 1 <= (removed := recipe.select.prune or sum(b - a for a, b in recipe.select.spans or ())) < shape.blocks:
        raise RecipeError(f"{removed} of {shape.blocks} decoder blocks cannot be removed.", "Give another --prune.")
    machine = measure_machine(folder, device)
    if memory is not None:
        machine = replace(machine, memory=memory, total_memory=memory)
    rate = multiplications_per_second(recipe.model.dtype, device)
    return [judge(need, shape, recipe, machine, device) for need in needs_of(shape, recipe, rate)]


def judge(need: Need, shape: ModelShape, recipe: Recipe, machine: Machine, device: str = "auto") -> Verdict:
    """Whether the machine has what the stage needs, and which option makes it fit where not."""
    need, lacks, tight = _fitting(need, shape, recipe, machine, device)
    return Verdict(need, lacks, tight, _way(need, lacks, shape, recipe, machine, device) if lacks or tight else "")


def require_capacity(
    stage: str, shape: ModelShape, recipe: Recipe, machine: Machine, device: str, say: Callable[[str], None]
) -> None:
    """Refuses a stage that will not fit, before it starts; tells where it is tight.

    Raises:
        CapacityError: what is lacking, and the option that makes it fit.
    """
    if stage not in NEEDS:
        return
    verdict = judge(need_of(stage, shape, recipe), shape, recipe, machine, device)
    if verdict.lacks:
        what = f"No disk space for {stage}" if verdict.lacks == "disk" else f"{stage} will not fit"
        raise CapacityError(f"{what}: {_wants(verdict, machine)}.", verdict.way or None)
    if verdict.tight:
        say(f"{stage}: may not fit: {_wants(verdict, machine)}. {verdict.way}".strip())


def gigabytes(size: float) -> str:
    """``12.3 GB``, or ``45.6 MB``."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _wants(verdict: Verdict, machine: Machine) -> str:
    need, lacks = verdict.need, verdict.lacks or "memory"
    if lacks == "disk":
        return f"it writes about {gigabytes(need.disk)}, and {gigabytes(machine.disk)} of disk are free"
    most = ", ".join(f"{name} {gigabytes(size)}" for name, size in need.parts.items() if size > need.memory / 20)
    free = machine.gpu if lacks == "GPU memory" else machine.memory
    return f"it needs about {gigabytes(need.memory)} of {lacks} ({most}), and {gigabytes(free or 0)} are free"


#: Stages whose PyTorch model goes to the GPU where there is one.
_ON_DEVICE = ("select", "recover", "export", "verify", "eval")


def _lacking(need: Need, machine: Machine, device: str) -> tuple[str, bool]:
    on_gpu = machine.gpu is not None and need.stage in _ON_DEVICE and device not in ("cpu", "split")
    free = machine.gpu if on_gpu and machine.gpu is not None else machine.memory
    if device == "split" and need.stage in ("select", "recover"):
        free += machine.disk  # what fits nowhere else is read from disk
    if need.memory * CERTAIN > free:
        return ("GPU memory" if on_gpu else "memory"), False
    if need.disk * CERTAIN > machine.disk:
        return "disk", False
    return "", need.memory > free or need.disk > machine.disk


def _fitting(need: Need, shape: ModelShape, recipe: Recipe, machine: Machine, device: str) -> tuple[Need, str, bool]:
    """What the stage needs as it would run, what of that is lacking, and whether it is tight.

    On a CPU a model in the checkpoint's own dtype is streamed from its files where memory does not hold it.
    """
    lacks, tight = _lacking(need, machine, device)
    on_cpu = machine.gpu is None and device in ("auto", "cpu")
    if (lacks == "memory" or tight) and need.stage in STREAMING and on_cpu and shape.dtype == recipe.model.dtype:
        streamed = replace(need_of(need.stage, shape, recipe, streamed=True), seconds=need.seconds)
        if (found := _lacking(streamed, machine, device)) in (("", False), ("", True)):
            return streamed, *found
    return need, lacks, tight


def _way(need: Need, lacks: str, shape: ModelShape, recipe: Recipe, machine: Machine, device: str) -> str:
    for flag, other, place in _alternatives(recipe, device):
        found = need_of(need.stage, shape, other)
        if found == need and place == device:
            continue
        found, *judged = _fitting(found, shape, other, machine, place)
        if judged == ["", False]:
            figure = found.disk if lacks == "disk" else found.memory
            return f"Give {flag}: {gigabytes(figure)} then."
    if lacks == "disk":
        return "Free some space, or choose a folder on another disk with -o."
    return "No option makes it fit here: use a machine with more memory, or a smaller model."


def _alternatives(recipe: Recipe, device: str) -> Iterator[tuple[str, Recipe, str]]:
    """``(flags, recipe, device)`` that need less, from the least loss on."""
    lighter, half = recipe, "float16" if "onnxruntime" in recipe.build.runtimes else "bfloat16"
    if device not in ("cpu", "split"):
        yield "--device cpu", recipe, "cpu"
    if recipe.model.dtype == "float32":
        lighter = _with(recipe, model={"dtype": half})
        yield f"--dtype {half}", lighter, device
    if any(OPERATORS[base_operator(name)].heals for name in operators_of(recipe)) and not recipe.recover.heal_rank:
        yield "--heal-rank 16", _with(recipe, recover={"heal_rank": 16}), device
        yield "--quality best", _with(recipe, recover={"operators": (BEST,)}), device
    for plain in ("ghost-weighted+refit", "ghost"):
        flag = "--quality paper" if plain == "ghost" else f"--operator {plain}"
        yield flag, _with(recipe, recover={"operators": (plain,)}), device
        if lighter is not recipe:
            yield f"--dtype {half} {flag}", _with(lighter, recover={"operators": (plain,)}), device
    yield "--device split", recipe, "split"


def _with(recipe: Recipe, **changes: dict[str, Any]) -> Recipe:
    return recipe.model_copy(
        update={name: getattr(recipe, name).model_copy(update=values) for name, values in changes.items()}
    )
