"""The report: one self-contained page made from nothing but the files of a run folder.

A section whose files are missing is empty but for a line that names the command which makes them; the evaluation,
which no other stage needs, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ghostexport.benchmarking.budget import FIT_COLUMNS, REACHED, Fit
from ghostexport.errors import RuntimeUnavailableError
from ghostexport.files import write_bytes
from ghostexport.operators import load_operators
from ghostexport.report import plots
from ghostexport.report.explanation import explain
from ghostexport.report.runs import Sweep, sweep_plots
from ghostexport.report.sections import (
    Section,
    evaluation_section,
    number_rows,
    quantization_section,
    selection_section,
)
from ghostexport.report.table import Row, headline, quality_rows, sentences, size_rows, speed_rows
from ghostexport.runfiles import RunFiles
from ghostexport.runfolder import RunFolder

#: Heat maps drawn; more boundaries are listed in the table only.
MAX_HEAT_MAPS = 6


def write_report(folder: RunFolder) -> Path:
    """Writes the report into the run folder.

    Raises:
        RunFolderError: a file of the run is unreadable.
        RuntimeUnavailableError: jinja2 or matplotlib is not installed.
    """
    write_bytes(folder.report_path, render(folder).encode())
    return folder.report_path


def render(folder: RunFolder) -> str:
    """The report of a run as HTML.

    Raises:
        RunFolderError: a file of the run is unreadable.
        RuntimeUnavailableError: jinja2 or matplotlib is not installed.
    """
    run = folder.read()
    words = Section("words", "In plain words", sentences=explain(run))
    sections = [words, _summary(run), _pareto(run)]
    sections += [evaluation_section(run.model_quality)] if run.model_quality else []
    sections += [
        s for name, bench in run.benches.items() for s in (_speed(run, name, bench), _latency(run, name, bench))
    ]
    sections += [_sizes(run), selection_section(run), _operators(run)]
    sections += [quantization_section(run)] if run.quantization else []
    sections += [_graph(run), _conditions(run), _reproduce(run)]
    facts = {"Model": run.model, "Removed": run.cut, "Runtimes": ", ".join(run.benches) or "not measured yet"}
    for name, bench in run.benches.items():
        card = bench["card"]
        device = card.get("gpu", {}).get("name") or card["cpu"]
        facts |= {"Device": f"{device}, {card['threads']} CPU threads", f"Measured ({name})": bench["created"]}
    return fill("ghostexport report", Path(run.model).name, facts, sections)


def render_sweep(sweep: Sweep) -> str:
    """The report of several depths of one model as HTML."""
    rows: list[Row] = [(f"n = {n}", cells) for n, cells in sweep.table()]
    section = Section(
        "sweep",
        "Depth, quality and speed",
        "Every point is an engine measured on its own run; speed-ups are over the dense engine of the same run.",
        tables=[("Perplexity / speed-up over dense", sweep.variants, rows)],
        plots=sweep_plots(sweep),
    )
    return fill(
        "ghostexport sweep", Path(sweep.model).name, {"Model": sweep.model, "Runtime": sweep.runtime}, [section]
    )


def render_fit(fit: Fit, device: str) -> str:
    """What fits a device, as HTML."""
    section = Section(
        "fit",
        "What fits",
        f"Right and down is better. Speed is {REACHED:.0%} of what the bandwidth allows one sequence after "
        f"{fit.budget.context} tokens: an assumption until an engine is measured.",
        tables=[("", FIT_COLUMNS, fit.rows())],
        plots=[plots.curves("Quality over speed", "tokens/s expected", "held-out perplexity", fit.lines())],
    )
    facts = {"Model": fit.candidates[0].model, "Device": f"{device}, {fit.budget.bandwidth / 1e9:.0f} GB/s"}
    facts["Chosen"] = "nothing fits" if fit.chosen is None else fit.chosen.title
    return fill("ghostexport fit", Path(fit.candidates[0].model).name, facts, [section])


def fill(title: str, heading: str, facts: Mapping[str, str], sections: Iterable[Section]) -> str:
    """Puts sections into the page template."""
    try:
        import jinja2
    except ImportError as error:
        raise RuntimeUnavailableError(
            "The report needs jinja2, which is not installed.", "pip install 'ghostexport[report]'"
        ) from error
    source = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    page = environment.from_string(source)
    return page.render(title=title, heading=heading, facts=facts, sections=list(sections))


def _summary(run: RunFiles) -> Section:
    section = Section("summary", "Summary")
    variants = run.variants
    rows: list[Row] = []
    for name, bench in run.benches.items():
        section.sentences += [f"{name}: {s}" if len(run.benches) > 1 else s for s in sentences(bench)]
        section.sentences += [f"Caution, {name}: {flag}." for flag in bench["flags"]]
        rows += [r for r in size_rows(bench, variants) if r[0] in ("decoder blocks", "weights, MB")] if not rows else []
    rows += quality_rows(run.engine_quality, variants)
    for name, bench in run.benches.items():
        suffix = f" ({name})" if len(run.benches) > 1 else ""
        top = [w for w, _ in filter(None, [headline(bench)])]
        chosen = {"measurements": [], "comparisons": bench["comparisons"]} | {
            "measurements": [m for m in bench["measurements"] if m["workload"] in top or m["metric"] == "latency"]
        }
        rows += [(label + suffix, cells) for label, cells in speed_rows(chosen, variants)]
    if rows:
        section.tables.append(("", variants, rows))
    if not run.benches:
        section.missing = f"No speed figures yet. Measure them with: ghostexport bench {run.path}"
    return section


def _pareto(run: RunFiles) -> Section:
    section = Section(
        "pareto",
        "Quality, speed and size",
        "Over speed right and down is better, with 95 % intervals of the speed-up; over bytes, left and down.",
    )
    perplexity = {v: q["perplexity"] for v, q in run.engine_quality.get("variants", {}).items() if q.get("perplexity")}
    for name, bench in run.benches.items():
        top = headline(bench)
        points = {"dense": (1.0, 1.0, 1.0, perplexity["dense"])} if "dense" in perplexity else {}
        for c in bench["comparisons"]:
            if c["against"] == "dense" and (c["workload"], c["metric"]) == top and c["variant"] in perplexity:
                s = c["speedup"]
                points[c["variant"]] = (s["value"], s["low"], s["high"], perplexity[c["variant"]])
        if top and len(points) > 1:
            section.plots.append(plots.pareto(points, "held-out perplexity", f"speed-up over dense, {top[0]} ({name})"))
        sizes = {v: car["weight_bytes"] / 1e6 for v, car in run.sidecars.get(name, {}).items() if v in perplexity}
        if len(set(sizes.values())) > 1:
            bytes_ = {v: (mb, mb, mb, perplexity[v]) for v, mb in sizes.items()}
            section.plots.append(plots.pareto(bytes_, "held-out perplexity", f"weights, MB ({name})"))
    if not section.plots:
        section.missing = f"Needs quality and speed of the engines: ghostexport bench {run.path}"
    return section


def _speed(run: RunFiles, name: str, bench: Mapping[str, Any]) -> Section:
    rows = speed_rows(bench, run.variants)
    intro = (
        "Medians of raw samples. Speed-up: geometric mean of per-round ratios, ± half of the 95 % bootstrap interval. "
        "Ideal: ratio of weight and KV bytes (decode, ITL), of FLOPs (prefill, TTFT), of roofline times (latency)."
    )
    section = Section(f"speed-{name}", f"Speed on {name}", intro, tables=[("", run.variants, rows)])
    section.sentences += [f"Not run: {w}: {reason}." for w, reason in bench["skipped"].items()]
    if profiled := next(filter(None, (v.get("profiled") for v in bench["variants"].values())), None):
        files = f"bench/{name}/profile_*.json and layers_*.json"
        section.sentences.append(f"Times of every layer on {profiled}, in trtexec's layout: {files}.")
    found: list[Row] = []
    for what, label in (("mbu", "MBU"), ("mfu", "MFU"), ("joules_per_token", "J per token")):
        known = {(m["workload"], m["variant"]): m[what] for m in bench["measurements"] if m.get(what) is not None}
        form = "{:.3g}" if what == "joules_per_token" else "{:.0%}"
        for workload in dict.fromkeys(w for w, _ in known):
            cells = [form.format(known[workload, v]) if (workload, v) in known else "" for v in run.variants]
            found.append((f"{label}, {workload}", cells))
    if found:
        section.tables.append(
            ("Utilisation of the measured ceilings, and energy where the board tells it", run.variants, found)
        )
    return section


def _latency(run: RunFiles, name: str, bench: Mapping[str, Any]) -> Section:
    section = Section(
        f"latency-{name}",
        f"Latency distributions on {name}",
        "Every dot is one raw sample; the line spans the quartiles, the tick is the median.",
    )
    rows: list[Row] = []
    for workload, metric in dict.fromkeys((m["workload"], m["metric"]) for m in bench["measurements"]):
        found = [m for m in bench["measurements"] if (m["workload"], m["metric"]) == (workload, metric)]
        samples = {m["variant"]: [s * 1e3 for r in m["rounds"] for s in r] for m in found}
        title = workload if metric == "seconds" else f"{workload} {metric}"
        section.plots.append(plots.distributions(title, samples))
        rows.append((title, []))
        for m in found:
            s = m["summary"]
            cells = [f"{s[key] * 1e3:.2f}" for key in ("median", "p90", "p95", "p99")] + [f"{s['cv']:.1%}", str(s["n"])]
            rows.append((m["variant"], cells))
            section.sentences += [f"Caution, {title}, {m['variant']}: {flag}." for flag in m["flags"]]
    columns = ["median", "p90", "p95", "p99", "CV", "n"]
    section.tables.append(("Milliseconds; percentiles by trtexec's rule", columns, rows))
    return section


def _sizes(run: RunFiles) -> Section:
    section = Section("sizes", "Size, memory, build")
    for name, bench in run.benches.items():
        section.tables.append((name, run.variants, size_rows(bench, run.variants)))
    for name, sidecars in run.sidecars.items():
        groups = {
            "weights": {v: sidecars[v]["weight_bytes"] / 1e6 for v in run.variants if v in sidecars},
            "engine": {v: sidecars[v]["plan_bytes"] / 1e6 for v in run.variants if v in sidecars},
        }
        if groups["weights"]:
            section.plots.append(plots.bars(f"{name} engines", groups, "MB"))
    if not section.plots:
        section.missing = f"No engines yet. Build them with: ghostexport build engine {run.path}"
    return section


def _operators(run: RunFiles) -> Section:
    section = Section("operators", "The operators", "y = x + x M. Colours: entries of M, pooled by largest magnitude.")
    fits: dict[str, Mapping[str, Any]] = {}
    spectra: dict[str, Any] = {}
    maps: list[str] = []
    for variant, path in run.operator_files.items():
        operators = load_operators(path)
        for b, operator in enumerate(operators.operators):
            name = variant if len(operators.operators) == 1 else f"{variant} {b}"
            fits[name] = operator.fit
            matrix = operator.matrix
            if matrix is not None and len(maps) < MAX_HEAT_MAPS:
                maps.append(plots.heat_map(f"M of {name}", np.asarray(matrix, np.float32)))
                spectra[name] = np.linalg.svd(np.asarray(matrix, np.float32), compute_uv=False)
    if not run.operator_files:
        section.missing = f"No operators yet. Fit them with: ghostexport recover {run.path}"
    if spectra:
        section.plots = [*maps, plots.singular_values(spectra)]
    if fits:
        section.tables.append(("Figures of the fit", list(fits), number_rows(fits)))
    return section


def _graph(run: RunFiles) -> Section:
    section = Section("graph", "The graph around the cut", "Left: dense. Right: with the operator spliced in.")
    if run.plan is None:
        section.missing = f"No plan yet. Make it with: ghostexport select {run.path}"
        return section
    blocks = run.plan["num_blocks"]
    spliced = [r for r in run.surgery.values() if any(b.get("nodes_added") for b in r.get("boundaries", []))]
    names = {b["boundary"]: b for report in spliced[:1] for b in report["boundaries"]}
    for b, (start, stop) in enumerate(run.plan["removed"]):
        section.cuts.append(
            {
                "before": f"block {start - 1}" if start else "embedding",
                "first": start,
                "last": stop - 1,
                "removed": stop - start,
                "after": f"block {stop}" if stop < blocks else "final norm",
                "after_new": _renumbered(run.plan, stop),
                "operator": f"ghost.{b}",
                "value": f"x = {names[b]['stream_in']}" if b in names else "x",
                "value_after": names[b]["stream_out"] if b in names else "",
            }
        )
    if run.surgery:
        section.tables.append(("What surgery reports", list(run.surgery), number_rows(run.surgery)))
    return section


def _renumbered(plan: Mapping[str, Any], stop: int) -> str:
    if stop == plan["num_blocks"]:
        return "final norm"
    before = sum(b - a for a, b in plan["removed"] if b <= stop)
    return f"block {stop - before} (was {stop})"


def _conditions(run: RunFiles) -> Section:
    section = Section("conditions", "The machine")
    for name, bench in run.benches.items():
        card, ceilings = bench["card"], bench["ceilings"]
        flat = {k: v for k, v in card.items() if not isinstance(v, dict)} | card.get("gpu", {}) | card["versions"]
        rows: list[Row] = [(str(key).replace("_", " "), [str(value)]) for key, value in flat.items()]
        if ceilings:
            rows.append(("read bandwidth", [f"{ceilings['bytes_per_second'] / 1e9:.1f} GB/s"]))
            rows.append(("matrix product", [f"{ceilings['flops_per_second'] / 1e9:.0f} GFLOP/s {ceilings['dtype']}"]))
            rows.append(("how the ceilings were measured", [ceilings["method"]]))
        rows.append(("CPU time of other processes", [f"{bench['conditions']['other_load']:.1%}"]))
        rows.append(("energy", [bench["energy_source"] or "not readable here"]))
        section.tables.append((name, ["value"], rows))
    if not run.benches:
        section.missing = f"Not measured yet. Run: ghostexport bench {run.path}"
    return section


def _reproduce(run: RunFiles) -> Section:
    section = Section("reproduce", "How to reproduce")
    if run.recipe_text is None:
        section.missing = "No recipe in this folder. Make a run with: ghostexport build engine MODEL -o RUN"
        return section
    section.intro = "Save the recipe below as recipe.yaml, then run the two commands."
    model = run.model
    commands = f"ghostexport build engine {model} --recipe recipe.yaml -o RUN\nghostexport bench RUN\n"
    section.pre = f"{commands}\n# recipe.yaml\n{run.recipe_text}"
    return section
