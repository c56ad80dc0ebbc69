"""One rank of ``test_distributed.py``: fits operators on its share of the windows, into a file."""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import distributed

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.execution import Execution
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection
from ghostexport.recovery.gathering import Request, gather
from ghostexport.recovery.recover import recover
from tests.tiny import tiny

OPERATORS = (
    "ghost", "ghost-weighted", "ghost-affine", "ghost-split", "linearpatch-diag", "prune-and-comp", "replaceme-lstsq",
)  # fmt: skip


def work(streaming: bool = False) -> dict:
    """Float64 moments and the operators of a tiny model cut at two places; five batches of unequal size."""
    random = np.random.default_rng(0)
    tokens = random.integers(3, 128, (140, 64))
    mask = np.arange(64) < random.integers(40, 65, 140)[:, None]
    calibration = CalibrationSet.from_tokens(tokens, mask)
    loaded = models.from_memory(tiny("llama"), streaming=streaming)
    plan = PrunePlan.from_spans(6, [[1, 2], [3, 5]])
    request = Request(frozenset({"identity"}), frozenset({"weighted", "last-block"}), 4)
    statistics = gather(loaded, plan.boundaries, calibration, request, Execution())
    folds = [m for s in statistics for m in (*s.folds, *s.weighted_folds, *s.last_block_folds)]
    moments = [(m.gram, m.cross, m.sum_x, m.square_delta, m.weight, m.tokens) for m in folds]
    ratios = [s.ratios["identity"].mean_of_ratios for s in statistics]
    section = RecoverSection(operators=OPERATORS, ridge="cv")
    sets = recover(loaded, plan, calibration, CalibrationSet.from_tokens(tokens[:3]), section)
    tensors = {name: found.tensors() for name, found in sets.items()}
    fits = {name: [dict(o.fit) for o in found.operators] for name, found in sets.items()}
    return {"moments": moments, "ratios": ratios, "tensors": tensors, "fits": fits}


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    torch.save(work(sys.argv[2] == "streamed"), Path(sys.argv[1]) / f"rank{distributed.get_rank()}.pt")
    distributed.destroy_process_group()
