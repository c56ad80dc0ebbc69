import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from ghostexport.errors import RunFolderError
from ghostexport.files import atomic_path, require_space, write_bytes, write_json
from ghostexport.manifest import SCHEMA, same_packages, versions_of
from ghostexport.runfolder import RunFolder


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "run")
    write_bytes(run.path / "in.bin", b"input")
    write_bytes(run.path / "out.bin", b"output")
    run.record("select", "hash", [run.path / "in.bin"], [run.path / "out.bin"], {"torch": "2"}, 1.0)
    return run


def current(run, sections="hash", versions=None, inputs=("in.bin",)):
    return run.is_current("select", sections, [run.path / name for name in inputs], versions or {"torch": "2"})


def test_a_stage_is_current_until_recipe_versions_or_inputs_change(folder):
    assert current(folder)
    assert not current(folder, sections="other")
    assert not current(folder, versions={"torch": "3"})
    assert not current(folder, inputs=("in.bin", "out.bin"))
    write_bytes(folder.path / "in.bin", b"INPUT")
    assert not current(folder)


def test_a_file_outside_counts_by_role_and_content_and_only_where_the_stage_ran(folder, tmp_path, monkeypatch):
    write_bytes(tmp_path / "one" / "model.bin", b"weights")
    write_bytes(tmp_path / "other" / "model.bin", b"weights")
    output = [folder.path / "out.bin"]

    def at(place):
        return lambda: {"model/model.bin": tmp_path / place / "model.bin"}

    folder.record("export", "hash", [], output, {"torch": "2.13.0"}, 1.0, at("one"))
    assert str(tmp_path) not in folder.manifest_path.read_text()
    assert folder.is_current("export", "hash", [], {"torch": "2.13.0"}, at("one"))
    assert folder.is_current("export", "hash", [], {"torch": "2.13.0"}, at("other"))  # another cache
    assert folder.is_current("export", "hash", [], {"torch": "2.13.0"}, lambda: None)  # no model here
    assert not folder.is_current("export", "hash", [], {"torch": "2.14.0"}, at("one"))
    write_bytes(tmp_path / "other" / "model.bin", b"changed")
    assert not folder.is_current("export", "hash", [], {"torch": "2.13.0"}, at("other"))
    monkeypatch.setattr("platform.node", lambda: "jetson")
    assert folder.is_current("export", "hash", [], {"torch": "2.14.0"}, at("other"))


def test_build_tags_are_no_part_of_a_version(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu")
    assert versions_of(["torch"]) == {"ghostexport": "2.13.0", "torch": "2.13.0"}
    assert same_packages({"versions": {"torch": "2.13.0+cu130"}}, {"torch": "2.13.0"})  # recorded by an old version
    assert same_packages({"versions": {"torch": "2.13.0"}}, {"torch": "absent"})  # an environment for devices
    assert not same_packages({"versions": {"torch": "absent"}}, {"torch": "2.13.0"})


def test_touching_a_file_without_changing_it_does_not_make_a_stage_stale(folder):
    os.utime(folder.path / "in.bin", ns=(1, 1))
    os.utime(folder.path / "out.bin", ns=(1, 1))
    assert current(folder)


@pytest.mark.parametrize("content", [b"outpux", b"out"])
def test_an_edited_or_truncated_output_is_an_error_that_names_the_stage(folder, content):
    write_bytes(folder.path / "out.bin", content)
    with pytest.raises(RunFolderError, match="ghostexport select"):
        current(folder)


def test_a_missing_output_or_a_forgotten_stage_runs_again(folder):
    (folder.path / "out.bin").unlink()
    assert not current(folder)
    write_bytes(folder.path / "out.bin", b"output")
    folder.forget("select")
    assert not current(folder) and folder.outputs("select") == []


def test_a_stage_is_outdated_when_a_file_that_it_read_changes(folder):
    assert not folder.is_outdated("select") and not folder.is_outdated("eval")
    write_bytes(folder.path / "in.bin", b"INPUT")
    assert folder.is_outdated("select")


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    target = tmp_path / "a.json"
    write_json(target, {"a": 1})
    with pytest.raises(RuntimeError), atomic_path(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert json.loads(target.read_text()) == {"a": 1} and [p.name for p in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(ValueError):
        write_json(target, float("nan"))
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_unwritable_targets_and_full_disks_are_clear_errors(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="Cannot write"):
        write_bytes(tmp_path / "file" / "below", b"")
    full = Path("/dev/full")  # every write to it fails with ENOSPC
    if full.exists():
        with (
            pytest.raises(RunFolderError, match="No space left"),
            atomic_path(tmp_path / "b"),
            full.open("wb", buffering=0) as file,
        ):
            file.write(b"x")
    with pytest.raises(RunFolderError, match="No disk space for engines"):
        require_space(tmp_path, 1 << 62, "engines")


def test_a_damaged_or_foreign_manifest_is_refused(folder):
    for content in (b"{", b"[]", b'{"schema": "other"}'):
        write_bytes(folder.path / "manifest.json", content)
        with pytest.raises(RunFolderError, match="manifest"):
            folder.manifest()


def _hold(path, ready, done):
    with RunFolder(path).lock():
        ready.set()
        done.wait(30)


def test_two_processes_cannot_write_into_one_folder(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path / "run", ready, done))
    process.start()
    try:
        assert ready.wait(30)
        with pytest.raises(RunFolderError, match="Another ghostexport process"), RunFolder(tmp_path / "run").lock():
            pass
    finally:
        done.set()
        process.join()
    with RunFolder(tmp_path / "run").lock():
        pass


def test_a_folder_of_another_model_or_of_foreign_files_is_not_taken_over(tmp_path):
    run = RunFolder(tmp_path)
    run.require_model({}, "a")
    run.require_model({"model": {"source": "a"}}, "a")
    with pytest.raises(RunFolderError, match="another model: a, not b"):
        run.require_model({"model": {"source": "a"}}, "b")
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunFolderError, match="not a run folder"):
        run.require_model({}, "a")


def test_a_stage_of_its_own_is_not_replaced_by_another_runs(folder, tmp_path):
    other = RunFolder(tmp_path / "other")
    write_bytes(other.path / "out.bin", b"others output")
    other.record("select", "others hash", [], [other.path / "out.bin"], {}, 2.0)
    before = folder.manifest()
    folder.adopt("select", other)
    assert (folder.path / "out.bin").read_bytes() == b"output" and folder.manifest() == before
    empty = RunFolder(tmp_path / "empty")
    for _ in range(2):
        empty.adopt("select", folder)
        assert (empty.path / "out.bin").read_bytes() == b"output"
        assert empty.manifest()["stages"]["select"] == before["stages"]["select"]


def test_a_folder_of_the_schema_before_is_migrated_when_it_is_read(tmp_path):
    """Recorded: ``eval.json`` was the quality of the engines, ``evaluation.json`` that of the models."""
    shutil.copytree(Path(__file__).parents[1] / "data" / "run-of-schema-1", tmp_path / "run")
    before = {
        name: (tmp_path / "run" / name).read_bytes() for name in ("eval.json", "evaluation.json", "manifest.json")
    }
    run = RunFolder(tmp_path / "run")
    files = run.read()
    assert files.engine_quality == json.loads(before["eval.json"]) and files.engine_quality["runtime"] == "onnxruntime"
    assert run.model_quality_path.read_bytes() == before["evaluation.json"]
    assert not (run.path / "eval.json").exists() and not (run.path / "evaluation.json").exists()
    old, new = json.loads(before["manifest.json"]), json.loads(run.manifest_path.read_text())
    assert (old["schema"], new["schema"]) == ("ghostexport.manifest/1", SCHEMA)
    assert run.engine_quality_path in run.outputs("bench") and run.outputs("eval") == [run.model_quality_path]
    for stage, entry in old["stages"].items():
        assert list(new["stages"][stage]["outputs"].values()) == list(entry["outputs"].values())
        moved = new["stages"][stage]
        assert not any(Path(key).is_absolute() for key in moved["inputs"])
        assert [*moved["outside"].values(), *moved["inputs"].values()] == sorted(
            entry["inputs"].values(), key=lambda record: record not in moved["outside"].values()
        )
        kept = ("sections", "versions", "seconds", "finished")
        assert {k: moved[k] for k in kept} == {k: entry[k] for k in kept}


def test_a_migration_that_was_interrupted_is_finished_by_the_next_reader(tmp_path, monkeypatch):
    shutil.copytree(Path(__file__).parents[1] / "data" / "run-of-schema-1", tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patched, pytest.raises(OSError, match="power"):
        patched.setattr("ghostexport.runfolder.write_json", lambda *_: (_ for _ in ()).throw(OSError("power")))
        run.manifest()
    assert run.engine_quality_path.exists() and "/1" in run.manifest_path.read_text()
    assert run.read().engine_quality["runtime"] == "onnxruntime" and run.outputs("eval") == [run.model_quality_path]
