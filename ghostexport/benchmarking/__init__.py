"""The benchmark: how much faster, how much smaller, how much worse, on this device.

Reading order: :mod:`workloads` (what is run), :mod:`measuring` (how), :mod:`statistics`, :mod:`ideal`, :mod:`result`
(verdicts and the JSON). :func:`bench` puts them together, :mod:`bench_run` runs it on a run folder. Probes of the
machine are in :mod:`machine`, the page made of the results in :mod:`ghostexport.report`.
"""

from pathlib import Path

from ghostexport.benchmarking.benchmark import bench
from ghostexport.benchmarking.ideal import Ceilings, VariantFacts
from ghostexport.benchmarking.result import SCHEMA, BenchReport
from ghostexport.execution import Execution
from ghostexport.recipe import Recipe
from ghostexport.runfolder import RunFolder

__all__ = ["SCHEMA", "BenchReport", "Ceilings", "VariantFacts", "bench", "bench_run"]


def bench_run(folder: RunFolder, recipe: Recipe, execution: Execution) -> list[Path]:
    """The bench stage of a run; see :func:`ghostexport.benchmarking.bench_run.bench_run`."""
    from ghostexport.benchmarking.bench_run import bench_run as run  # imports torch; the rest of this package does not

    return run(folder, recipe, execution)
