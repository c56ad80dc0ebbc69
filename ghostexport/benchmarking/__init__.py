"""The benchmark: how much faster, how much smaller, how much worse, on this device.

Reading order: :mod:`workloads` (what is run), :mod:`measuring` (how), :mod:`statistics`, :mod:`ideal`, :mod:`result`
(verdicts and the JSON). :func:`bench` puts them together, :mod:`bench_run` runs it on a run folder. Probes are in
:mod:`machine` and :mod:`energy`, the page made of the results in :mod:`ghostexport.report`.
"""

from ghostexport.benchmarking.benchmark import bench
from ghostexport.benchmarking.ideal import Ceilings, VariantFacts
from ghostexport.benchmarking.result import BenchReport

__all__ = ["BenchReport", "Ceilings", "VariantFacts", "bench"]
