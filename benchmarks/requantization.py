"""Does the operator gain by being solved again on the quantised model's own stream, towards the dense float model?

    python benchmarks/requantization.py RUN [RUN ...]        # run folders that quantization.py made

Per run and four-bit form, PyTorch holding the rounded weights, on the run's held-out windows: ``ghost`` as it was
solved in float, and solved again, plain and weighted, with ``X_pre`` of the quantised model and ``X_post`` of the dense
float one, from the same calibration text. Ratios of perplexity and differences of KL are paired by window.
Results: ``results/requantization.json``.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch

from ghostexport import calibration, models
from ghostexport.benchmarking.statistics import differences
from ghostexport.calibration import CalibrationSet
from ghostexport.evaluation.text import measure, torch_forward
from ghostexport.execution import Execution
from ghostexport.files import write_json
from ghostexport.models.rounding import round_weights
from ghostexport.models.variants import BoundaryModule, share_weights
from ghostexport.moments import BoundaryMoments, token_weights
from ghostexport.operators import Operator
from ghostexport.recipe import parse_recipe, read_recipe
from ghostexport.recovery.fits.least_squares import fit_moments
from ghostexport.runfolder import RunFolder

RESULTS = Path(__file__).parent / "results" / "requantization.json"
FORMS = ("int4", "nvfp4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    rows = [row for path in parser.parse_args().runs for row in compare(RunFolder(path))]
    write_json(RESULTS, {"torch": torch.__version__, "rows": rows})


def compare(folder: RunFolder) -> list[dict[str, Any]]:
    recipe = parse_recipe(read_recipe(folder.path / "recipe.yaml"))
    loaded = models.load_model(recipe.model.source, "float32", Execution(device="cpu"))
    plan, operators = folder.read_plan(), folder.read_operators("ghost")
    assert operators is not None and len(operators.operators) == 1, "one cut"
    (old,) = operators.operators
    drawn, held_out = calibration.load(folder.calibration_path)
    rows = []
    for form in (form for form in FORMS if form in recipe.quantize.format):
        patched = models.patch(loaded, plan, operators).model
        graphs = folder.graph_path("ghost"), folder.graph_path(f"ghost.{form}")
        twin = round_weights(patched, *graphs)
        sums = gather(loaded.model, twin, plan.removed[0].stop, drawn)
        found = {"as it was": twin}
        for kind, moments in sums.items():
            new = fit_moments(kind, old.boundary, [moments], recipe.recover)
            found[f"{kind}, again"] = with_operator(twin, new)
        forwards = {name: torch_forward(model) for name, model in found.items()}
        forwards |= {"dense": torch_forward(loaded.model), "float": torch_forward(patched)}
        meters = measure(forwards, held_out, "dense", Execution(device="cpu"))
        row: dict[str, Any] = {"run": folder.path.name, "form": form, "recipe_sha256": recipe.sha256}
        row |= {"removed": [[span.start, span.stop] for span in plan.removed]}
        row["variants"] = {name: figures(meters[name], meters["as it was"]) for name in found | {"float": None}}
        rows.append(row)
        for name, cells in row["variants"].items():
            print(folder.path.name, form, name, cells, flush=True)
    return rows


def gather(dense: Any, quantised: Any, stop: int, drawn: CalibrationSet) -> dict[str, BoundaryMoments]:
    """Moments of the quantised stream before the operator and the dense stream behind the removed blocks."""
    seen: dict[str, torch.Tensor] = {}
    operator = next(m for m in quantised.modules() if isinstance(m, BoundaryModule))
    hooks = [
        operator.register_forward_pre_hook(lambda _, inputs: seen.__setitem__("x", inputs[0])),
        dense.model.layers[stop].register_forward_pre_hook(
            lambda _, args, kwargs: seen.__setitem__("post", args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        ),
    ]
    channels = dense.config.hidden_size
    sums = {"ghost": BoundaryMoments(channels), "ghost-weighted": BoundaryMoments(channels)}
    for batch in drawn.batches(tokens=1):
        with torch.no_grad():
            for model in (dense, quantised):
                model(input_ids=batch.input_ids, use_cache=False)
        x, post = (seen[key].flatten(0, 1) for key in ("x", "post"))
        sums["ghost"].add(x, post)
        sums["ghost-weighted"].add(x, post, token_weights(post))
    for hook in hooks:
        hook.remove()
    return sums


def with_operator(model: Any, operator: Operator) -> Any:
    """A copy of the model whose operator has other values; the rest is shared."""
    changed = share_weights(model)
    module = next(m for m in changed.modules() if isinstance(m, BoundaryModule))
    (name,) = dict(module.named_parameters())
    (value,) = operator.arrays.values()
    setattr(module, name, torch.nn.Parameter(torch.as_tensor(value), requires_grad=False))
    return changed


def figures(meter: Any, base: Any) -> dict[str, Any]:
    result = meter.result()
    found = differences(meter.windows, base.windows, resamples=2000, seed=0)
    return {
        "perplexity": result.perplexity,
        "kl": result.mean_kl,
        "over_as_it_was": math.exp(found["loss"]["difference"]),
        "over_as_it_was_interval": [math.exp(edge) for edge in found["loss"]["interval"]],
        "kl_change": found["kl"]["difference"],
        "kl_change_interval": found["kl"]["interval"],
    }


if __name__ == "__main__":
    main()
