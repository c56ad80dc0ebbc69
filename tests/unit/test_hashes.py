"""Large files are hashed once; what is only looked at, or run again while current, reads no weights."""

import hashlib
import os

import pytest

from ghostexport import files
from ghostexport.runfolder import RunFolder


@pytest.fixture
def hashed(monkeypatch, tmp_path):
    """Names of the files that are read to be hashed; every file of 20 kB counts as large, and nothing is known yet."""
    seen, real = [], files._digest
    monkeypatch.setattr(files, "LARGE", 20_000)
    monkeypatch.setattr(files, "_hashes_path", lambda: tmp_path / "cache" / "sha256.txt")
    monkeypatch.setattr(files, "_digest", lambda path: seen.append(path.name) or real(path))
    files._known_hashes.cache_clear()
    yield seen
    files._known_hashes.cache_clear()


def test_a_large_file_is_read_once_by_all_processes_until_it_changes(hashed, tmp_path):
    path = tmp_path / "weights.data"
    path.write_bytes(bytes(20_000))
    assert files.sha256_file(path) == files.sha256_file(path) == hashlib.sha256(bytes(20_000)).hexdigest()
    files._known_hashes.cache_clear()  # another process
    assert files.sha256_files([path, path]) == {path: hashlib.sha256(bytes(20_000)).hexdigest()}
    assert hashed == ["weights.data"]
    stat = path.stat()
    with path.open("r+b") as file:  # the same size and, as a copy with its times has it, the same time
        file.write(b"x")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert files.sha256_file(path) == hashlib.sha256(b"x" + bytes(19_999)).hexdigest()
    small = tmp_path / "small"
    small.write_bytes(b"abc")
    assert files.sha256_file(small) == files.sha256_file(small) and hashed.count("small") == 2


def test_stages_that_read_the_same_files_hash_them_once(hashed, tmp_path):
    folder, model = RunFolder(tmp_path / "run"), tmp_path / "model.safetensors"
    folder.path.mkdir()
    model.write_bytes(bytes(50_000))
    graph = folder.path / "dense.onnx.data"
    graph.write_bytes(bytes(40_000))
    for stage, read, wrote in (("export", [], [graph]), ("surgery", [graph], []), ("verify", [graph], [])):
        folder.record(stage, "s", read, wrote, {}, 0.0, lambda: {"model/model.safetensors": model})
        assert folder.is_current(stage, "s", read, {}, lambda: {"model/model.safetensors": model})
    assert sorted(hashed) == ["dense.onnx.data", "model.safetensors"]
