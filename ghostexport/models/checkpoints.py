"""Checkpoints on disk: saving a plain Hugging Face folder, and GGUF files de-quantised once into such a folder."""

from __future__ import annotations

import json
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import platformdirs
import torch
import transformers

from ghostexport.errors import ModelLayoutError
from ghostexport.execution import Execution
from ghostexport.files import require_space, sha256_file, write_json
from ghostexport.models.blocks import find_blocks
from ghostexport.models.gguf_settings import complete_config
from ghostexport.models.silence import hidden_progress_bars, silenced

#: Relative Frobenius distance below which an untied head is the embedding stored twice with two quantisations.
#: 4-bit formats measure near 0.1; independent matrices measure near 1.4.
SAME_HEAD = 0.25

_BYTES_PER_GGUF_BYTE = 8  # 4-bit blocks to float32


def convert_gguf(file: Path, execution: Execution) -> Path:
    """De-quantises a GGUF file into a plain folder under the user's cache and returns that folder.

    The folder is float32, holds configuration, weights and tokenizer, and loads in any transformers >= 4.57. It is
    written beside its final name and renamed, so an interrupted conversion leaves nothing behind.

    Raises:
        ModelLayoutError: the file is not GGUF, or transformers cannot read its architecture.
    """

    def convert() -> tuple[Any, Any]:
        model, tokenizer = _read(file, execution)
        if note := head_note(model):
            execution.say(note)
        return model, tokenizer

    size = _BYTES_PER_GGUF_BYTE * file.stat().st_size
    return made_once("gguf", sha256_file(file)[:32], f"converting {file.name}", size, convert, execution)


def made_once(
    kind: str, key: str, what: str, size: int, make: Callable[[], tuple[Any, Any]], execution: Execution
) -> Path:
    """The plain folder ``key`` in the user's cache of such a kind; written by ``make`` (model, tokenizer) when absent.

    ``what`` is said with the folder before it is made, which takes about ``size`` bytes.
    """
    cache = platformdirs.user_cache_path("ghostexport", appauthor=False) / kind
    folder = cache / key
    if (folder / "config.json").exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    require_space(cache, size, f"{what} to a plain model")
    execution.say(f"{what} to a plain model in {folder} (once)")
    model, tokenizer = make()
    temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=cache))
    try:
        save_checkpoint(model, tokenizer, temporary)
        if not folder.exists():
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


@hidden_progress_bars()
def save_checkpoint(
    model: Any, tokenizer: Any, folder: Path, weights: Mapping[str, Any] | None = None, **options: Any
) -> None:
    """Saves model and tokenizer so that both transformers 4.57 and 5 read the same rotary base and tokenizer.

    transformers 5 writes ``rope_parameters`` only, and 4.57 would silently fall back to ``rope_theta`` = 10000.
    ``weights`` are those to write; None for all of the model's. ``options`` are those of ``save_pretrained``.
    """
    model.save_pretrained(folder, state_dict=weights, **options)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    elif "rope_theta" in config:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
        config["rope_parameters"] |= config.get("rope_scaling") or {}
    write_json(folder / "config.json", config)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Saves a tokenizer under a class name that transformers 4.57 knows, too."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":  # a name that 4.57 does not know
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        write_json(path, settings)


def require_all_weights(model: Any, info: dict[str, Any], source: Path, execution: Execution) -> None:
    """Refuses a checkpoint of which parts would be random, or of whose blocks parts would be left out."""
    blocks = next(name for name, module in model.named_modules() if module is find_blocks(model))
    inside = re.compile(rf"(?:{re.escape(blocks)}|{re.escape(blocks.partition('.')[2] or blocks)})\.(\d+)\.")
    config = model.config.get_text_config()
    count = int(config.num_hidden_layers)
    predicting = range(count, count + int(getattr(config, "num_nextn_predict_layers", None) or 0))
    unused = sorted(info["unexpected_keys"])
    indices = {name: int(found[1]) for name in unused if (found := inside.match(name))}
    faults = {
        "lacks tensors that its configuration names": sorted(info["missing_keys"]),
        "holds tensors of other shapes than its configuration's": [
            f"{name} {list(have)} for {list(wanted)}" for name, have, wanted in sorted(info["mismatched_keys"])
        ],
        "holds tensors of decoder blocks that its configuration does not name": [
            name for name, index in indices.items() if index not in predicting
        ],
    }
    for fault, names in faults.items():
        if names:
            raise ModelLayoutError(
                f"The checkpoint {source} {fault}: {_shown(names)}.",
                "Use a Hugging Face checkpoint of the model."
                if source.suffix == ".gguf"
                else "Copy all its weight files, and the config.json that belongs to them, again.",
            )
    if unused:
        kind = "multi-token prediction" if all(indices.get(name) in predicting for name in unused) else "no use here"
        execution.say(f"{len(unused)} tensors of the checkpoint are left out ({kind}): {_shown(unused)}")


def _shown(names: Sequence[str], count: int = 4) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


@hidden_progress_bars()
def _read(file: Path, execution: Execution) -> tuple[Any, Any]:
    # Without dequantize transformers 5 may keep packed blocks; 4.57 has no such class and always unpacks.
    options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # refused below
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        with silenced("transformers"):
            read: Any = transformers.AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32, **options
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, OSError, LookupError, ImportError, NotImplementedError, RuntimeError, struct.error) as error:
        raise ModelLayoutError(
            f"{file} cannot be read as a GGUF language model: {error}", "Use a Hugging Face checkpoint of the model."
        ) from error
    loaded, info = read
    require_all_weights(loaded, info, file, execution)
    # A de-quantised model still carries its quantizer and refuses to be saved: rebuild it from config and weights.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    complete_config(config, file)
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model.eval(), tokenizer


def head_note(model: Any) -> str | None:
    """A sentence when an untied output head equals the embedding up to quantisation noise, else None."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is embedding.weight or head.weight.shape != embedding.weight.shape:
        return None
    with torch.no_grad():
        distance = float((head.weight - embedding.weight).norm() / embedding.weight.norm())
    if distance > SAME_HEAD:
        return None
    return (
        f"the output head equals the embedding up to quantisation noise (relative distance {distance:.3f}): the "
        "original model ties them; this one keeps both"
    )
