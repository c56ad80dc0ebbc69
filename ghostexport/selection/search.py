"""``search``: plans are changed block by block, and what the repaired model predicts decides.

::

    score(plan) = mean over judging sequences of KL(dense || repaired)     repaired: ghost-weighted at every cut

Every residual value of the dense model is kept on disk, so a plan costs its fits, from kept values, and the blocks
behind its first cut on a few sequences. It begins with ``streamline``'s run, with the blocks whose repaired loss alone
is least, and with ``sleb``'s plan where that takes less than a quarter of the time. Then one removed block of the best
plan is put back and another one removed instead (ends of runs move in this way, too), the most promising exchange
first, until none of the best few plans has an untried exchange, or the time is over.

Promising is what a least-squares model of the plans seen so far predicts: the log of the summed single losses, plus a
correction for every block and for the number of cuts. A plan clearly worse than the best one on the first judging
sequences is not shown to the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ghostexport.calibration import GOOD_TOKENS_PER_CHANNEL, Batch, CalibrationSet
from ghostexport.distributed import is_shared
from ghostexport.errors import RecipeError
from ghostexport.execution import Execution
from ghostexport.files import require_space, write_json
from ghostexport.models import BoundaryModule, LoadedModel, patch
from ghostexport.models.walking import Visit
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.recovery.refit.judging import JUDGES, SEQUENCES, Predictions
from ghostexport.recovery.trained.healed import has_bfloat16, keep_float32
from ghostexport.selection.after_recovery import Judge
from ghostexport.selection.cosines import token_similarity
from ghostexport.selection.criteria import best_run, eligible_blocks
from ghostexport.selection.trials import sleb

#: Plans whose exchanges are tried.
BEAM = 4

#: Judging sequences that see every plan, and how much worse on them than the best one a plan is that no other sees.
PROBES = 2
CLEARLY_WORSE = 1.05

#: Share of the time that ``sleb`` may take, with the sequences that it looks at.
SLEB_SHARE, SLEB_SEQUENCES = 0.25, 6

#: Repairs of spans kept in memory (``C x C`` float64 each).
SPANS_KEPT = 256

Blocks = tuple[int, ...]


def search(loaded: LoadedModel, calibration: CalibrationSet, section: SelectSection, execution: Execution) -> PrunePlan:
    """Searches for ``section.search_minutes``; an interrupted search goes on (``Execution.scratch``).

    Raises:
        RecipeError: the protected blocks leave too few; several processes.
        CalibrationError: too few sequences or tokens, or non-finite activations.
    """
    if is_shared():
        raise RecipeError("search runs in one process.", "Run ghostexport select without torchrun before.")
    calibration.require_tokens_for(loaded.hidden_size, execution)
    fitting = GOOD_TOKENS_PER_CHANNEL * loaded.hidden_size / calibration.tokens.shape[1]
    few = calibration.first(max(math.ceil(fitting * JUDGES / (JUDGES - 1)), JUDGES * SEQUENCES))
    with _kept_stream(loaded, few) as stream, _exact_enough(loaded):
        found = Search(loaded, few, section, execution, stream)
        found.begin()
        found.improve()
    removed, best = found.ranked()[0]
    scores = {
        "kl": best,
        "plans": len(found.losses),
        "seconds": round(found.seconds(), 1),
        "finished": found.finished,
        "starts": {name: [list(blocks), found.losses[blocks]] for name, blocks in found.starts.items()},
        "best": [[list(blocks), loss] for blocks, loss in found.ranked()[:BEAM]],
    }
    found.forget()
    return PrunePlan.from_blocks(loaded.num_blocks, removed, "search", scores)


@dataclass(eq=False)
class Kept(Judge):
    """A judge who reads the dense model's stream ``(L + 1, N, T, C)`` from where it is kept."""

    stream: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def read(self, points: Iterable[int], visit: Visit) -> None:
        for batch in self.calibration.batches(self.loaded.device):
            rows = slice(batch.sequences.start, batch.sequences.stop)
            for point in sorted(points):
                visit(batch, point, self.stream[point, rows].to(self.loaded.device))


class Search:
    """Plans seen so far.

    Attributes:
        losses: mean KL of every plan that all judging sequences saw, by its removed blocks.
        probed: mean KL on the first :data:`PROBES` of them, of every plan.
        starts: the plans it began with.
        finished: the best plans have no untried exchange.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        calibration: CalibrationSet,
        section: SelectSection,
        execution: Execution,
        stream: torch.Tensor,
    ) -> None:
        self.loaded, self.calibration, self.section, self.execution = loaded, calibration, section, execution
        self.count, self.eligible = section.prune or 0, eligible_blocks(loaded.num_blocks, section)
        self.judge = Kept(loaded, calibration, replace(execution, progress=lambda *_: None), stream=stream)
        self.losses: dict[Blocks, float] = {}
        self.probed: dict[Blocks, float] = {}
        self.alone: dict[int, float] = {}
        self.starts: dict[str, Blocks] = {}
        self.finished, self.begun, self.before = False, time.monotonic(), 0.0
        self.path = self._path()
        self._restore()
        self.predictions = Predictions(loaded, calibration)
        self.probes = range(min(PROBES, len(self.predictions.batches)))
        self._fill(stream)

    def seconds(self) -> float:
        """Of this search, those before an interruption included."""
        return self.before + time.monotonic() - self.begun

    def ranked(self) -> list[tuple[Blocks, float]]:
        """Plans that all judging sequences saw, the best first."""
        return sorted(self.losses.items(), key=lambda item: (item[1], item[0]))

    def _fill(self, stream: torch.Tensor) -> None:
        """Keeps every residual value, from ``streamline``'s pass, whose plan is the first start."""

        def keep(batch: Batch, point: int, x: torch.Tensor) -> None:
            stream[point, batch.sequences.start : batch.sequences.stop] = x.cpu()

        begun = time.monotonic()
        scores = token_similarity(self.loaded, self.calibration, self.execution, self.count, keep)
        self.pass_seconds = (time.monotonic() - begun) / len(self.calibration)
        try:
            plan = best_run("streamline", self.loaded.num_blocks, scores, self.section)
            self.starts.setdefault("streamline", _removed(plan))
        except RecipeError:  # the protected blocks leave no run
            pass

    def begin(self) -> None:
        """Tries every block alone, and scores the plans to start from."""
        for block in self.eligible:
            if block not in self.alone:
                self.alone[block] = max(0.0, self._divergence((block,), self.probes))
        self.starts["alone"] = tuple(sorted(sorted(self.eligible, key=lambda b: (self.alone[b], b))[: self.count]))
        trials = sum(len(self.eligible) - r for r in range(self.count)) * SLEB_SEQUENCES
        if "sleb" not in self.starts and trials * self.pass_seconds < SLEB_SHARE * 60 * self.section.search_minutes:
            few = self.calibration.first(SLEB_SEQUENCES)
            self.starts["sleb"] = _removed(sleb(self.loaded, few, self.section, self.execution))
        for blocks in self.starts.values():
            self.score(blocks, whole=True)

    def improve(self) -> None:
        """Exchanges blocks until nothing is left to try, or the time would be over before the next plan is judged."""
        last = 0.0
        while self.seconds() + last <= 60 * self.section.search_minutes:
            begun, blocks = self.seconds(), self._next()
            if blocks is None:
                self.finished = True
                return
            self.score(blocks)
            last = self.seconds() - begun
            best = self.ranked()[0][1]
            passed, whole = int(self.seconds()), int(60 * self.section.search_minutes)
            self.execution.progress(f"select: search · {len(self.probed)} plans, KL {best:.3f}", passed, whole)

    def _next(self) -> Blocks | None:
        """The most promising untried exchange of the best plan that has one."""
        promise = self._promise()
        for blocks, _ in self.ranked()[:BEAM]:
            kept = [b for b in self.eligible if b not in blocks]
            near = {tuple(sorted({*blocks, new} - {old})) for old in blocks for new in kept}
            if untried := sorted(near - self.probed.keys()):
                return min(untried, key=lambda other: (promise(other), other))
        return None

    def _promise(self) -> Callable[[Blocks], float]:
        seen = list(self.probed)
        features = np.stack([self._features(blocks) for blocks in seen])
        logs = np.array([math.log(max(self.probed[blocks], 1e-9)) - self._prior(blocks) for blocks in seen])
        mean, penalty = logs.mean(), np.eye(features.shape[1])
        weights = np.linalg.solve(features.T @ features + penalty, features.T @ (logs - mean))
        return lambda blocks: self._prior(blocks) + float(self._features(blocks) @ weights)

    def _prior(self, blocks: Blocks) -> float:
        return math.log(sum(self.alone[block] for block in blocks) + 1e-9)

    def _features(self, blocks: Blocks) -> Any:
        """Which blocks are removed ``[L]``, and the number of cuts."""
        plan = PrunePlan.from_blocks(self.loaded.num_blocks, blocks)
        own = np.zeros(self.loaded.num_blocks + 1)
        own[list(blocks)], own[-1] = 1, len(plan.removed)
        return own

    def score(self, blocks: Blocks, whole: bool = False) -> None:
        """Shows a plan to the first judging sequences, and to all unless it is clearly worse than the best one there.

        Args:
            whole: to all in any case.
        """
        if blocks in self.losses or (blocks in self.probed and not whole):
            return
        probes, others = self.probes, range(len(self.probes), len(self.predictions.batches))
        probed = self._divergence(blocks, probes)
        best = self.probed[self.ranked()[0][0]] if self.losses else math.inf
        if whole or probed <= best * CLEARLY_WORSE:
            rest = self._divergence(blocks, others) * len(others) if others else 0.0
            self.losses[blocks] = (probed * len(probes) + rest) / (len(probes) + len(others))
        self.probed[blocks] = probed
        self._keep()

    def _divergence(self, blocks: Blocks, sequences: Iterable[int]) -> float:
        """Mean KL in nats of the repaired model on some judging sequences."""
        plan = PrunePlan.from_blocks(self.loaded.num_blocks, blocks)
        spans = [(span.start, span.stop) for span in plan.removed]
        if len(self.judge.repairs) > SPANS_KEPT:
            self.judge.repairs.clear()
        self.judge.measure(spans)
        deltas = (self.judge.repairs[span].delta.float().cpu().numpy() for span in spans)
        operators = tuple(Operator(b, "x", delta=M) for b, M in zip(plan.boundaries, deltas, strict=True))
        repaired = patch(self.loaded, plan, OperatorSet("searched", operators, plan))
        for module in repaired.model.modules():
            if isinstance(module, BoundaryModule):
                keep_float32(module)
        first, found = spans[0][0], []
        for index in sequences:
            rows = self.predictions.batches[index].sequences
            x = self.judge.stream[first, rows.start : rows.stop].to(self.loaded.device)
            found.append(self.predictions.divergence(index, repaired, first, x))
        return float(np.mean(found))

    def _path(self) -> Path | None:
        """Where losses wait for a search that goes on: named after all that decides them."""
        if self.execution.scratch is None:
            return None
        decides = [self.loaded.sha256, self.calibration.sha256, self.section.model_dump(exclude={"search_minutes"})]
        key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]
        return self.execution.scratch / f"search-{key}.json"

    def _keep(self) -> None:
        if self.path is not None:
            plans = [[list(b), loss, self.losses.get(b)] for b, loss in self.probed.items()]
            known = {"seconds": self.seconds(), "starts": self.starts, "alone": list(self.alone.items())}
            write_json(self.path, known | {"plans": plans})

    def _restore(self) -> None:
        if self.path is None or not self.path.exists():
            return
        kept = json.loads(self.path.read_text(encoding="utf-8"))
        self.before, self.alone = kept["seconds"], dict(kept["alone"])
        self.starts = {name: tuple(blocks) for name, blocks in kept["starts"].items()}
        for blocks, probed, loss in kept["plans"]:
            self.probed[tuple(blocks)] = probed
            if loss is not None:
                self.losses[tuple(blocks)] = loss
        self.execution.say(f"select: the search goes on after {len(self.probed)} plans")

    def forget(self) -> None:
        """Removes what waited."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _removed(plan: PrunePlan) -> Blocks:
    return tuple(block for span in plan.removed for block in range(span.start, span.stop))


@contextlib.contextmanager
def _kept_stream(loaded: LoadedModel, calibration: CalibrationSet) -> Iterator[torch.Tensor]:
    """Room on disk for all residual values ``(L + 1, N, T, C)`` in the model's dtype."""
    shape = (loaded.num_blocks + 1, *calibration.tokens.shape, loaded.hidden_size)
    dtype = next(loaded.model.parameters()).dtype
    folder = Path(tempfile.mkdtemp(prefix="ghostexport-search-"))
    try:
        require_space(folder, math.prod(shape) * dtype.itemsize, "the residual streams of the search")
        path = str(folder / "stream")
        yield torch.from_file(path, shared=True, size=math.prod(shape), dtype=dtype).view(shape)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _exact_enough(loaded: LoadedModel) -> Iterator[None]:
    """Matrix products in bfloat16 where the device has them: of both models that are compared."""
    with torch.autocast(loaded.device.type, torch.bfloat16, enabled=has_bfloat16(loaded.device)):
        yield
