"""One file that carries variants of a run to a device: a stored ZIP archive that unpacks to a run folder.

It holds what building, measuring and talking need (graphs with their data, operators, tokenizer, recipe, parity and
held-out tokens) and no model. ``SHA256SUMS`` lists every file; equal runs give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from ghostexport.errors import RunFolderError
from ghostexport.files import atomic_folder, atomic_path, require_space, sha256_file
from ghostexport.manifest import fingerprints, matches
from ghostexport.pipeline import STAGES
from ghostexport.recipe import float_variant, parse_recipe, read_recipe
from ghostexport.runfolder import RunFolder
from ghostexport.validation import require_name

SUMS = "SHA256SUMS"
#: Modification time of every unpacked file, in seconds: the archive's earliest, so that equal files are equal.
_TIME = 315_532_800


def pack(run: Path, output: Path | None = None, variants: Sequence[str] = ()) -> Path:
    """Writes variants of a run into one archive.

    Args:
        run: run folder whose graphs are verified.
        output: the archive; default ``RUN.zip``.
        variants: which; none for all. The first is what a benchmark on the device compares with.

    Raises:
        RunFolderError: a stage up to verify has not finished, a file was changed, or the disk is full.
        RecipeError: the run has no such variant.
    """
    folder = RunFolder(run)
    names = folder.graphs()
    for stage in ("export", "surgery", "verify"):
        if not folder.outputs(stage):
            raise RunFolderError(f"{run}: the {stage} stage has not finished.", f"Run: ghostexport verify {run}")
    chosen = [require_name(name, names, "variant") for name in variants] or names
    output = output or Path(f"{run.resolve()}.zip")
    with tempfile.TemporaryDirectory(prefix=".packing-", dir=run) as scratch:
        files = _files(folder, chosen, Path(scratch))
        require_space(output.resolve().parent, sum(p.stat().st_size for p in files.values()), output.name)
        manifest = _manifest(folder, chosen, files)
        with atomic_path(output) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            sums = [_write(archive, name, path) for name, path in sorted(files.items())]
            made = {folder.manifest_path.name: json.dumps(manifest, indent=1).encode() + b"\n"}
            sums += [(hashlib.sha256(data).hexdigest(), name) for name, data in made.items()]
            made[SUMS] = "".join(f"{digest}  {name}\n" for digest, name in sums).encode()
            for name, data in made.items():
                archive.writestr(zipfile.ZipInfo(name), data)
    return output


def is_pack(path: Path) -> bool:
    """Whether the file is an archive that :func:`pack` wrote."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return SUMS in archive.namelist()


def unpack(archive: Path, target: Path | None = None) -> Path:
    """The run folder in an archive; one that is unpacked already is used as it is.

    Args:
        archive: of :func:`pack`.
        target: folder to unpack to; default: the archive's path without ``.zip``.

    Raises:
        RunFolderError: the archive is damaged, or the target holds something else.
    """
    target = target or archive.with_suffix("")
    with zipfile.ZipFile(archive) as opened:
        sums = opened.read(SUMS)
        if (target / SUMS).is_file() and (target / SUMS).read_bytes() == sums:
            return target
        if target.exists() and any(target.iterdir()):
            raise RunFolderError(f"{target} exists and is not what {archive} holds.", "Name a new folder with -o.")
        expected = {name: digest for digest, name in (line.split("  ", 1) for line in sums.decode().splitlines())}
        target.parent.mkdir(parents=True, exist_ok=True)
        require_space(target.parent, sum(entry.file_size for entry in opened.infolist()), target.name)
        with atomic_folder(target) as temporary:
            for name, digest in expected.items():
                _read(opened, name, digest, temporary)
            (temporary / SUMS).write_bytes(sums)
    return target


def _files(folder: RunFolder, chosen: Sequence[str], scratch: Path) -> dict[str, Path]:
    """Name in the archive -> file."""
    from ghostexport.onnxfile.graph_io import load_graph, save_graph
    from ghostexport.runtimes.interface import read_interface

    kept = [folder.recipe_path, folder.plan_path, folder.parity_path, folder.calibration_path]
    kept += [path for path in folder.outputs("export") if path.is_relative_to(folder.model_path)]
    graphs = {variant: folder.graph_path(variant) for variant in chosen}
    data = {variant: read_interface(graph).data_files for variant, graph in graphs.items()}
    weights = folder.graph_path("dense").with_name(f"{folder.graph_path('dense').name}.data")
    sharing = [variant for variant, files in data.items() if weights in files]
    files: dict[str, Path] = {}
    for variant, graph in graphs.items():
        kept += [folder.surgery_path(variant), folder.quantization_path(variant)]
        kept.append(folder.operators_path(float_variant(variant)))
        if sharing == [variant] != ["dense"]:  # without the weights of the blocks that it lacks
            own = scratch / graph.name
            save_graph(load_graph(graph), own, [], self_contained=True)
            place = graph.parent.relative_to(folder.path)
            files |= {(place / path.name).as_posix(): path for path in (own, *read_interface(own).data_files)}
        else:
            kept += [graph, *data[variant]]
    return files | {path.relative_to(folder.path).as_posix(): path for path in kept if path.is_file()}


def _manifest(folder: RunFolder, chosen: Sequence[str], files: Mapping[str, Path]) -> dict[str, Any]:
    """The run's manifest up to verify, as far as ``files`` go: what is built from here on is the device's."""
    recipe = parse_recipe(read_recipe(folder.recipe_path))
    manifest, stages = folder.manifest(), dict[str, Any]()
    made = {key for key, path in files.items() if path != folder.path / key}
    for stage in STAGES:
        entry = manifest["stages"].get(stage.name)
        if entry is None or stage.name in ("eval", "build", "bench"):
            continue
        for key, record in entry["outputs"].items():
            if files.get(key) == folder.path / key and not matches(record, files[key]):
                raise RunFolderError(
                    f"{folder.path / key} was changed after the {stage.name} stage wrote it.",
                    f"Delete it and run: ghostexport {stage.name} {folder.path}",
                )
        own = {key for key in entry["outputs"] if key in files}
        own |= made if own & made else set()
        found = {key: files[key] for key in sorted(own)}
        stages[stage.name] = entry | {
            "machine": "packed",  # wherever it is unpacked, none of this ran
            "inputs": {key: record for need in stage.needed(recipe) for key, record in stages[need]["outputs"].items()},
            "outputs": {key: record | {"mtime_ns": _TIME * 10**9} for key, record in fingerprints(found).items()},
        }
    return manifest | {"stages": stages, "variants": list(chosen)}


def _write(archive: zipfile.ZipFile, name: str, path: Path) -> tuple[str, str]:
    digest = hashlib.sha256()
    with path.open("rb") as source, archive.open(zipfile.ZipInfo(name), "w", force_zip64=True) as sink:
        while chunk := source.read(1 << 24):
            digest.update(chunk)
            sink.write(chunk)
    return digest.hexdigest(), name


def _read(archive: zipfile.ZipFile, name: str, digest: str, folder: Path) -> None:
    place = PurePosixPath(name)
    damaged = RunFolderError(f"{archive.filename} is damaged at {name}.", "Copy or pack it again.")
    if place.is_absolute() or ".." in place.parts or ":" in name or "\\" in name:
        raise damaged
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with archive.open(name) as source, path.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 24)
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise damaged from error
    if sha256_file(path) != digest:
        raise damaged
    os.utime(path, (_TIME, _TIME))
