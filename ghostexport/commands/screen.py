"""What the command line draws with rich: progress, the table of a run, the doctor's findings."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ghostexport.errors import RunFolderError
from ghostexport.execution import talk
from ghostexport.operators import read_fits
from ghostexport.recipe import parse_recipe, read_recipe
from ghostexport.runfiles import RunFiles
from ghostexport.runfolder import RunFolder

if TYPE_CHECKING:
    from ghostexport.benchmarking.budget import Fit
    from ghostexport.report.runs import Sweep
    from ghostexport.sizing.estimate import Verdict

# No markup: model names and pip extras contain square brackets.
out = Console(highlight=False, markup=False, soft_wrap=True)
_err = Console(highlight=False, markup=False, stderr=True)


#: Seconds after which a step shows where it is.
LONG = 3.0


def print_json(facts: Any) -> None:
    """Prints facts for machines."""
    out.print_json(json.dumps(facts))


class ProgressLines:
    """Progress where nobody draws: a line per tenth of a step that takes longer than three seconds."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._begun: dict[str, tuple[float, int]] = {}
        self._last: dict[str, int] = {}

    def update(self, task: str, done: int, total: int | None) -> None:
        """See :data:`ghostexport.execution.Progress`."""
        name, now = task.partition(" · ")[0], time.monotonic()
        last = self._last.get(name, done)
        if name not in self._begun or done < last:  # a new step, or the same once more
            self._begun[name], last = (now, done), done
        self._last[name] = done
        begun, first = self._begun[name]
        soon = now - begun < LONG and not talk.verbose
        if total is None or total < 2 or soon or 10 * done // total == 10 * last // total:
            return
        left = round((now - begun) * (total - done) / (done - first))
        rest = "done" if done >= total else f"about {left // 60}:{left % 60:02d} left"
        self._write(f"{task}: {done} of {total} ({100 * done // total} %), {rest}")


@contextlib.contextmanager
def display() -> Iterator[dict[str, Any]]:
    """Yields the callbacks of an :class:`Execution`: lines anywhere; bars and a live table on a terminal.

    A step without a count, such as loading a model, has a moving bar and its time so far.
    """
    counted = (MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    if talk.quiet:
        yield {}
        return
    columns = (TextColumn("{task.description}"), BarColumn(), *counted)
    bars = Progress(*columns, console=_err)
    tasks: dict[str, Any] = {}

    def update(task: str, done: int, total: int | None) -> None:
        name = task.partition(" · ")[0]
        if name not in tasks:
            tasks[name] = bars.add_task(task, total=total)
        bars.update(tasks[name], completed=done, total=total, description=task, visible=total is None or done < total)

    said: set[str] = set()

    def say(line: str) -> None:
        if line not in said:  # an engine is opened for its parity, its quality and its speed
            said.add(line)
            _err.print(line, soft_wrap=True)

    if not _err.is_terminal:
        lines = ProgressLines(lambda line: _err.print(line, soft_wrap=True))
        yield {"progress": lines.update, "say": say}
        return
    with Live(bars, console=_err, transient=True) as live:

        def table(names: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> None:
            drawn = Table("ms", *names)
            for label, cells in rows:
                drawn.add_row(label, *cells)
            live.update(Group(drawn, bars))

        yield {"progress": update, "say": say, "table": table}


def print_pieces(pieces: Iterable[str]) -> str:
    """Prints text as it comes; returns the whole."""
    said = []
    for piece in pieces:
        said.append(piece)
        out.print(piece, end="")
    out.print()
    return "".join(said)


def print_beside(names: Sequence[str], texts: Sequence[str]) -> None:
    """Prints one text per column."""
    table = Table(*names, show_lines=True)
    table.add_row(*texts)
    out.print(table)


def print_run(path: Path, as_json: bool = False) -> None:
    """Prints the variants of a run folder, or one engine by its sidecar.

    Raises:
        RunFolderError: the path is neither.
    """
    if path.suffix == ".json" and path.is_file():
        from ghostexport.commands.graph_screen import print_engine

        print_engine(path, as_json)
        return
    folder = RunFolder(path)
    if not folder.recipe_path.is_file():
        raise RunFolderError(f"{path} is not a run folder (no recipe.yaml).", "Make one with: ghostexport build engine")
    recipe = parse_recipe(read_recipe(folder.recipe_path), str(folder.recipe_path))
    run = folder.read()
    if as_json:
        facts = {name: getattr(run, name) for name in _RAW} | {"fits": run.fits, "path": str(path)}
        out.print_json(json.dumps(facts | {"summary": {name: bench["summary"] for name, bench in run.benches.items()}}))
        return
    if run.plan is not None and "select" in run.finished:
        out.print(f"{recipe.model.source}: removed {run.cut} ({run.plan['criterion']})")
    rows = variant_rows(run, recipe.variants)
    if rows:
        out.print(_table(rows))
    out.print(f"run folder: {path}   finished: {', '.join(run.finished) or 'nothing yet'}")


#: Parsed files of a run that ``show --json`` gives as they are.
_RAW = ("recipe", "plan", "finished", "engine_quality", "model_quality", "parity", "sidecars", "quantization")


def variant_rows(run: RunFiles, variants: Sequence[str]) -> list[dict[str, str]]:
    """One row per variant with whatever the finished stages know; columns nobody knows are left out."""
    facts = {variant: _variant_facts(run, variant) for variant in variants}
    columns = list(dict.fromkeys(column for row in facts.values() for column in row))
    return [{"variant": v, **{c: facts[v].get(c, "") for c in columns}} for v in variants] if columns else []


def _variant_facts(run: RunFiles, variant: str) -> dict[str, str]:
    facts: dict[str, str] = {}
    size = run.engine_quality.get("sizes", {}).get(variant, {})
    for column, key, form in (("blocks", "blocks", "{}"), ("parameters", "parameters", "{:,}")):
        if key in size:
            facts[column] = form.format(size[key])
    if "weight_bytes" in size:
        facts["MB"] = f"{size['weight_bytes'] / 1e6:.1f}"
    if variant in run.quantization:
        facts["weights in"] = run.quantization[variant]["form"]
    if variant in run.operator_files:
        fits = read_fits(run.operator_files[variant])
        for column, key in (("NMSE held-out", "nmse_held_out"), ("relative error held-out", "relative_error_held_out")):
            facts[column] = ", ".join(f"{fit[key]:.3f}" for fit in fits if key in fit)
    # of the engines where they are benchmarked, else of the models; none that an earlier plan left
    measured = ({} if "bench" in run.outdated else run.engine_quality).get("variants", {}).get(variant)
    quality = measured or run.model_quality.get("variants", {}).get(variant, {})
    for column, key, form in (
        ("perplexity", "perplexity", "{:.2f}"),
        ("KL to dense", "kl", "{:.3f}"),
        ("top-1", "top1", "{:.1%}"),
    ):
        if key in quality:
            facts[column] = form.format(quality[key])
    for bench in run.benches.values():
        facts |= bench.get("summary", {}).get(variant, {})
    for runtime, sidecars in run.sidecars.items():
        if variant in sidecars:
            facts[f"{runtime} engine"] = f"{sidecars[variant]['plan_bytes'] / 1e6:.0f} MB"
    return facts


def _table(rows: list[dict[str, str]]) -> Table:
    """One column per variant: figures are many, variants few, and terminals narrow."""
    table = Table("", *(row["variant"] for row in rows))
    for column in table.columns[1:]:
        column.justify = "right"
    for figure in rows[0]:
        if figure != "variant":
            table.add_row(figure, *(row[figure] for row in rows))
    return table


def print_doctor(as_json: bool = False) -> None:
    """Prints which runtimes work here; as JSON with the versions that a report of a fault needs."""
    from ghostexport.runtimes import doctor

    if as_json:
        import platform
        from importlib.metadata import distributions

        wanted = ("ghostexport", "torch", "transformers", "onnx", "onnx-ir", "numpy")
        names = ("runtime", "build", "run", "version", "why")
        facts = {
            "python": platform.python_version(),
            "system": platform.platform(),
            "packages": {d.name: d.version for d in distributions() if d.name in wanted},
            "runtimes": [dict(zip(names, row, strict=True)) for row in doctor()],
        }
        out.print_json(json.dumps(facts))
        return
    table = Table()
    for column in ("runtime", "build", "run", "version", "why"):
        table.add_column(column)
    for row in doctor():
        table.add_row(*(("yes" if v else "no") if isinstance(v, bool) else str(v) for v in row))
    out.print(table)


def print_estimate(verdicts: Sequence[Verdict], as_json: bool) -> None:
    """Prints what every stage would need, and the way out where it will not fit."""
    if as_json:
        out.print_json(json.dumps([dataclasses.asdict(verdict) for verdict in verdicts]))
        return
    table = Table("stage", "memory, GB", "disk, GB", "minutes", "fits", "most of the memory")
    for verdict in verdicts:
        need = verdict.need
        most = max(need.parts, key=lambda name: need.parts[name])
        fits = f"no: {verdict.lacks}" if verdict.lacks else "tight" if verdict.tight else "yes"
        figures = (f"{need.memory / 1e9:.1f}", f"{need.disk / 1e9:.1f}", f"{need.seconds / 60:.0f}")
        table.add_row(need.stage, *figures, fits, f"{most} {need.parts[most] / 1e9:.1f}")
    out.print(table)
    for verdict in verdicts:
        if verdict.way:
            out.print(f"{verdict.need.stage}: {verdict.way}")


def print_explanation(path: Path, as_json: bool = False) -> None:
    """Prints a run in plain words."""
    from ghostexport.report.explanation import explain

    folder = RunFolder(path)
    if not folder.recipe_path.is_file():
        raise RunFolderError(f"{path} is not a run folder (no recipe.yaml).", "Make one with: ghostexport build engine")
    sentences = explain(folder.read())
    if as_json:
        print_json(list(sentences))
        return
    for sentence in sentences:
        out.print(sentence)


def print_comparison(first: Path, second: Path, as_json: bool = False) -> None:
    """Prints two runs side by side."""
    from ghostexport.report.runs import compare

    found = compare(first, second)
    if as_json:
        print_json(found.to_json())
        return
    table = Table("", found.a, found.b, "A / B", "verdict")
    for label, cells in found.rows():
        table.add_row(label, *cells)
    out.print(table)
    for title, lines in (
        ("differs", found.differs),
        ("no verdict", found.withheld),
        ("in one run only", found.only_in_one),
    ):
        if lines:
            out.print(f"{title}: {'; '.join(lines)}")


def print_sweep(sweep: Sweep, as_json: bool = False) -> None:
    """Prints perplexity and speed-up by depth, one column per variant."""
    if as_json:
        print_json(sweep.to_json())
        return
    table = Table("removed", *sweep.variants, title=f"perplexity / speed-up, {sweep.workload} on {sweep.runtime}")
    for removed, cells in sweep.table():
        table.add_row(str(removed), *cells)
    out.print(table)


def print_fit(fit: Fit, device: str, as_json: bool = False) -> None:
    """Prints what fits a device, and what was chosen."""
    if as_json:
        print_json(fit.to_json())
        return
    from ghostexport.benchmarking.budget import FIT_COLUMNS, REACHED

    table = Table(f"{device}, {fit.budget.bandwidth / 1e9:.0f} GB/s", *FIT_COLUMNS)
    for label, cells in fit.rows():
        table.add_row(label, *cells)
    out.print(table)
    out.print(f"tokens/s: {REACHED:.0%} of what the bandwidth allows after {fit.budget.context} tokens; not measured")
    if fit.chosen is not None:
        out.print(f"chosen: {fit.chosen.title}; go on with: ghostexport build engine {fit.chosen.run}")
