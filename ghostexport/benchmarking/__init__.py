"""The benchmark: how much faster, how much smaller, how much worse, on this device.

Reading order: :mod:`workloads` (what is run), :mod:`measuring` (how), :mod:`statistics`, :mod:`ideal`, :mod:`verdicts`,
:mod:`result` (the JSON), :mod:`report` (the page). :func:`bench` puts them together.
"""

from ghostexport.benchmarking.benchmark import bench
from ghostexport.benchmarking.ideal import Ceilings, VariantFacts
from ghostexport.benchmarking.result import SCHEMA, BenchReport

__all__ = ["SCHEMA", "BenchReport", "Ceilings", "VariantFacts", "bench"]
