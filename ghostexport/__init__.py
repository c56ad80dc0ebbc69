"""Removes decoder blocks of an LLM, repairs the cut in closed form, and builds TensorRT engines.

The functions of :mod:`ghostexport.api`, and the types that they take and give. ``import ghostexport`` costs no torch:
public names are imported on first use (PEP 562), from where a type checker sees them below.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ghostexport.api import apply as apply
    from ghostexport.api import bench as bench
    from ghostexport.api import build as build
    from ghostexport.api import calibrate as calibrate
    from ghostexport.api import convert as convert
    from ghostexport.api import evaluate as evaluate
    from ghostexport.api import export as export
    from ghostexport.api import load as load
    from ghostexport.api import quantize as quantize
    from ghostexport.api import recover as recover
    from ghostexport.api import save as save
    from ghostexport.api import select as select
    from ghostexport.api import split as split
    from ghostexport.api import surgery as surgery
    from ghostexport.api import verify as verify
    from ghostexport.benchmarking.result import BenchReport as BenchReport
    from ghostexport.calibration import CalibrationSet as CalibrationSet
    from ghostexport.calibration import Tokens as Tokens
    from ghostexport.errors import GhostExportError as GhostExportError
    from ghostexport.evaluation.quality_meter import Quality as Quality
    from ghostexport.execution import Execution as Execution
    from ghostexport.exporters import export_model as export_model
    from ghostexport.exporters.graph_file import OnnxGraphFile as OnnxGraphFile
    from ghostexport.models import LoadedModel as LoadedModel
    from ghostexport.models import drop_blocks as drop_blocks
    from ghostexport.models import insert_operators as insert_operators
    from ghostexport.models import load_model as load_model
    from ghostexport.operators import Operator as Operator
    from ghostexport.operators import OperatorSet as OperatorSet
    from ghostexport.operators import load_operators as load_operators
    from ghostexport.pipeline import run as run
    from ghostexport.plan import BlockSpan as BlockSpan
    from ghostexport.plan import Boundary as Boundary
    from ghostexport.plan import PrunePlan as PrunePlan
    from ghostexport.recipe import BenchSection as BenchSection
    from ghostexport.recipe import BuildSection as BuildSection
    from ghostexport.recipe import CalibrationSection as CalibrationSection
    from ghostexport.recipe import EvalSection as EvalSection
    from ghostexport.recipe import ExportSection as ExportSection
    from ghostexport.recipe import ModelSection as ModelSection
    from ghostexport.recipe import QuantizeSection as QuantizeSection
    from ghostexport.recipe import Recipe as Recipe
    from ghostexport.recipe import RecoverSection as RecoverSection
    from ghostexport.recipe import SelectSection as SelectSection
    from ghostexport.recipe import parse_recipe as parse_recipe
    from ghostexport.runfolder import RunFolder as RunFolder
    from ghostexport.runtimes import load_engine as load_engine
    from ghostexport.runtimes import swap_operator as swap_operator
    from ghostexport.runtimes.base import EngineFile as EngineFile
    from ghostexport.surgery import GraphReport as GraphReport
    from ghostexport.surgery import SurgeryReport as SurgeryReport
    from ghostexport.surgery import inspect_graph as inspect_graph
    from ghostexport.surgery import operate as operate
    from ghostexport.surgery import read_operators as read_operators
    from ghostexport.verification import ParityReport as ParityReport

    __version__: str
else:
    import ast
    import importlib.metadata
    from typing import Any

    #: Public name -> module, read off the imports above.
    _HOME = {
        alias.asname: node.module
        for node in ast.walk(ast.parse(__spec__.loader.get_source(__name__)))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    __all__ = sorted(_HOME)

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return importlib.metadata.version("ghostexport")
        if name not in _HOME:
            raise AttributeError(f"module 'ghostexport' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOME[name]), name)

    def __dir__() -> list[str]:
        return [*__all__, "__version__"]
