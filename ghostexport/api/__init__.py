"""The verbs of the command line for a notebook: the same work and defaults, on values instead of a run folder.

::

    import ghostexport as gx

    model = gx.load("smollm2")
    tokens = gx.calibrate(model, "demo", sequences=32, length=512)
    plan = gx.select(model, tokens, prune=7)
    operators = gx.recover(model, plan, tokens, "ghost-split+refit")
    small = gx.apply(model, plan, operators)

Options are the keys of the verb's recipe section, with its defaults; they are validated as a recipe is, and errors are
those of :mod:`ghostexport.errors`. Stages of the pipeline are the same functions between files.
"""

from ghostexport.api.graphs import bench, build, convert, export, quantize, split, surgery, verify
from ghostexport.api.repairing import apply, calibrate, evaluate, load, recover, save, select

#: In the order of the pipeline.
__all__ = [  # noqa: RUF022
    "load",
    "calibrate",
    "select",
    "recover",
    "apply",
    "evaluate",
    "save",
    "export",
    "surgery",
    "quantize",
    "convert",
    "split",
    "verify",
    "build",
    "bench",
]
