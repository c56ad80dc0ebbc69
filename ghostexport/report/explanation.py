"""A run in plain words: what was removed, what it cost, what it bought, what limits it, what to try next."""

from __future__ import annotations

import math
from typing import Any

from ghostexport.recipe import BEST, HEAL, REFIT, float_variant
from ghostexport.report.table import headline
from ghostexport.runfiles import RunFiles

#: From here on a speed-up is all that the arithmetic allows; below, something else takes the time.
NEAR_IDEAL = 0.9
#: Nats per token above dense: 0.05 is 5 % of perplexity, which few readers notice; 0.3 is 35 %, which all do.
LITTLE, MUCH = 0.05, 0.3


def explain(run: RunFiles) -> list[str]:
    """Sentences about a run, from its files alone; each begins with what it is about."""
    if run.plan is None:
        return [f"Removed: nothing yet. Next: ghostexport select {run.path} --prune N"]
    chosen = run.plan.get("criterion")
    said = [f"Removed: decoder blocks {run.cut} of {run.model}{f', chosen by {chosen}' if chosen else ''}."]
    said += _cost(run)
    for runtime, bench in run.benches.items():
        said += _gain(runtime, bench, best_repair(run))
    return said + [f"Next: {advice}" for advice in _advice(run)]


def best_repair(run: RunFiles) -> str | None:
    """The float variant of least perplexity beside dense, or None where none is measured."""
    found = _perplexities(run)
    repaired = [name for name in found if name != "dense" and float_variant(name) == name]
    return min(repaired, key=found.__getitem__) if repaired else None


def _quality(run: RunFiles) -> dict[str, dict[str, Any]]:
    """Of the engines where they are current, else of the models."""
    measured = {} if "bench" in run.outdated else run.engine_quality.get("variants", {})
    return measured or run.model_quality.get("variants", {})


def _perplexities(run: RunFiles) -> dict[str, float]:
    found = {name: figures.get("perplexity") for name, figures in _quality(run).items()}
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value) and value > 0}


def _loss(run: RunFiles, variant: str) -> float:
    """Nats per token above dense."""
    found = _perplexities(run)
    return math.log(found[variant] / found["dense"])


def _cost(run: RunFiles) -> list[str]:
    found, best = _perplexities(run), best_repair(run)
    if best is None or "dense" not in found:
        return []
    text = f"Cost: held-out perplexity is {found[best]:.4g} with {best} and {found['dense']:.4g} dense"
    if "pruned" in found and best != "pruned":
        bare, left = _loss(run, "pruned"), _loss(run, best)
        text += f" ({found['pruned']:.4g} with the bare cut"
        text += f"; the repair undoes {(bare - left) / bare:.0%} of its loss)" if bare > 0 else ")"
    said = [text + "."]
    if (agreed := _quality(run)[best].get("top1")) is not None:
        said.append(f"Cost: the next token is the one dense would choose {agreed:.0%} of the time.")
    quantised = [name for name in found if name != best and float_variant(name) == best]
    return said + [f"Cost: {name} has perplexity {found[name]:.4g}." for name in quantised]


def _gain(runtime: str, bench: dict[str, Any], best: str | None) -> list[str]:
    top, said = headline(bench), []
    sizes = {name: entry["facts"]["weight_bytes"] / 1e6 for name, entry in bench["variants"].items()}
    if best in sizes and "dense" in sizes:
        said.append(f"Gain: weights of {sizes[best]:.0f} MB instead of {sizes['dense']:.0f} MB.")
    for c in bench["comparisons"]:
        if c["against"] != "dense" or (c["workload"], c["metric"]) != top or float_variant(c["variant"]) != best:
            continue
        speed, ideal = c["speedup"], c["ideal"]
        about = f"{c['workload']} on {runtime}: {c['variant']}"
        interval = (
            f"{speed['value']:.2f} times as fast as dense, 95 % interval {speed['low']:.2f} to {speed['high']:.2f}"
        )
        if c["verdict"] == "none":
            said.append(f"Gain: {about} has no verdict ({'; '.join(c['withheld'])}).")
        elif speed["low"] <= 1 <= speed["high"]:
            said.append(f"Gain: {about} is not measurably faster ({interval}).")
        else:
            said.append(f"Gain: {about} is {interval}.")
        if ideal is not None and c["of_ideal"] is not None:
            reached = c["of_ideal"] >= NEAR_IDEAL
            limit = "which is reached" if reached else f"of which {c['of_ideal']:.0%} is reached: the runtime limits it"
            said.append(f"Limit: the bytes and operations that are left allow {ideal:.2f}, {limit}.")
    return said + [f"Caution: on {runtime}, {flag}." for flag in bench["flags"]]


def _advice(run: RunFiles) -> list[str]:
    """What to try, most worth first."""
    found, best = _perplexities(run), best_repair(run)
    if best is None or "dense" not in found:
        return [f"measure what it cost: ghostexport eval {run.path}"]
    said, loss = [], _loss(run, best)
    if best == "pruned" and len(found) > 2:  # dense, pruned and a repair
        said.append(f"the bare cut beats every repair here; more text, or: ghostexport eval {run.path} --quality best")
    elif loss > LITTLE:
        operators = run.recipe.get("recover", {}).get("operators", [])
        strong = any(name.endswith(REFIT) or name in (BEST, HEAL) or "healed" in name for name in operators)
        if not strong:
            said.append(f"a better repair at the same speed: ghostexport eval {run.path} --quality best")
        elif loss > MUCH and not any("healed" in name for name in operators):
            said.append(f"repair with gradients: ghostexport eval {run.path} --quality heal")
        if loss > MUCH and run.num_removed > 1:
            said.append(f"fewer blocks: ghostexport eval {run.path} --prune {run.num_removed - 1}")
    elif not run.benches:
        said.append("little was lost; more blocks may go.")
    if not run.quantization:
        said.append(f"4-bit weights, the largest gain in speed: ghostexport bench {run.path} --quantize int4")
    if not run.benches:
        said.append(f"measure what it bought: ghostexport bench {run.path}")
    return said
