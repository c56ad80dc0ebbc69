"""Hugging Face causal LMs: loading, their decoder blocks, their residual stream, and cutting and patching them."""

from ghostexport.models.anatomy import (
    Addition,
    Anatomy,
    find_anatomies,
    find_mid,
    find_projections,
    gain,
    right_multiply,
    scale_gain,
    set_right_multiply,
)
from ghostexport.models.blocks import check_layout, find_blocks, probe_tokens
from ghostexport.models.checkpoints import save_checkpoint
from ghostexport.models.loading import (
    LoadedModel,
    from_memory,
    load_model,
    load_tokenizer,
    patch,
    save_description,
    save_model,
)
from ghostexport.models.running import read_residuals
from ghostexport.models.sources import resolve_source, source_files
from ghostexport.models.variants import BoundaryModule, drop_blocks, insert_operators, needed_blocks
from ghostexport.models.walking import Shelf, read_streams

__all__ = [
    "Addition",
    "Anatomy",
    "BoundaryModule",
    "LoadedModel",
    "Shelf",
    "check_layout",
    "drop_blocks",
    "find_anatomies",
    "find_blocks",
    "find_mid",
    "find_projections",
    "from_memory",
    "gain",
    "insert_operators",
    "load_model",
    "load_tokenizer",
    "needed_blocks",
    "patch",
    "probe_tokens",
    "read_residuals",
    "read_streams",
    "resolve_source",
    "right_multiply",
    "save_checkpoint",
    "save_description",
    "save_model",
    "scale_gain",
    "set_right_multiply",
    "source_files",
]
