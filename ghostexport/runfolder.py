"""The run folder: every path, reader and writer of a run, the hashes of its files, and "is this stage current?".

No other module spells a file name of a run. What a file holds is its writer's affair (:class:`PrunePlan`, the reports).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from ghostexport.errors import RunFolderError
from ghostexport.files import atomic_path, cannot_write, write_json
from ghostexport.manifest import (
    OLD_SCHEMAS,
    SCHEMA,
    fingerprints,
    machine,
    matches,
    migrate,
    ran_here,
    same_packages,
)
from ghostexport.operators import OperatorSet, load_operators
from ghostexport.plan import PrunePlan
from ghostexport.recipe import float_variant, is_repaired
from ghostexport.runfiles import RunFiles

#: Folders that calibrate, select and recover never read, and that may be large.
AFTER_RECOVERY = ("onnx", "engines", "bench")
#: Of ``bench/<runtime>.json``; the number grows when a reader of the old one would misread.
BENCH_SCHEMA = "ghostexport.bench/1"
#: Files that had other names in the first schema.
_RENAMED = {"eval.json": "engine_quality.json", "evaluation.json": "model_quality.json"}
#: Names of the files outside the folder that a stage read, by role; None where they cannot be looked at.
Outside = Callable[[], "Mapping[str, Path] | None"]


class RunFolder:
    """One run on disk. ``manifest.json`` has one entry per finished stage, written last: no entry = not finished."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe_path = self.path / "recipe.yaml"
        self.manifest_path = self.path / "manifest.json"
        self.calibration_path = self.path / "calibration.safetensors"
        self.plan_path = self.path / "plan.json"
        self.statistics_path = self.path / "statistics.safetensors"  # what the pass of select gathered for recover
        self.parity_path = self.path / "parity.json"  # every graph against PyTorch, by verify
        self.engine_quality_path = self.path / "engine_quality.json"  # by bench
        self.model_quality_path = self.path / "model_quality.json"  # of the models and their graphs, by eval
        self.report_path = self.path / "report.html"
        self.model_path = self.path / "model"  # what is not weights: configuration, tokenizer, chat template, licence
        self.checkpoints_path = self.path / "checkpoint"  # <variant>/ of those that are ordinary models

    def operators_path(self, variant: str) -> Path:
        return self.path / "operators" / f"{variant}.safetensors"

    def graph_path(self, variant: str) -> Path:
        return self.path / "onnx" / f"{variant}.onnx"

    def graphs(self) -> list[str]:
        """The variants whose graph a finished stage wrote, in the order of the stages."""
        folder = self.graph_path("").parent
        written = [path for stage in self.manifest()["stages"] for path in self.outputs(stage)]
        return [p.stem for p in written if p.parent == folder and p.suffix == ".onnx" and p.is_file()]

    def surgery_path(self, variant: str) -> Path:
        """What surgery did to make the variant's graph."""
        return self.path / "onnx" / f"{variant}.surgery.json"

    def quantization_path(self, variant: str) -> Path:
        """What quantisation did to make the variant's graph."""
        return self.path / "onnx" / f"{variant}.quantization.json"

    def engine_path(self, runtime: str, variant: str) -> Path:
        """Path of the engine without its suffix, which the runtime chooses."""
        return self.path / "engines" / runtime / variant

    def sidecar_path(self, runtime: str, variant: str) -> Path:
        return self.path / "engines" / runtime / f"{variant}.json"

    def bench_path(self, runtime: str) -> Path:
        return self.path / "bench" / f"{runtime}.json"

    def layers_path(self, runtime: str, variant: str) -> Path:
        """The layers of an engine, as ``trtexec --exportLayerInfo`` writes them."""
        return self.path / "bench" / runtime / f"layers_{variant}.json"

    def profile_path(self, runtime: str, variant: str) -> Path:
        """The times of the layers of an engine, as ``trtexec --exportProfile`` writes them."""
        return self.path / "bench" / runtime / f"profile_{variant}.json"

    def read_plan(self) -> PrunePlan:
        """The plan.

        Raises:
            RunFolderError: it is missing or unreadable.
        """
        path = self.require(self.plan_path, "select")
        try:
            return PrunePlan.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise RunFolderError(
                f"{path} is not a plan: {error}", f"Make it again: ghostexport select {self.path}"
            ) from error

    def read_operators(self, variant: str) -> OperatorSet | None:
        """The operators of a variant, float or quantised; None for ``dense`` and ``pruned``, which have none."""
        if not is_repaired(variant):
            return None
        return load_operators(self.require(self.operators_path(float_variant(variant)), "recover"))

    def read_parity(self) -> dict[str, Any]:
        """Variant -> parity report; empty before the stage has run."""
        return _json(self.parity_path)

    def read(self) -> RunFiles:
        """Everything that the finished stages left, parsed.

        Raises:
            RunFolderError: not a folder, or one of its files is unreadable or of another schema.
        """
        if not self.path.is_dir():
            raise RunFolderError(
                f"{self.path} is not a run folder.", "Make one with: ghostexport build engine MODEL -o RUN"
            )
        finished = tuple(self.manifest()["stages"])
        outdated = frozenset(stage for stage in ("bench", "eval") if self.is_outdated(stage))
        text = self.recipe_path.read_text(encoding="utf-8") if self.recipe_path.exists() else None
        benches = {f.stem: _json(f) for f in sorted(self.bench_path("").parent.glob("*.json"))}
        for name, data in benches.items():
            if data.get("schema") != BENCH_SCHEMA:
                raise RunFolderError(
                    f"{self.bench_path(name)} is not a result of schema {BENCH_SCHEMA}.",
                    f"Run: ghostexport bench {self.path}",
                )
        runtimes = sorted(d for d in (self.path / "engines").glob("*") if d.is_dir())
        return RunFiles(
            path=self.path,
            finished=finished,
            outdated=outdated,
            recipe_text=text,
            recipe=yaml.safe_load(text) if text else {},
            plan=_json(self.plan_path) or None,
            engine_quality=_json(self.engine_quality_path),
            model_quality={} if "eval" in outdated else _json(self.model_quality_path),
            parity=self.read_parity(),
            benches=benches,
            sidecars={d.name: {f.stem: _json(f) for f in sorted(d.glob("*.json"))} for d in runtimes},
            surgery=self._by_variant(".surgery.json"),
            quantization=self._by_variant(".quantization.json"),
            operator_files={f.stem: f for f in sorted((self.path / "operators").glob("*.safetensors"))},
        )

    def _by_variant(self, suffix: str) -> dict[str, dict[str, Any]]:
        return {f.name.removesuffix(suffix): _json(f) for f in sorted((self.path / "onnx").glob(f"*{suffix}"))}

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
        """The manifest, or an empty one for a new folder. A folder of the schema before this one is migrated first.

        Raises:
            RunFolderError: it is not valid JSON of this schema.
        """
        if not self.manifest_path.exists():
            return {"schema": SCHEMA, "stages": {}}
        data = _json(self.manifest_path, "Use a new folder with -o.")
        if data.get("schema") in OLD_SCHEMAS:
            return self._migrated(data)
        if data.get("schema") != SCHEMA:
            raise RunFolderError(
                f"{self.manifest_path} is not a manifest of schema {SCHEMA}.", "Use a new folder with -o."
            )
        return data

    def _migrated(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Renames the files, then writes the manifest: a crash in between is made good by the next reader."""
        try:
            for old, new in _RENAMED.items() if manifest["schema"] == OLD_SCHEMAS[0] else ():
                if (self.path / old).exists():
                    (self.path / old).replace(self.path / new)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        migrated = migrate(manifest, _RENAMED)
        write_json(self.manifest_path, migrated)
        return migrated

    def variants(self, named: Iterable[str]) -> tuple[str, ...]:
        """Of the recipe's variants those that are here: all of them, but in a pack the packed ones."""
        packed = self.manifest().get("variants")
        return tuple(variant for variant in named if packed is None or variant in packed)

    def is_current(
        self,
        stage: str,
        sections: str,
        inputs: Iterable[Path],
        versions: Mapping[str, str],
        outside: Outside = lambda: None,
    ) -> bool:
        """Whether ``stage`` finished with the same recipe sections and inputs, and its outputs are intact.

        On the machine where it ran, also with the same versions and files outside the folder.

        Raises:
            RunFolderError: the stage finished, nothing it depends on changed, but an output was edited or truncated.
        """
        entry = self.manifest()["stages"].get(stage)
        if entry is None or entry["sections"] != sections or not same_packages(entry, versions):
            return False
        if set(entry["inputs"]) != {self._key(path) for path in inputs}:
            return False
        if any(not matches(record, self.path / key) for key, record in entry["inputs"].items()):
            return False
        if any(not (self.path / key).exists() for key in entry["outputs"]):
            return False
        files, recorded = outside() if ran_here(entry) else None, entry.get("outside", {})
        if files is not None and (
            set(files) != set(recorded) or any(not matches(recorded[role], path) for role, path in files.items())
        ):
            return False
        for key, record in entry["outputs"].items():
            if not matches(record, self.path / key):
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
        outside: Outside = lambda: None,
    ) -> None:
        """Writes the stage's manifest entry: from now on it is finished."""
        manifest = self.manifest()
        manifest["stages"][stage] = {
            "sections": sections,
            "inputs": fingerprints({self._key(path): path for path in inputs}),
            "outside": fingerprints(outside() or {}),
            "outputs": fingerprints({self._key(path): path for path in outputs}),
            "versions": dict(versions),
            "machine": machine(),
            "seconds": round(seconds, 3),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        write_json(self.manifest_path, manifest)

    def note(self, stage: str, **facts: Any) -> None:
        """Adds to the entry of a finished stage what is no condition of its being current."""
        manifest = self.manifest()
        manifest["stages"][stage] |= facts
        write_json(self.manifest_path, manifest)

    def outputs(self, stage: str) -> list[Path]:
        """Files that a finished stage wrote; empty when it has not finished."""
        entry = self.manifest()["stages"].get(stage, {"outputs": {}})
        return [self.path / key for key in entry["outputs"]]

    def is_outdated(self, stage: str) -> bool:
        """Whether a file of this folder that the finished stage read has changed since; False when none is recorded."""
        entry = self.manifest()["stages"].get(stage, {"inputs": {}})
        return any(not matches(record, self.path / key) for key, record in entry["inputs"].items())

    def forget(self, stage: str) -> None:
        """Removes a stage's manifest entry, so that a crash while it runs again leaves it unfinished."""
        manifest = self.manifest()
        if manifest["stages"].pop(stage, None) is not None:
            write_json(self.manifest_path, manifest)

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
        write_json(self.manifest_path, manifest)

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
        return path.relative_to(self.path).as_posix()


def _json(path: Path, remedy: str = "Delete it and run the stage again.") -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} is not readable JSON: {error}", remedy) from error
    if not isinstance(data, dict):
        raise RunFolderError(f"{path} is not a JSON object.", remedy)
    return data
