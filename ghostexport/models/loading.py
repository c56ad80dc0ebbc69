"""Loading a causal LM, checked to be made of residual decoder blocks."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ghostexport.errors import ModelLayoutError, RecipeError, RunFolderError, RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.files import atomic_folder, write_bytes, write_json
from ghostexport.models.blocks import check_layout, find_blocks, input_device
from ghostexport.models.calls import num_outputs, run_alone
from ghostexport.models.checkpoints import require_all_weights, save_checkpoint, save_tokenizer
from ghostexport.models.configs import OPERATORS_FILE, PATCHED, UNTRUSTED, UNTRUSTING, auto_class, read_config
from ghostexport.models.silence import hidden_progress_bars, silenced
from ghostexport.models.sources import resolve_source
from ghostexport.models.variants import BoundaryModule, drop_blocks, insert_operators
from ghostexport.operators import OperatorSet, load_operators
from ghostexport.plan import PrunePlan
from ghostexport.recipe import Dtype
from ghostexport.sizing.capacity import measure_machine

#: ``Execution.device`` of a model spread over devices, memory and disk.
SPLIT = "split"

#: Sources as they stand, by dtype and whether they should be streamed, whose layout this process has checked -> their
#: fingerprint, and whether they are streamed: every stage loads the model anew, and the check reads all weights.
_checked: dict[Hashable, tuple[str, bool]] = {}

#: Share of the free memory that weights may take: passes over text need the rest.
HELD = 0.8

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tiktoken.model",
)


#: How a vision-language model reads pictures: as it was, whatever is done to its language tower.
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


#: Beginnings of the names of files that say who made a model and what may be done with it.
_LEGAL = ("LICENSE", "LICENCE", "NOTICE", "README.MD")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A causal LM in evaluation mode and what belongs to it.

    Attributes:
        model: the Hugging Face model.
        tokenizer: its tokenizer; None when the source has none.
        source: folder it came from, or a name.
        sha256: fingerprint of dtype, parameter names, shapes and a sample of the values, whatever the source's form.
            Of a patched model: that of the dense one.
        dense: the model that this one was made of; None when it is no variant made here.
        operators: what was put at its cuts; None for a dense model and a bare cut.
        walked: its weights are left in the files they are mapped from: passes go through it block by block.
    """

    model: Any
    tokenizer: Any
    source: str
    sha256: str
    dense: LoadedModel | None = None
    operators: OperatorSet | None = None
    walked: bool = False

    def generate(self, *args: Any, **options: Any) -> Any:
        """New tokens, as ``model.generate`` of transformers: the same arguments, the same result."""
        return self.model.generate(*args, **options)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The forward pass of the Hugging Face model."""
        return self.model(*args, **options)

    @property
    def config(self) -> Any:
        """Configuration of the Hugging Face model."""
        return self.model.config

    @property
    def blocks(self) -> nn.ModuleList:
        return find_blocks(self.model)

    @functools.cached_property
    def outputs(self) -> int:
        """How many values a block returns as a tuple; 0 where it returns the stream itself."""
        return num_outputs(self.model)

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
    source: str | Path,
    dtype: Dtype,
    execution: Execution | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Loads a decoder-only causal LM and its tokenizer.

    Args:
        source: as for :func:`ghostexport.models.resolve_source`.
        dtype: of weights and activations.
        execution: its ``device`` is where the model goes; ``auto`` takes a GPU when there is one; ``split`` spreads a
            model that fits no single device over all of them, memory and disk (accelerate), for select and recover.
        revision: of a Hub repository.
        trust_remote_code: run the Python code that the source brings, where transformers has no class of its own.

    Raises:
        RecipeError: the source does not exist.
        ModelLayoutError: not a decoder-only LM made of residual blocks, not readable by transformers, or its weights
            are not those of its configuration.
    """
    execution = execution or Execution()
    folder = resolve_source(source, revision, execution)
    config = read_config(folder, trust_remote_code)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, **_placement(execution)}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # refused below
    options |= _dequantised(config, folder)
    kind = auto_class(config)
    try:
        with hidden_progress_bars(), silenced("transformers"):
            read: Any = kind.from_pretrained(folder, config=config, dtype=getattr(torch, dtype), **options)
    except (ValueError, OSError, KeyError, RuntimeError, ImportError) as error:
        raise ModelLayoutError(
            f"{folder} cannot be loaded as a causal language model: {error}", "Use a decoder-only causal LM."
        ) from error
    model, info = read
    vars(model).pop("hf_quantizer", None)  # it would refuse to save what is an ordinary model now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    require_all_weights(model, info, folder, execution)
    model = model.eval() if execution.device == SPLIT else nn.Module.to(model, _device(execution)).eval()
    why, tokenizer = _why_streamed(model, execution), load_tokenizer(folder, trust_remote_code, config)
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir())
    key = (str(folder), dtype, bool(why), *files)
    if key not in _checked:
        loaded = from_memory(model, tokenizer, str(folder), bool(why))
        _checked[key] = (loaded.sha256, loaded.walked)
    sha256, walked = _checked[key]
    model.requires_grad_(False)
    loaded = LoadedModel(model, tokenizer, str(folder), sha256, walked=walked)
    if why:
        otherwise = "not streamed, its blocks read more than the stream: every batch reads all weights"
        execution.say(f"model: {'streamed from its files block by block' if loaded.walked else otherwise} ({why})")
    if not (beside := folder / OPERATORS_FILE).exists():
        return loaded
    operators = load_operators(beside)
    return replace(loaded, model=insert_operators(loaded.model, operators), operators=operators)


def from_memory(model: Any, tokenizer: Any = None, source: str = "memory", streaming: bool = False) -> LoadedModel:
    """Wraps a model that is already in memory, after the same layout check.

    ``streaming``: passes go through it block by block, where its blocks read nothing of each other but the stream.

    Raises:
        ModelLayoutError: not a decoder-only LM made of residual blocks.
    """
    loaded = LoadedModel(model, tokenizer, source, "")
    with run_alone(loaded) if streaming else contextlib.nullcontext([False]) as same:
        check_layout(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return replace(loaded, sha256=_fingerprint(model), walked=all(same))


def load_tokenizer(folder: Path, trust_remote_code: bool = False, config: Any = None) -> Any:
    """The folder's tokenizer, or None when it has none; ``config`` is the model's, where it is known.

    Raises:
        ModelLayoutError: it has tokenizer files that transformers cannot read.
    """
    if not any(path.name in _TOKENIZER_FILES or path.suffix == ".tiktoken" for path in folder.iterdir()):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, LookupError, TypeError, ImportError) as error:
        raise ModelLayoutError(
            f"The tokenizer in {folder} cannot be read: {error}",
            UNTRUSTED if UNTRUSTING in str(error) else "Copy the model's tokenizer files again.",
        ) from error


def patch(loaded: LoadedModel, plan: PrunePlan, operators: OperatorSet | None = None) -> LoadedModel:
    """The variant of a dense model: the plan's blocks dropped, the operators (if any) inserted. Shares its weights."""
    loaded.require_whole("it can be measured, not cut", "Use a device that holds it, or cut its exported graph.")
    model = drop_blocks(loaded.model, plan)
    if operators is not None:
        model = insert_operators(model, operators)
    return replace(loaded, model=model, dense=loaded, operators=operators)


def save_model(loaded: LoadedModel, folder: Path) -> list[Path]:
    """Writes a model and its tokenizer as a checkpoint, and returns its files. The folder is complete or absent.

    It is an ordinary checkpoint that stock transformers loads, unless the model's operators add nodes: no class of
    transformers computes those. Then they are written beside the weights, into :data:`OPERATORS_FILE`, and the
    configuration's ``model_type`` becomes ``ghostexport``, so that :func:`load_model` gives the model back, operators
    included, and transformers refuses the folder where it would load the bare cut without a word.

    Raises:
        RunFolderError: the folder exists and is no checkpoint.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").exists():
        raise RunFolderError(f"{folder} holds other files than a checkpoint.", "Name a new folder.")
    operators = loaded.operators if loaded.operators is not None and loaded.operators.adds_nodes else None
    inserted = tuple(f"{n}." for n, module in loaded.model.named_modules() if isinstance(module, BoundaryModule))
    weights = {name: t for name, t in loaded.model.state_dict().items() if not name.startswith(inserted)}
    with atomic_folder(folder) as temporary:
        save_checkpoint(loaded.model, loaded.tokenizer, temporary, weights if inserted else None)
        for name in _PROCESSOR_FILES:
            if (Path(loaded.source) / name).is_file():
                shutil.copyfile(Path(loaded.source) / name, temporary / name)
        if operators is not None:
            write_bytes(temporary / OPERATORS_FILE, operators.without_folds().to_bytes())
            config = json.loads((temporary / "config.json").read_text(encoding="utf-8"))
            config |= {"model_type": PATCHED, PATCHED: {"model_type": config["model_type"]}}
            write_json(temporary / "config.json", config)
        shutil.rmtree(folder, ignore_errors=True)
    return sorted(path for path in folder.iterdir() if path.is_file())


def save_description(loaded: LoadedModel, folder: Path) -> list[Path]:
    """Writes what is not weights, for whoever runs the graph: configurations, tokenizer, chat template, licence.

    Returns:
        the files. The folder is new: what stood there before is gone.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    loaded.model.config.save_pretrained(folder)
    if loaded.model.can_generate():
        loaded.model.generation_config.save_pretrained(folder)
    if loaded.tokenizer is not None:
        save_tokenizer(loaded.tokenizer, folder)
    for path in sorted(Path(loaded.source).glob("*")):
        if path.is_file() and (path.name.upper().startswith(_LEGAL) or path.name in _PROCESSOR_FILES):
            shutil.copyfile(path, folder / path.name)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _placement(execution: Execution) -> dict[str, Any]:
    """Keywords that let accelerate place the parts of a split model; what fits nowhere else is read from disk."""
    if execution.device != SPLIT:
        return {}
    folder = Path(tempfile.mkdtemp(prefix="ghostexport-offload-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    memory = None if execution.memory is None else dict(execution.memory)
    return {"device_map": "auto", "max_memory": memory, "offload_folder": str(folder)}


def _why_streamed(model: Any, execution: Execution) -> str:
    """Why passes should go through the model block by block (:mod:`ghostexport.models.walking`); empty where not."""
    if execution.device == SPLIT or input_device(model).type != "cpu":
        if execution.streaming:
            execution.say("model: not streamed, for that is done on a CPU alone (--device cpu)")
        return ""
    if execution.streaming is False:
        return ""
    weights, free = sum(p.nbytes for p in model.parameters()), measure_machine(Path(), "cpu").memory
    if execution.streaming or weights > HELD * free:
        return f"{weights / 1e9:.1f} GB of weights, {free / 1e9:.1f} GB of memory free"
    return ""


def _dequantised(config: Any, folder: Path) -> dict[str, Any]:
    """Keywords that make a quantised checkpoint an ordinary model.

    Raises:
        ModelLayoutError: transformers cannot do that in its format.
    """
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is None:
        return {}
    values = quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
    method = str(values.get("quant_method", "unknown"))
    makers = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
    if (maker := getattr(transformers, makers.get(method, ""), None)) is None:
        raise ModelLayoutError(
            f"{folder} holds weights quantised as {method!r}, which cannot be made ordinary weights here.",
            "Use the checkpoint that it was made from (its model card, or base_model, names it), or a GGUF file of it.",
        )
    known = {name: value for name, value in values.items() if name in ("weight_block_size", "modules_to_not_convert")}
    return {"quantization_config": maker(**known, dequantize=True)}


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
