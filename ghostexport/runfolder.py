"""The run folder: every path, reader and writer of a run, the hashes of its files, and "is this stage current?".

No other module spells a file name of a run. What a file holds is its writer's affair (:class:`PrunePlan`, the reports).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from ghostexport.errors import RunFolderError
from ghostexport.files import atomic_path, cannot_write, sha256_file, write_json
from ghostexport.operators import OperatorSet, load_operators
from ghostexport.plan import PrunePlan
from ghostexport.recipe import float_variant

SCHEMA = "ghostexport.manifest/2"
#: Folders that calibrate, select and recover never read, and that may be large.
AFTER_RECOVERY = ("onnx", "engines", "bench")
#: Of ``bench/<runtime>.json``; the number grows when a reader of the old one would misread.
BENCH_SCHEMA = "ghostexport.bench/1"
#: Folders of this schema are migrated when they are first read: two files have other names since.
_OLD_SCHEMA = "ghostexport.manifest/1"
_RENAMED = {"eval.json": "engine_quality.json", "evaluation.json": "model_quality.json"}


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
        name = float_variant(variant)
        if name in ("dense", "pruned"):
            return None
        return load_operators(self.require(self.operators_path(name), "recover"))

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
            operators={f.stem: load_operators(f) for f in sorted((self.path / "operators").glob("*.safetensors"))},
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
        if data.get("schema") == _OLD_SCHEMA:
            return self._migrated(data)
        if data.get("schema") != SCHEMA:
            raise RunFolderError(
                f"{self.manifest_path} is not a manifest of schema {SCHEMA}.", "Use a new folder with -o."
            )
        return data

    def _migrated(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Renames the files, then writes the manifest: a crash in between is made good by the next reader."""
        try:
            for old, new in _RENAMED.items():
                if (self.path / old).exists():
                    (self.path / old).replace(self.path / new)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        for entry in manifest["stages"].values():
            entry["outputs"] = {_RENAMED.get(key, key): record for key, record in entry["outputs"].items()}
        manifest["schema"] = SCHEMA
        write_json(self.manifest_path, manifest)
        return manifest

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
        write_json(self.manifest_path, manifest)

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


@dataclass(frozen=True)
class RunFiles:
    """The parsed files of one run; what is missing is None or empty.

    Attributes:
        path, finished: the run folder; its finished stages.
        outdated: of bench and eval those that read a file which has changed since.
        recipe_text, recipe: the recipe as text and as data.
        plan: the plan as data.
        engine_quality: by bench.
        model_quality: by eval; nothing where the plan, an operator or a graph has changed since.
        parity: by verify.
        benches: runtime -> figures.
        sidecars: runtime -> variant -> engine sidecar.
        surgery: variant -> surgery report.
        quantization: quantised variant -> quantisation report.
        operators: variant -> operators.
    """

    path: Path
    finished: tuple[str, ...]
    outdated: frozenset[str]
    recipe_text: str | None
    recipe: dict[str, Any]
    plan: dict[str, Any] | None
    engine_quality: dict[str, Any]
    model_quality: dict[str, Any]
    parity: dict[str, Any]
    benches: dict[str, dict[str, Any]]
    sidecars: dict[str, dict[str, dict[str, Any]]]
    surgery: dict[str, dict[str, Any]]
    quantization: dict[str, dict[str, Any]]
    operators: dict[str, OperatorSet]

    @property
    def model(self) -> str:
        return str(self.recipe.get("model", {}).get("source", self.path.name))

    @property
    def cut(self) -> str:
        """Such as ``[10, 17) of 30 blocks``."""
        if self.plan is None:
            return "no plan yet"
        spans = ", ".join(f"[{start}, {stop})" for start, stop in self.plan["removed"])
        return f"{spans or 'nothing'} of {self.plan['num_blocks']} blocks"

    @property
    def num_removed(self) -> int:
        return sum(stop - start for start, stop in self.plan["removed"]) if self.plan else 0

    @property
    def variants(self) -> list[str]:
        """In report order, from whatever names them."""
        operators = self.recipe.get("recover", {}).get("operators", [])
        named = [v for b in self.benches.values() for v in b["variants"]]
        measured = [v for found in (self.engine_quality, self.model_quality) for v in found.get("variants", {})]
        found = dict.fromkeys(["dense", "pruned", *operators, *named, *measured, *self.operators, *self.quantization])
        return sorted(found, key=lambda name: name != float_variant(name))  # the quantised ones last


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
