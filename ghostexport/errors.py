"""Every exception a user can see. Each message says what is wrong, where, and what to do about it."""

from __future__ import annotations

from pathlib import Path

#: The page that explains every kind of error below a heading with its name; ``reference/errors.md`` of the site.
PAGE = Path(__file__).with_suffix(".md")


class GhostExportError(Exception):
    """Base of all errors shown without a traceback.

    Args:
        message: what is wrong and where.
        remedy: what the user can do about it; shown on a line of its own.
    """

    exit_code = 2

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message if remedy is None else f"{message}\n{remedy}")
        self.message = message
        self.remedy = remedy


class RecipeError(GhostExportError):
    """A recipe or flag is invalid. Remedy: the field path and the nearest valid name are in the message."""


class RunFolderError(GhostExportError):
    """An artefact is missing, stale or edited. Remedy: rerun the stage that the message names."""


class ModelLayoutError(GhostExportError):
    """Decoder blocks are not found, ambiguous or not residual-shaped. Remedy: use a decoder-only causal LM."""


class CalibrationError(GhostExportError):
    """Calibration text or activations are unusable. Remedy: more text, another source, or a wider dtype."""


class RecoveryError(GhostExportError):
    """A solve was singular or non-finite, or an operator does not apply. Remedy: more tokens or a larger ridge."""


class ExportError(GhostExportError):
    """The exporter failed; its own error is chained. Remedy: another opset or exporter."""


class SurgeryError(GhostExportError):
    """A graph cannot be cut or spliced as asked. Remedy: depends on the subclass; nothing was written."""


class BoundaryNotFound(SurgeryError):
    """No residual value separates the blocks. The message shows the best near miss and why it failed."""


class BoundaryAmbiguous(SurgeryError):
    """More than one value crosses the cut. The message lists the crossing values."""


class NameCollision(SurgeryError):
    """A name that the splice must create exists already. Remedy: rename it in the graph."""


class AlreadySpliced(SurgeryError):
    """The graph already carries an operator. Remedy: start again from the dense graph."""


class UnsupportedSharing(SurgeryError):
    """Blocks share state across the cut (KV sharing, skips, taps). Remedy: choose other blocks."""


class CapacityError(GhostExportError):
    """The machine has too little memory or disk for a stage. Remedy: the option that makes it fit is named."""


class ParityError(GhostExportError):
    """Two models that must agree do not. The message names output, metric and tolerance."""

    exit_code = 1


class RuntimeUnavailableError(GhostExportError):
    """A runtime or extra cannot be used here. Remedy: the ``pip install`` or driver that is missing."""


class BuildError(GhostExportError):
    """The engine builder failed; the captured builder log is in ``log`` and in the message."""

    def __init__(self, message: str, remedy: str | None = None, *, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message, remedy)
        self.log = log


def explained_at(kind: type[GhostExportError]) -> str:
    """The address where a kind of error is explained: on the site that the package names, else the page it brings."""
    from importlib import metadata

    try:
        named = metadata.metadata("ghostexport").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:  # a checkout on the path
        named = []
    site = dict(entry.split(", ", 1) for entry in named).get("Documentation")
    page = f"{site.rstrip('/')}/reference/errors.html" if site else str(PAGE)
    return f"{page}#{kind.__name__.lower()}"
