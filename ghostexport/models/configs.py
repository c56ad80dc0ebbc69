"""Configurations of models: read from a checkpoint's ``config.json``, and the class that loads what one describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

from ghostexport.errors import ModelLayoutError

#: In a checkpoint of :func:`ghostexport.models.save_model`: operators that its weights cannot hold, and what marks the
#: configuration.
OPERATORS_FILE = "ghostexport.safetensors"
PATCHED = "ghostexport"

#: What transformers says where a source needs its own code, and what the user can do.
UNTRUSTING = "trust_remote_code"
UNTRUSTED = "It needs Python code that it brings. Read the code; to have it run, give --trust-remote-code."


def auto_class(config: Any) -> Any:
    """The class of transformers that loads what ``config`` describes."""
    sees = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def read_config(folder: Path, trust_remote_code: bool) -> Any:
    """The configuration of a decoder-only LM, from a folder or from its ``config.json``.

    Raises:
        ModelLayoutError: transformers does not know it, or it is not of a decoder-only LM.
    """
    source, path = folder, folder / "config.json" if folder.is_dir() else folder
    folder = path.parent
    try:
        kept = json.loads(path.read_text(encoding="utf-8")) if (folder / OPERATORS_FILE).exists() else {}
        if PATCHED in kept:
            config = transformers.AutoConfig.for_model(**kept | kept.pop(PATCHED))
        else:
            config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        raise ModelLayoutError(
            f"{path} is not a model configuration that transformers {transformers.__version__} knows: {error}",
            UNTRUSTED if UNTRUSTING in str(error) else "Use a decoder-only causal LM, or a newer transformers.",
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLayoutError(
            f"{folder} is an encoder-decoder model ({config.model_type}).", "Use a decoder-only causal LM."
        )
    names = list(getattr(config, "architectures", None) or [])
    headless = ("MaskedLM", "Classification", "QuestionAnswering", "PreTraining")
    if names and all(any(part in name for part in headless) for name in names):
        raise ModelLayoutError(
            f"{folder} holds {', '.join(names)}, not a causal language model.", "Use a decoder-only causal LM."
        )
    return config
