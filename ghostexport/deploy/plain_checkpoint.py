"""Target ``checkpoint``: an ordinary checkpoint with fewer blocks, for whatever reads those."""

from __future__ import annotations

from pathlib import Path

from ghostexport.deploy.bundle import Bundle
from ghostexport.deploy.remote_code import patched
from ghostexport.execution import Execution


def refusal(bundle: Bundle) -> str | None:
    """Why the variant does not fit, or None."""
    none = "a plain checkpoint has no place for an operator, and without it the model is a bare cut"
    return none if bundle.adds_nodes else None


def write(bundle: Bundle, output: Path, execution: Execution) -> None:
    """Writes config, weights, tokenizer and generation config; needs PyTorch and the base model."""
    from ghostexport.models.checkpoints import save_checkpoint

    model, tokenizer = patched(bundle, execution)
    save_checkpoint(model, tokenizer, output)
