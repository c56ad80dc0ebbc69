"""The logger given to TensorRT: it keeps warnings and errors, because a failed build says why only there."""

from __future__ import annotations

from typing import Any

_LIMIT = 400  # lines; a parser can warn once per node


def capture_log(trt: Any) -> Any:
    """A vendor logger with ``lines`` and ``text``: what was logged at WARNING or worse, oldest first."""

    class Capture(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            kind = {trt.ILogger.INTERNAL_ERROR: "F", trt.ILogger.ERROR: "E", trt.ILogger.WARNING: "W"}.get(severity)
            if kind and len(self.lines) < _LIMIT:
                self.lines.append(f"[{kind}] {message}")

        @property
        def text(self) -> str:
            """Errors, or all lines when there is no error."""
            errors = [line for line in self.lines if not line.startswith("[W]")]
            return "\n".join(errors or self.lines)

    return Capture()
