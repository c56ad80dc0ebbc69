"""Sizes of a model from its configuration alone: the model is built without memory (PyTorch's meta device)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ghostexport.errors import ModelLayoutError
from ghostexport.models.blocks import find_blocks
from ghostexport.models.configs import auto_class, read_config
from ghostexport.models.silence import silenced


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, in numbers, not bytes; tied weights count once.

    Attributes:
        name: of its class.
        blocks: decoder blocks.
        hidden: ``C``.
        vocabulary: rows of the embedding.
        parameters: all.
        in_blocks: of all blocks; ``largest_block``: of the one that has most.
        widest: largest side of a matrix in a block, ``I`` of most.
        dtype: that the checkpoint says it is in; ``float32`` where it does not.
    """

    name: str
    blocks: int
    hidden: int
    vocabulary: int
    parameters: int
    in_blocks: int
    largest_block: int
    widest: int
    dtype: str


def read_shape(config: Path, trust_remote_code: bool = False) -> ModelShape:
    """The sizes of the model of a ``config.json`` (or of a folder that holds one); no weight is read or made.

    Raises:
        ModelLayoutError: not a decoder-only LM that transformers knows, or its blocks are not found.
    """
    path = config / "config.json" if config.is_dir() else config
    return _shape(path, path.stat().st_mtime_ns if path.exists() else 0, trust_remote_code)


@lru_cache(maxsize=8)
def _shape(path: Path, _mtime_ns: int, trust_remote_code: bool) -> ModelShape:
    config = read_config(path, trust_remote_code)
    try:
        with torch.device("meta"), silenced("transformers"):
            model: Any = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a class of transformers, or code from outside, raises without memory
        raise ModelLayoutError(f"No model can be made of {path} without its weights: {error}") from error
    blocks = find_blocks(model)
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    dtype = str(getattr(config, "dtype", None) or config.get_text_config().dtype or "float32")
    return ModelShape(
        name=type(model).__name__,
        blocks=len(blocks),
        hidden=int(config.get_text_config().hidden_size),
        vocabulary=int(model.get_input_embeddings().weight.shape[0]),
        parameters=sum(p.numel() for p in model.parameters()),
        in_blocks=sum(sizes),
        largest_block=max(sizes),
        widest=max(side for p in blocks.parameters() if p.ndim > 1 for side in p.shape[-2:]),
        dtype=dtype.removeprefix("torch."),
    )
