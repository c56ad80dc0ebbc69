"""Does it matter which Hadamard matrix ``linearpatch-rotate`` rotates by? SmolLM2-135M, n = 5, 7, 11.

    python benchmarks/linearpatch_basis.py

At widths that are not a power of two there are many Hadamard matrices. Here and in the published code H is
``H_36 x Sylvester_16`` at C = 576, with Paley's second construction at q = 17 as H_36; the published table has its two
halves one behind the other, ``[[S + I, S - I], [S - I, -S - I]]``, and here they alternate (``kron(S, .)``). That is
the same matrix but for the order of the rows, which are the model's channels. So besides the two, some random orders
of the rows of ours show what is chance.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from quality_texts import calibration_windows, held_out_windows, pools

from ghostexport import models
from ghostexport.benchmarking.statistics import differences
from ghostexport.calibration import CalibrationSet
from ghostexport.evaluation.quality_meter import QualityMeter
from ghostexport.evaluation.text import measure, torch_forward
from ghostexport.execution import Execution
from ghostexport.files import write_json
from ghostexport.moments import MagnitudeRatios
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.recovery.fits.hadamard import hadamard
from ghostexport.selection.choosing import select

DOMAINS = ("wiki", "c4", "code")
OUTPUT = Path(__file__).parent / "results" / "linearpatch_basis.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prune", type=int, nargs="+", default=[5, 7, 11])
    parser.add_argument("--sequences", type=int, default=64, help="calibration sequences of 512 tokens")
    parser.add_argument("--windows", type=int, default=5, help="held-out windows of 512 tokens per domain")
    parser.add_argument("--orders", type=int, default=4, help="random orders of the rows")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    loaded = models.load_model("smollm2", "float32", Execution(device="cpu"))
    texts = pools(loaded.tokenizer, DOMAINS)
    drawn = calibration_windows(texts, arguments.sequences)
    held = held_out_windows(texts, arguments.windows)
    held_out = CalibrationSet.from_tokens(np.concatenate([held[domain].tokens for domain in DOMAINS]))
    bases = {"here": hadamard(loaded.hidden_size), "published": published(loaded.hidden_size)}
    for seed in range(arguments.orders):
        bases[f"order {seed}"] = np.random.default_rng(seed).permutation(bases["here"])
    rows = [row(loaded, depth, drawn, held_out, bases) for depth in arguments.prune]
    about = {"model": "SmolLM2-135M", "device": f"CPU {platform.machine()}, float32", "domains": list(DOMAINS)}
    about |= {"torch": torch.__version__, "transformers": transformers.__version__}
    write_json(arguments.output, about | {"sequences": len(drawn), "windows": len(held_out), "rows": rows})


def row(
    loaded: models.LoadedModel,
    depth: int,
    drawn: CalibrationSet,
    held_out: CalibrationSet,
    bases: Mapping[str, NDArray[np.float64]],
) -> dict[str, Any]:
    """Perplexity in every basis, and how it differs from ours with the interval of a paired bootstrap."""
    few = CalibrationSet.from_tokens(drawn.tokens[:6])
    plan = select(loaded, few, SelectSection(prune=depth), Execution())
    meters = {}
    for name, M in deltas(loaded, plan, drawn, bases).items():
        operator = Operator(plan.boundaries[0], "linearpatch-rotate", delta=M)
        model = models.patch(loaded, plan, OperatorSet("linearpatch-rotate", (operator,), plan)).model
        meters[name] = measure({name: torch_forward(model)}, held_out)[name]
        print(time.strftime("%H:%M:%S"), plan, name, round(meters[name].result().perplexity, 2), flush=True)
    return {
        "prune": depth,
        "removed": plan.to_json()["removed"],
        "perplexity": {name: meter.result().perplexity for name, meter in meters.items()},
        "ratio": {name: ratio(meter, meters["here"]) for name, meter in meters.items() if name != "here"},
    }


def ratio(meter: QualityMeter, ours: QualityMeter) -> dict[str, Any]:
    """Perplexity over that of our basis, with its 95 % interval."""
    loss = differences(meter.windows, ours.windows, 2000, 0)["loss"]
    return {"value": math.exp(loss["difference"]), "interval": [math.exp(v) for v in loss["interval"]]}


def deltas(
    loaded: models.LoadedModel, plan: PrunePlan, drawn: CalibrationSet, bases: Mapping[str, NDArray[np.float64]]
) -> dict[str, NDArray[np.float32]]:
    """``M = H diag(d - 1) H'`` in every basis, from one pass."""
    (span,) = plan.removed
    ratios = {name: MagnitudeRatios(len(H), torch.from_numpy(H).float()) for name, H in bases.items()}
    for batch in drawn.batches():
        before: list[torch.Tensor] = []

        def visit(point: int, x: torch.Tensor, before: list[torch.Tensor] = before) -> None:
            if point == span.start:
                before.append(x)
                return
            for old, new in zip(before[0], x, strict=True):
                for found in ratios.values():
                    found.add(old, new)

        models.read_residuals(loaded.model, (span.start, span.stop), visit, batch.input_ids, batch.attention_mask)
    found = {}
    for name, H in bases.items():
        d = ratios[name].mean_of_ratios.numpy()
        found[name] = ((H * (d - 1)) @ H.T).astype(np.float32)
    return found


def published(size: int) -> NDArray[np.float64]:
    """``H`` of a width ``36 x 2^m`` as the published code orders it; used with row vectors."""
    q = 17
    chi = np.array([0 if k == 0 else 1 if k in {i * i % q for i in range(1, q)} else -1 for k in range(q)])
    S = np.ones((q + 1, q + 1))
    S[0, 0] = 0
    S[1:, 1:] = chi[(np.arange(q)[:, None] - np.arange(q)) % q]
    one = np.eye(q + 1)
    H = np.block([[S + one, S - one], [S - one, -S - one]])
    while len(H) < size:
        H = np.kron(H, [[1, 1], [1, -1]])
    if len(H) != size:
        raise SystemExit(f"{size} is not 36 x 2^m")
    return H.T / math.sqrt(size)


if __name__ == "__main__":
    main()
