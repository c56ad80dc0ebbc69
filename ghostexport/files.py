"""Files as everything here writes them: to a temporary name first, renamed when whole; with their hashes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import platformdirs

from ghostexport.errors import RunFolderError

#: Files from here on are hashed once: the hash is kept, with what changes when the file does.
LARGE = 32 << 20

#: Bytes read at once for a hash.
_CHUNK = 1 << 22


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal; of a large file that was hashed before, and not touched, without a read.

    What was hashed is known by device, inode, size and times of the last change, in the user's cache folder.
    """
    before = path.stat()
    if before.st_size < LARGE:
        return _digest(path)
    key = _identity(before)
    known = _known_hashes()
    if key not in known:
        digest = _digest(path)
        if _identity(path.stat()) != key:  # written to meanwhile
            return digest
        known[key] = digest
        with contextlib.suppress(OSError):  # not writable: hashed again by the next process
            _hashes_path().parent.mkdir(parents=True, exist_ok=True)
            with _hashes_path().open("a", encoding="ascii") as file:
                file.write(f"{key} {digest}\n")
    return known[key]


def sha256_files(paths: Iterable[Path]) -> dict[Path, str]:
    """SHA-256 of files, several at a time: hashing releases Python's lock."""
    wanted = list(dict.fromkeys(paths))
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(wanted, pool.map(sha256_file, wanted), strict=True))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        return digest.hexdigest()


def _identity(stat: os.stat_result) -> str:
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def _hashes_path() -> Path:
    return platformdirs.user_cache_path("ghostexport", appauthor=False) / "sha256.txt"


@functools.cache
def _known_hashes() -> dict[str, str]:
    try:
        lines = _hashes_path().read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    return {key: digest for key, _, digest in (line.partition(" ") for line in lines) if len(digest) == 64}


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


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yields a temporary folder beside ``target``; becomes it on success, is removed on any failure.

    ``target`` must be absent or empty, or be removed by the caller inside the block.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if target.exists():
            target.rmdir()
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
