"""``ghost-healed``: every weight from the last kept block before the first cut on, distilled from the dense model.

::

    loss = mean_t KL(p_t || q_t)      p: dense model, its 64 most probable tokens and all others as one; q: healed model
    weights trained: of the kept blocks from the last one before the first cut on, of the norm behind them, and the maps

It starts from the closed form (``ghost-split``, several cuts fitted one behind the other). Embedding and head stay, and
the blocks before are never run again: their result is kept on disk. AdamW, beta 0.9 and 0.99, no decay, gradient norm
at most 1, one sequence a step, the rate rising over a tenth of the steps and falling to a twentieth on a cosine.
Masters, stream and maps are float32; matrix products are bfloat16 where the device has them.

The first :data:`JUDGED` held-out sequences judge, the start included: the state with the least KL there is kept, and
where training does not help, nothing of it is applied. Memory: 16 bytes per trained weight, and what a step keeps for
its gradient; both are said before it starts. Disk: the stream, ``4 C`` bytes a token, and 400 for the predictions.
With ``heal_rank`` the linear layers change by a product of that rank (``low_rank``), merged at the end.

An interrupted training goes on where its state was last written (``Execution.scratch``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ghostexport.calibration import Batch, CalibrationSet
from ghostexport.execution import Execution
from ghostexport.files import atomic_path
from ghostexport.models import BoundaryModule, LoadedModel, patch
from ghostexport.models.blocks import hidden_states
from ghostexport.models.calls import go_on
from ghostexport.models.reweighting import changed_weights
from ghostexport.operators import Operator, OperatorSet
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.held_out import measure_refit
from ghostexport.recovery.trained import on_cosine
from ghostexport.recovery.trained.low_rank import RATE, LowRank
from ghostexport.recovery.trained.teacher import Teacher

LEARNING_RATE = 2e-4
LAST_RATE = 1 / 20
WARM_UP = 1 / 10
BETAS = (0.9, 0.99)
CLIP = 1.0

#: Tokens of which the dense model's probability is kept.
TOP = 64

#: Held-out sequences that judge, at most, and how many times per epoch they are asked.
JUDGED = 8
CHECKS = 2

#: Seconds of training between two states on disk.
SAVE_EVERY = 120.0


def heal(
    loaded: LoadedModel,
    start: OperatorSet,
    calibration: CalibrationSet,
    held_out: CalibrationSet,
    section: RecoverSection,
    execution: Execution,
) -> OperatorSet:
    """Trains the cut model; ``fit`` of every operator holds the judges' KL before and after, and the step taken.

    Raises:
        ModelLayoutError: parts of the model are on disk.
    """
    loaded.require_whole("healing trains parts of it", "Use a device that holds the model, or a closed form.")
    rank = section.heal_rank
    highest = section.learning_rate or LEARNING_RATE * (1 if rank is None else RATE)
    settings: dict[str, Any] = {"epochs": section.epochs or 1, "rate": highest, "rank": rank}
    settings["matmuls"] = "bfloat16" if has_bfloat16(loaded.device) else "float32"
    student = Student(loaded, start, rank)
    with _folder(loaded, start, calibration, held_out, settings, execution) as folder:
        say_cost(student, calibration, settings["epochs"], execution)
        texts = Texts(student, calibration, folder, "calibration", execution)
        judges = Texts(student, held_out.first(JUDGED), folder, "judges", execution)
        figures = _Training(student, texts, judges, folder, settings, execution).run()
    figures |= settings | {"trained_weights": student.count}
    healed = student.operators(start) if figures["best_step"] else start
    execution.say(
        f"heal: KL on the judging sequences {figures['kl_before']:.3f} -> {figures['kl_after']:.3f}"
        + ("" if figures["best_step"] else ": healing did not help and is not applied")
    )
    return healed.with_fit(figures | measured for measured in measure_refit(loaded, healed, held_out, execution))


class Student:
    """The cut model with trainable float32 weights from ``first`` on; the dense model and its weights stay as they are.

    Attributes:
        loaded: the cut model.
        dense: what it was made of.
        first: position of its first trained block; nothing before it needs to be run.
        parameters: what is trained: whole weights, or with a ``rank`` a change of that rank of every linear layer.
    """

    def __init__(self, dense: LoadedModel, start: OperatorSet, rank: int | None = None) -> None:
        self.dense, self.plan = dense, start.plan
        self.loaded = patch(dense, start.plan, start)
        _ = self.loaded.outputs  # looked at once: blocks before `first` are not run again
        self.first = max(0, start.plan.boundaries[0].position - 1)
        self.boundaries = [m for m in self.loaded.model.modules() if isinstance(m, BoundaryModule)]
        self.parameters = self._thaw()
        self.low = [] if rank is None else self._lower(rank)
        self.half = has_bfloat16(dense.device)
        for module in self.boundaries:
            keep_float32(module)

    @property
    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    def _thaw(self) -> list[nn.Parameter]:
        """New float32 parameters in the blocks from ``first`` on and in what is one-dimensional behind the blocks."""
        blocks, model = self.loaded.blocks, self.loaded.model
        untouched = {id(m) for block in blocks[: self.first] for m in block.modules()}
        inside = {id(m) for block in blocks for m in block.modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        new: dict[int, nn.Parameter] = {}
        for module in model.modules():
            if id(module) in untouched:
                continue
            for key, old in list(module.named_parameters(recurse=False)):
                trained = id(module) in inside or (old.ndim == 1 and module not in (embedding, head))
                if trained or old.dtype != torch.float32:
                    made = nn.Parameter(old.detach().clone().float(), requires_grad=trained)
                    setattr(module, key, new.setdefault(id(old), made))
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    def _lower(self, rank: int) -> list[LowRank]:
        """Freezes every linear layer of the trained blocks and puts a change of low rank beside it."""
        layers = [m for b in self.loaded.blocks[self.first :] for m in b.modules() if isinstance(m, nn.Linear | Conv1D)]
        for layer in layers:
            layer.weight.requires_grad_(False)
        low = [LowRank(layer, rank, seed) for seed, layer in enumerate(layers)]
        whole = [parameter for parameter in self.parameters if parameter.requires_grad]
        self.parameters = [*whole, *(parameter for change in low for parameter in change.parameters)]
        return low

    @contextlib.contextmanager
    def matmuls(self) -> Iterator[None]:
        """Matrix products in bfloat16 where the device has them."""
        with torch.autocast(self.dense.device.type, torch.bfloat16, enabled=self.half):
            yield

    def logits(self, batch: Batch, x: torch.Tensor) -> torch.Tensor:
        """``[n, V]`` of the real tokens, from the stream ``(B, T, C)`` that enters block ``first``."""
        return go_on(self.loaded, batch, self.first, x if self.first else None)[batch.mask]

    def operators(self, start: OperatorSet) -> OperatorSet:
        """What was trained, as operators and new weights."""
        for change in self.low:
            change.merge()
        modules = iter(self.boundaries)
        operators = tuple(_trained(o, next(modules)) if o.adds_nodes else replace(o, folds=()) for o in start.operators)
        weights = changed_weights(self.dense.model, self.plan, self.loaded.model)
        return replace(start, operators=operators, weights=weights)


class Texts:
    """Sequences with the dense model's predictions and its stream before the first trained block; one pass for both."""

    def __init__(self, student: Student, tokens: CalibrationSet, folder: Path, name: str, execution: Execution) -> None:
        self.tokens, self.device = tokens, student.dense.device
        shape = (*tokens.tokens.shape, student.dense.hidden_size)
        path = str(folder / f"{name}.stream")
        self.stream = torch.from_file(path, shared=True, size=math.prod(shape), dtype=torch.float32).view(shape)
        rows = iter(range(len(tokens)))

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.stream[next(rows)] = hidden_states(args, kwargs)[0].float().cpu()

        handle = student.dense.blocks[student.first].register_forward_pre_hook(keep, with_kwargs=True)
        try:
            with student.matmuls():
                self.teacher = Teacher(student.dense, tokens, folder, name, TOP, execution)
        finally:
            handle.remove()

    def loss(self, student: Student, sequence: int) -> torch.Tensor:
        batch = batch_of(self.tokens, sequence, self.device)
        with student.matmuls():
            logits = student.logits(batch, self.stream[sequence : sequence + 1].to(self.device))
        return self.teacher.divergence(logits, batch)

    def mean_loss(self, student: Student) -> float:
        with torch.no_grad():
            return float(np.mean([float(self.loss(student, i)) for i in range(len(self.tokens))]))


@dataclass
class _Training:
    """The steps, the judges, and the state on disk."""

    student: Student
    texts: Texts
    judges: Texts
    folder: Path
    settings: dict[str, Any]
    execution: Execution

    def run(self) -> dict[str, Any]:
        """Leaves the best state in the student; ``best_step`` 0 is the start."""
        parameters, count = self.student.parameters, len(self.texts.tokens)
        fused = self.student.dense.device.type in ("cpu", "cuda")
        optimizer = torch.optim.AdamW(parameters, betas=BETAS, eps=1e-10, weight_decay=0.0, fused=fused)
        steps, every = self.settings["epochs"] * count, max(1, count // CHECKS)
        state = self._restore(optimizer)
        if state is None:
            first = self.judges.mean_loss(self.student)
            state = {"step": 0, "kl_before": first, "kl_after": first, "best_step": 0}
        saved = time.monotonic()
        for step in range(state["step"], steps):
            loss = self._step(optimizer, step, steps)
            self.execution.progress(f"recover: heal · KL {loss:.3f}", step + 1, steps)
            state["step"] = step + 1
            if (step + 1) % every == 0 or step + 1 == steps:
                found = self.judges.mean_loss(self.student)
                if found < state["kl_after"]:
                    state |= {"kl_after": found, "best_step": step + 1}
                    self._write("best", [p.detach() for p in parameters])
            if self.execution.scratch is not None and time.monotonic() - saved > SAVE_EVERY:
                self._write("state", [state, [p.detach() for p in parameters], optimizer.state_dict()])
                saved = time.monotonic()
        if state["best_step"]:
            self._load(torch.load(self.folder / "best.pt", weights_only=True))
        return {key: state[key] for key in ("kl_before", "kl_after", "best_step")} | {"steps": steps}

    def _step(self, optimizer: Any, step: int, steps: int) -> float:
        """One sequence: in order in the first epoch, in an order of its own in every other one."""
        epoch, index = divmod(step, len(self.texts.tokens))
        order = np.arange(len(self.texts.tokens))
        sequence = int((np.random.default_rng(epoch).permutation(order) if epoch else order)[index])
        for group in optimizer.param_groups:
            group["lr"] = rate(self.settings["rate"], step, steps)
        optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss = self.texts.loss(self.student, sequence)
            loss.backward()
        nn.utils.clip_grad_norm_(self.student.parameters, CLIP)
        optimizer.step()
        return float(loss.detach())

    def _write(self, name: str, what: Any) -> None:
        with atomic_path(self.folder / f"{name}.pt") as temporary:
            torch.save(what, temporary)

    def _restore(self, optimizer: Any) -> dict[str, Any] | None:
        path = self.folder / "state.pt"
        if not path.exists():
            return None
        state, parameters, moments = torch.load(path, weights_only=True)
        self._load(parameters)
        optimizer.load_state_dict(moments)
        self.execution.say(f"heal: going on after step {state['step']}")
        found: dict[str, Any] = state
        return found

    def _load(self, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.student.parameters, values, strict=True):
                parameter.copy_(value)


def rate(highest: float, step: int, steps: int) -> float:
    """The learning rate of a step: linear up over a tenth, half a cosine down to a twentieth."""
    return highest * min(1.0, (step + 1) / (WARM_UP * steps)) * on_cosine(1, LAST_RATE, step / steps)


def batch_of(tokens: CalibrationSet, sequence: int, device: torch.device) -> Batch:
    """One sequence of a set."""
    part = slice(sequence, sequence + 1)
    ids, mask = torch.from_numpy(tokens.tokens[part]), torch.from_numpy(tokens.attention_mask[part] != 0)
    return Batch(range(sequence, sequence + 1), ids.to(device), mask.to(device))


def say_cost(student: Student, calibration: CalibrationSet, epochs: int, execution: Execution) -> None:
    """Says minutes and memory, from one trial step on the first sequence."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch, seen = batch_of(calibration, 0, student.dense.device), []
    block = student.dense.blocks[student.first]
    handle = block.register_forward_pre_hook(lambda m, a, k: seen.append(hidden_states(a, k)), with_kwargs=True)
    begun = time.monotonic()
    with torch.no_grad(), student.matmuls():
        student.dense.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    dense = time.monotonic() - begun
    handle.remove()
    begun = time.monotonic()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with student.matmuls():
            logits = student.logits(batch, seen[0].float())
        logits.float().logsumexp(1).mean().backward()
    step = time.monotonic() - begun
    for parameter in student.parameters:
        parameter.grad = None
    own = {p.untyped_storage().data_ptr() for p in student.loaded.model.parameters()}
    activations = sum(size for place, size in kept.items() if place not in own)
    minutes = len(calibration) * (dense + epochs * step) / 60
    execution.say(
        f"heal: about {max(1, round(minutes))} minutes for {len(calibration)} sequences, {epochs} times, and "
        f"{(16 * student.count + activations) / 1e9:.1f} GB of memory beside the model ({student.count / 1e6:.1f} "
        f"million trained weights of 16 bytes, {activations / 1e6:.0f} MB kept for the gradient)"
    )


def _trained(operator: Operator, module: BoundaryModule) -> Operator:
    own: dict[str, Any] = {key: values.detach().cpu().numpy().copy() for key, values in module.named_parameters()}
    factors = (own.pop("factor_u"), own.pop("factor_v")) if "factor_u" in own else None
    return replace(operator, kind="ghost-healed", folds=(), factors=factors, **own)


def keep_float32(module: BoundaryModule) -> None:
    """Products with the maps stay float32: the stream that they read is not normalised."""
    change, device = module.change, next(module.parameters()).device.type

    def exact(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, enabled=False):
            return change(x.float())

    module.change = exact  # type: ignore[method-assign]


def has_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are faster than float32 ones there."""
    if device.type == "cpu":
        asked = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
        return any(supported is not None and supported() for supported in asked)
    return device.type == "cuda" and torch.cuda.is_bf16_supported()


@contextlib.contextmanager
def _folder(
    loaded: LoadedModel,
    start: OperatorSet,
    calibration: CalibrationSet,
    held_out: CalibrationSet,
    settings: dict[str, Any],
    execution: Execution,
) -> Iterator[Path]:
    """Where predictions and state wait: named after all that decides the result, gone when it is finished."""
    if execution.scratch is None:
        with tempfile.TemporaryDirectory(prefix="ghostexport-") as scratch:
            yield Path(scratch)
        return
    decides = [loaded.sha256, start.sha256, calibration.sha256, held_out.sha256, settings]
    key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
    folder = execution.scratch / f"healing-{key}"
    for other in execution.scratch.glob("healing-*"):
        if other != folder:
            shutil.rmtree(other)
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
    shutil.rmtree(folder)
