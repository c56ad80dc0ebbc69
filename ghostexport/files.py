"""Files as everything here writes them: to a temporary name first, renamed when whole; with their hashes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ghostexport.errors import RunFolderError


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yields a temporary path beside ``target``; renamed over it on success, removed on any failure.

    Raises:
        RunFolderError: the disk is full or the folder is not writable; ``target`` is untouched.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise cannot_write(target, error) from error
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(target)
    except OSError as error:
        raise cannot_write(target, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(target: Path, data: bytes) -> None:
    """Writes a file atomically."""
    with atomic_path(target) as temporary:
        temporary.write_bytes(data)


def write_json(target: Path, data: Any) -> None:
    """Writes JSON atomically, indented, keys in given order."""
    write_bytes(target, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raises RunFolderError when ``folder``'s disk has fewer than ``needed`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise RunFolderError(
            f"No disk space for {what} in {folder}: {needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free.",
            "Free some space or choose another folder with -o.",
        )


def cannot_write(target: Path, error: OSError) -> RunFolderError:
    """The error for a file or folder that the system does not let us write."""
    return RunFolderError(f"Cannot write {target}: {error.strerror or error}.", "Check free space and permissions.")
