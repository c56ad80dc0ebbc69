"""What a manifest records of a stage, so that a run folder may move: files by name and content, packages by machine.

A file outside the folder (the model's) has a role instead of a place, and counts only where the stage ran; so do the
versions of packages, without their build tags.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ghostexport.files import sha256_file, sha256_files

SCHEMA = "ghostexport.manifest/3"
#: Schemas that are migrated when a folder is first read.
OLD_SCHEMAS = ("ghostexport.manifest/1", "ghostexport.manifest/2")


def machine() -> str:
    """Identifies this machine in a manifest without naming it."""
    return hashlib.sha256(f"{platform.node()} {platform.machine()}".encode()).hexdigest()[:16]


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Installed versions of ghostexport and ``packages``; ``2.13.0`` for ``2.13.0+cpu``, ``absent`` for none."""
    found = {}
    for package in ("ghostexport", *packages):
        try:
            found[package] = importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def fingerprints(files: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """What is recorded of files, by their key."""
    hashes = sha256_files(files.values())
    stats = {key: path.stat() for key, path in files.items()}
    return {
        key: {"sha256": hashes[path], "bytes": stats[key].st_size, "mtime_ns": stats[key].st_mtime_ns}
        for key, path in files.items()
    }


def matches(record: Mapping[str, Any], path: Path) -> bool:
    """Whether the file is still the recorded one. An untouched one is not read: weights can be tens of gigabytes."""
    if not path.exists():
        return False
    stat = path.stat()
    if stat.st_size != record["bytes"]:
        return False
    return bool(stat.st_mtime_ns == record["mtime_ns"] or sha256_file(path) == record["sha256"])


def ran_here(entry: Mapping[str, Any]) -> bool:
    """Whether a stage ran on this machine; one of an old schema is taken to have."""
    return bool(entry.get("machine", machine()) == machine())


def same_packages(entry: Mapping[str, Any], versions: Mapping[str, str]) -> bool:
    """Whether a stage ran with these versions, or elsewhere: on another machine, or where there is what is absent."""
    recorded = {name: version.partition("+")[0] for name, version in entry["versions"].items()}
    here = {name: version for name, version in versions.items() if version != "absent"}
    return not ran_here(entry) or all(recorded.get(name) == version for name, version in here.items())


def migrate(manifest: dict[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """A manifest of an old schema as one of today's; ``renamed``: file names that were others."""
    for entry in manifest["stages"].values():
        entry["outputs"] = {renamed.get(key, key): record for key, record in entry["outputs"].items()}
        entry["inputs"] = {renamed.get(key, key): record for key, record in entry["inputs"].items()}
        outside = [key for key in entry["inputs"] if Path(key).is_absolute()]
        entry["outside"] = {f"model/{Path(key).name}": entry["inputs"].pop(key) for key in outside}
    return manifest | {"schema": SCHEMA}
