"""``--select search`` against ``sleb``'s and ``streamline``'s plan, SmolLM2-135M, eleven blocks removed.

    python benchmarks/plan_search.py --minutes 40        # writes results/plan_search.json

The search reads 32 calibration sequences of 512 tokens. The plans are compared after the same repair,
``ghost-weighted`` fitted on three quarters of them, on five held-out windows each of wiki, C4 and code (those of
``quality.md``).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from healing import cpu_seconds, window_losses
from quality_report import AVERAGED, geometric_mean, perplexity, ratio
from quality_texts import calibration_windows, held_out_windows, pools

from ghostexport import models
from ghostexport.execution import Execution
from ghostexport.files import write_json
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import SelectSection
from ghostexport.selection.after_recovery import Judge
from ghostexport.selection.choosing import select

SEQUENCES, WINDOWS = 32, 5

#: The plans of quality.md.
OTHERS = {"sleb": [(3, 8), (12, 15), (17, 18), (25, 27)], "streamline": [(9, 20)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    minutes = parser.parse_args().minutes
    loaded = models.load_model("smollm2", "float32", Execution(device="cpu"))
    texts, bos = pools(loaded.tokenizer), loaded.tokenizer.bos_token_id
    drawn, held_out = calibration_windows(texts, SEQUENCES, bos), held_out_windows(texts, WINDOWS, bos)
    begun = cpu_seconds()
    section = SelectSection(criterion="search", prune=11, search_minutes=minutes)
    plan = select(loaded, drawn, section, Execution(device="cpu"))
    seconds = round(cpu_seconds() - begun)
    plans = {"search": [(span.start, span.stop) for span in plan.removed]} | OTHERS
    judge = Judge(loaded, drawn, Execution())
    with torch.autocast("cpu", torch.bfloat16):
        judge.measure(span for spans in plans.values() for span in spans)
    cells: dict[str, Any] = {}
    for name, spans in plans.items():
        model = repaired(judge, PrunePlan.from_spans(loaded.num_blocks, spans))
        cells[name] = {"losses": {domain: window_losses(model, held_out[domain]) for domain in AVERAGED}}
    rows = [
        {"plan": name, "removed": plans[name], "geometric_mean": geometric_mean(cell)}
        | {domain: perplexity(losses) for domain, losses in cell["losses"].items()}
        | {"ratio_to_search": ratio(cell, cells["search"], AVERAGED)}
        for name, cell in cells.items()
    ]
    about = {"model": "SmolLM2-135M (de-quantised)", "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    about |= {"sequences": SEQUENCES, "windows": WINDOWS, "cpu_seconds": seconds, "scores": dict(plan.scores)}
    write_json(Path(__file__).parent / "results" / "plan_search.json", about | {"rows": rows})


def repaired(judge: Judge, plan: PrunePlan) -> Any:
    """The cut model with the judge's operators."""
    deltas = (judge.repairs[b.span.start, b.span.stop].delta.float().numpy() for b in plan.boundaries)
    operators = tuple(Operator(b, "ghost-weighted", delta=M) for b, M in zip(plan.boundaries, deltas, strict=True))
    return models.patch(judge.loaded, plan, OperatorSet("compared", operators, plan)).model


if __name__ == "__main__":
    main()
