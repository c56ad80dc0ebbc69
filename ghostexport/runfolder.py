"""The run folder: artefacts of the stages, their hashes, and the question "is this stage current?"."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ghostexport.errors import RunFolderError
from ghostexport.files import atomic_path, cannot_write, sha256_file, write_json

SCHEMA = "ghostexport.manifest/1"


class RunFolder:
    """One run on disk. ``manifest.json`` has one entry per finished stage, written last: no entry = not finished."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def recipe_path(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def plan_path(self) -> Path:
        return self.path / "plan.json"

    @property
    def calibration_path(self) -> Path:
        return self.path / "calibration.safetensors"

    @property
    def statistics_path(self) -> Path:
        return self.path / "statistics.safetensors"

    def operators_path(self, variant: str) -> Path:
        return self.path / "operators" / f"{variant}.safetensors"

    def graph_path(self, variant: str) -> Path:
        return self.path / "onnx" / f"{variant}.onnx"

    def engine_path(self, runtime: str, variant: str) -> Path:
        """Path of the engine without its suffix, which the runtime chooses."""
        return self.path / "engines" / runtime / variant

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Serialises processes that write into this folder.

        Raises:
            RunFolderError: another process holds the lock.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path / ".lock")
            lock.acquire(timeout=0)
        except Timeout:
            raise RunFolderError(
                f"Another ghostexport process is writing into {self.path}.",
                "Wait for it, or use another folder with -o.",
            ) from None
        except OSError as error:
            raise cannot_write(self.path, error) from error
        try:
            yield
        finally:
            lock.release()

    def manifest(self) -> dict[str, Any]:
        """The manifest, or an empty one for a new folder.

        Raises:
            RunFolderError: it is not valid JSON of this schema.
        """
        path = self.path / "manifest.json"
        if not path.exists():
            return {"schema": SCHEMA, "stages": {}}
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{path} is not readable: {error}", "Use a new folder with -o.") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise RunFolderError(f"{path} is not a manifest of schema {SCHEMA}.", "Use a new folder with -o.")
        return data

    def is_current(self, stage: str, sections: str, inputs: Iterable[Path], versions: Mapping[str, str]) -> bool:
        """Whether ``stage`` finished with the same recipe sections, inputs and versions, and its outputs are intact.

        Raises:
            RunFolderError: the stage finished, nothing it depends on changed, but an output was edited or truncated.
        """
        entry = self.manifest()["stages"].get(stage)
        if entry is None or entry["sections"] != sections or entry["versions"] != dict(versions):
            return False
        if set(entry["inputs"]) != {self._key(path) for path in inputs}:
            return False
        if any(not self._matches(record, key) for key, record in entry["inputs"].items()):
            return False
        if any(not (self.path / key).exists() for key in entry["outputs"]):
            return False
        for key, record in entry["outputs"].items():
            if not self._matches(record, key):
                raise RunFolderError(
                    f"{self.path / key} was changed after the {stage} stage wrote it (its hash differs).",
                    f"Delete the file to have it made again: ghostexport {stage} {self.path}",
                )
        return True

    def record(
        self,
        stage: str,
        sections: str,
        inputs: Iterable[Path],
        outputs: Iterable[Path],
        versions: Mapping[str, str],
        seconds: float,
    ) -> None:
        """Writes the stage's manifest entry: from now on it is finished."""
        manifest = self.manifest()
        manifest["stages"][stage] = {
            "sections": sections,
            "inputs": {self._key(path): self._fingerprint(path) for path in inputs},
            "outputs": {self._key(path): self._fingerprint(path) for path in outputs},
            "versions": dict(versions),
            "seconds": round(seconds, 3),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_json(self.path / "manifest.json", manifest)

    def outputs(self, stage: str) -> list[Path]:
        """Files that a finished stage wrote; empty when it has not finished."""
        entry = self.manifest()["stages"].get(stage, {"outputs": {}})
        return [self.path / key for key in entry["outputs"]]

    def is_outdated(self, stage: str) -> bool:
        """Whether a file of this folder that the finished stage read has changed since; False when none is recorded."""
        entry = self.manifest()["stages"].get(stage, {"inputs": {}})
        own = {key: record for key, record in entry["inputs"].items() if not Path(key).is_absolute()}
        return any(not self._matches(record, key) for key, record in own.items())

    def forget(self, stage: str) -> None:
        """Removes a stage's manifest entry, so that a crash while it runs again leaves it unfinished."""
        manifest = self.manifest()
        if manifest["stages"].pop(stage, None) is not None:
            write_json(self.path / "manifest.json", manifest)

    def adopt(self, stage: str, other: RunFolder) -> None:
        """Takes over a stage that another run folder has finished: its files (copied) and its manifest entry."""
        entry = other.manifest()["stages"].get(stage)
        if entry is None or stage in self.manifest()["stages"]:
            return
        for path in other.outputs(stage):
            with atomic_path(self.path / path.relative_to(other.path)) as temporary:
                shutil.copy2(path, temporary)  # with its time, so that it need not be hashed again
        manifest = self.manifest()
        manifest["stages"][stage] = entry
        write_json(self.path / "manifest.json", manifest)

    def require_model(self, stored: Mapping[str, Any], source: str) -> None:
        """Raises RunFolderError when the folder's recipe is about another model than ``source``."""
        model = stored.get("model")
        other = model.get("source") if isinstance(model, dict) else None
        if other is not None and other != source:
            raise RunFolderError(
                f"{self.path} is the run folder of another model: {other}, not {source}.", "Use another folder with -o."
            )
        if not stored and self.path.is_dir() and any(self.path.iterdir()):
            raise RunFolderError(
                f"{self.path} holds files but is not a run folder (no recipe.yaml).", "Use a new folder with -o."
            )

    def require(self, path: Path, stage: str) -> Path:
        """Returns ``path``, or says which stage makes it when it is missing."""
        if not path.exists():
            raise RunFolderError(f"{path} is missing.", f"Make it with: ghostexport {stage} {self.path}")
        return path

    def _key(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix() if path.is_relative_to(self.path) else str(path.absolute())

    def _fingerprint(self, path: Path) -> dict[str, Any]:
        stat = path.stat()
        return {"sha256": sha256_file(path), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}

    def _matches(self, record: Mapping[str, Any], key: str) -> bool:
        path = self.path / key
        if not path.exists():
            return False
        stat = path.stat()
        if stat.st_size != record["bytes"]:
            return False
        # An untouched file is not hashed again: dense weights can be tens of gigabytes.
        return bool(stat.st_mtime_ns == record["mtime_ns"] or sha256_file(path) == record["sha256"])
