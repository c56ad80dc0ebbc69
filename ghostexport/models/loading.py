"""Loading a causal LM, checked to be made of residual decoder blocks."""

from __future__ import annotations

import atexit
import hashlib
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ghostexport.errors import ModelLayoutError, RecipeError, RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.models.blocks import check_layout, find_blocks, input_device
from ghostexport.models.checkpoints import save_checkpoint
from ghostexport.models.silence import hidden_progress_bars, silenced
from ghostexport.models.sources import resolve_source
from ghostexport.models.variants import drop_blocks, insert_operators
from ghostexport.operators import OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import Dtype

#: ``Execution.device`` of a model spread over devices, memory and disk.
SPLIT = "split"

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A causal LM in evaluation mode and what belongs to it.

    Attributes:
        model: the Hugging Face model.
        tokenizer: its tokenizer; None when the source has none.
        source: folder it came from, or a name.
        sha256: fingerprint of dtype, parameter names, shapes and a sample of the values, whatever the source's form.
    """

    model: Any
    tokenizer: Any
    source: str
    sha256: str

    @property
    def blocks(self) -> nn.ModuleList:
        return find_blocks(self.model)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def hidden_size(self) -> int:
        """``C``."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding matrix: every token id must be smaller."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def max_length(self) -> int | None:
        """Positions the model has; None when its configuration does not say."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def device(self) -> torch.device:
        return input_device(self.model)

    def require_whole(self, otherwise: str, remedy: str) -> None:
        """Raises ModelLayoutError, saying what follows and what to do, when parts of a split model are on disk."""
        if any(parameter.is_meta for parameter in self.model.parameters()):
            raise ModelLayoutError(f"{self.source} is partly on disk: {otherwise}.", remedy)


def load_model(
    source: str | Path, dtype: Dtype, execution: Execution | None = None, revision: str | None = None
) -> LoadedModel:
    """Loads a decoder-only causal LM and its tokenizer.

    Args:
        source: as for :func:`ghostexport.models.resolve_source`.
        dtype: of weights and activations.
        execution: its ``device`` is where the model goes; ``auto`` takes a GPU when there is one; ``split`` spreads a
            model that fits no single device over all of them, memory and disk (accelerate), for select and recover.
        revision: of a Hub repository.

    Raises:
        RecipeError: the source does not exist.
        ModelLayoutError: not a decoder-only LM made of residual blocks, not readable by transformers, or its weights
            are not those of its configuration.
    """
    execution = execution or Execution()
    folder = resolve_source(source, revision, execution)
    _require_causal(folder)
    options = _placement(execution) | {"output_loading_info": True, "ignore_mismatched_sizes": True}  # refused below
    try:
        with hidden_progress_bars(), silenced("transformers"):
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), **options
            )
    except (ValueError, OSError, KeyError, RuntimeError, ImportError) as error:
        raise ModelLayoutError(
            f"{folder} cannot be loaded as a causal language model: {error}", "Use a decoder-only causal LM."
        ) from error
    _require_all_weights(model, info, folder, execution)
    model = model.eval() if execution.device == SPLIT else nn.Module.to(model, _device(execution)).eval()
    return from_memory(model, load_tokenizer(folder), str(folder))


def from_memory(model: Any, tokenizer: Any = None, source: str = "memory") -> LoadedModel:
    """Wraps a model that is already in memory, after the same layout check.

    Raises:
        ModelLayoutError: not a decoder-only LM made of residual blocks.
    """
    check_layout(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return LoadedModel(model, tokenizer, source, _fingerprint(model))


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, or None when it has none.

    Raises:
        ModelLayoutError: it has tokenizer files that transformers cannot read.
    """
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, LookupError, TypeError, ImportError) as error:
        raise ModelLayoutError(
            f"The tokenizer in {folder} cannot be read: {error}", "Copy the model's tokenizer files again."
        ) from error


def patch(loaded: LoadedModel, plan: PrunePlan, operators: OperatorSet | None = None) -> LoadedModel:
    """The variant of a dense model: the plan's blocks dropped, the operators (if any) inserted. Shares its weights."""
    loaded.require_whole("it can be measured, not cut", "Use a device that holds it, or cut its exported graph.")
    model = drop_blocks(loaded.model, plan)
    if operators is not None:
        model = insert_operators(model, operators)
    return replace(loaded, model=model)


def save_patched(loaded: LoadedModel, plan: PrunePlan, operators: OperatorSet, folder: Path) -> list[Path]:
    """Writes the variant as an ordinary checkpoint that stock transformers loads; returns its files.

    Requires: the operators add no nodes, only new weights. The folder is complete or absent.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder.parent))
    try:
        save_checkpoint(patch(loaded, plan, operators).model, loaded.tokenizer, temporary)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sorted(path for path in folder.iterdir() if path.is_file())


def _placement(execution: Execution) -> dict[str, Any]:
    """Keywords that let accelerate place the parts of a split model; what fits nowhere else is read from disk."""
    if execution.device != SPLIT:
        return {}
    folder = Path(tempfile.mkdtemp(prefix="ghostexport-offload-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    memory = None if execution.memory is None else dict(execution.memory)
    return {"device_map": "auto", "max_memory": memory, "offload_folder": str(folder)}


def _require_causal(folder: Path) -> None:
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, KeyError) as error:
        raise ModelLayoutError(
            f"{folder / 'config.json'} is not a model configuration that transformers "
            f"{transformers.__version__} knows: {error}",
            "Use a decoder-only causal LM, or a newer transformers.",
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


def _require_all_weights(model: Any, info: dict[str, Any], folder: Path, execution: Execution) -> None:
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
                f"The checkpoint {folder} {fault}: {_shown(names)}.",
                "Copy all its weight files, and the config.json that belongs to them, again.",
            )
    if unused:
        kind = "multi-token prediction" if all(indices.get(name) in predicting for name in unused) else "no use here"
        execution.say(f"{len(unused)} tensors of the checkpoint are left out ({kind}): {_shown(unused)}")


def _shown(names: Sequence[str], count: int = 4) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def _device(execution: Execution) -> torch.device:
    if execution.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(execution.device)
    except RuntimeError as error:
        raise RecipeError(f"Unknown device {execution.device!r}.", "Use auto, cpu or cuda.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeUnavailableError("No CUDA device is usable by PyTorch here.", "Use --device cpu.")
    return device


def _fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.is_meta:  # on disk
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            continue
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)][:64].float().cpu().numpy()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()
