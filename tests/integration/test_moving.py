"""Run folders that move: to another place, into an archive, and to where neither torch nor transformers is."""

import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from ghostexport.errors import RunFolderError
from ghostexport.packing import SUMS, is_pack, pack, unpack
from ghostexport.runfolder import RunFolder
from ghostexport.runtimes.interface import read_interface

#: Runs the command line where torch and transformers cannot be imported.
DEVICE = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from ghostexport.cli import main
sys.argv = ["ghostexport", *sys.argv[1:]]
main()
"""


def on_device(*arguments, said=None):
    command = [sys.executable, "-c", DEVICE, *map(str, arguments)]
    environment = os.environ | {"COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, input=said, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_run_that_moves_is_current(built_run, tmp_path, cli, monkeypatch):
    run = RunFolder(shutil.copytree(built_run.path, tmp_path / "moved" / "run"))
    assert str(built_run.path) not in run.manifest_path.read_text()
    before = run.manifest()
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    monkeypatch.setattr("ghostexport.models.resolve_source", lambda *_: pytest.fail("the model was looked for"))
    for verb in (["verify"], ["build", "engine"]):
        code, _, err = cli(*verb, run.path)
        assert code == 0 and err.count("current, kept") == (7 if verb == ["verify"] else 8), err
    assert run.manifest() == before
    code, out, _ = cli("show", run.path)
    assert code == 0 and "outdated" not in out


@pytest.fixture(scope="module")
def archive(built_run, tmp_path_factory):
    return pack(built_run.path, tmp_path_factory.mktemp("packed") / "tiny.zip", ["ghost"])


def test_a_pack_of_one_variant_holds_it_alone_and_equal_runs_give_equal_bytes(built_run, archive, tmp_path):
    with zipfile.ZipFile(archive) as opened:
        names = set(opened.namelist())
    assert {n for n in names if n.startswith("onnx/")} == {
        "onnx/ghost.onnx", "onnx/ghost.onnx.new.data", "onnx/ghost.surgery.json",
    }  # fmt: skip
    assert {"recipe.yaml", "plan.json", "model/tokenizer.json", "model/LICENSE", SUMS} <= names
    assert not any("checkpoint" in name or "engines" in name or "statistics" in name for name in names)
    own = unpack(archive, tmp_path / "own")
    graphs = built_run.graph_path("ghost"), own / "onnx" / "ghost.onnx"
    assert read_interface(graphs[0]).weight_bytes == read_interface(graphs[1]).weight_bytes
    shared = sum(path.stat().st_size for path in read_interface(graphs[0]).data_files)
    assert (own / "onnx" / "ghost.onnx.new.data").stat().st_size < shared  # not the removed blocks' weights
    assert pack(built_run.path, tmp_path / "again.zip", ["ghost"]).read_bytes() == archive.read_bytes()
    assert is_pack(archive) and not is_pack(own / "recipe.yaml")
    assert unpack(archive, own) == own  # as it is


def test_a_damaged_or_hostile_archive_is_refused(archive, tmp_path):
    raw = bytearray(archive.read_bytes())
    with zipfile.ZipFile(archive) as opened:
        entry = opened.getinfo("onnx/ghost.onnx.new.data")
        sums = opened.read(SUMS)
    raw[entry.header_offset + 4000] ^= 1
    (tmp_path / "damaged.zip").write_bytes(raw)
    with pytest.raises(RunFolderError, match=r"damaged at onnx/ghost\.onnx\.new\.data"):
        unpack(tmp_path / "damaged.zip")
    with zipfile.ZipFile(tmp_path / "hostile.zip", "w") as opened:
        opened.writestr("../escaped", b"")
        opened.writestr(SUMS, sums.split(b"  ")[0] + b"  ../escaped\n")
    with pytest.raises(RunFolderError, match=r"damaged at \.\./escaped"):
        unpack(tmp_path / "hostile.zip")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["damaged.zip", "hostile.zip"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(RunFolderError, match="is not what"):
        unpack(archive, tmp_path / "other")


def test_a_device_without_torch_builds_measures_and_talks_from_a_pack(built_run, tmp_path):
    archive = pack(built_run.path, tmp_path / "tiny.zip", ["dense", "ghost", "ghost.int8"])
    run = RunFolder(tmp_path / "run")
    said = on_device("build", "engine", archive, "-o", run.path, "--runtime", "onnxruntime")
    assert said.count("current, kept") == 7 and "build: done" in said
    on_device("bench", run.path)
    measured = json.loads(run.bench_path("onnxruntime").read_text())
    assert set(measured["variants"]) == {"dense", "ghost", "ghost.int8"}
    assert measured["recipe_sha256"] and "numpy" in measured["ceilings"]["method"]
    quality = run.read().engine_quality["variants"]
    assert quality["dense"]["kl"] == 0 < quality["ghost"]["kl"]
    answered = on_device("chat", run.path, "--variant", "ghost", "--max-new-tokens", "6", said="hello\n\n")
    here = on_device("chat", built_run.path, "--variant", "ghost", "--max-new-tokens", "6", said="hello\n\n")
    assert answered.splitlines()[-1] == here.splitlines()[-1]
    assert "Building" not in on_device("show", run.path)


def test_any_graph_is_built_an_operator_spliced_in_first(built_run, tmp_path):
    shutil.copytree(built_run.graph_path("dense").parent, tmp_path / "onnx")
    graph, operators = tmp_path / "onnx" / "dense.onnx", built_run.operators_path("ghost")
    said = on_device(
        "build", "engine", graph, "--operator", operators, "--runtime", "onnxruntime", "-o", tmp_path / "o"
    )
    engine = tmp_path / "o" / "onnxruntime" / "dense-ghost.onnx"
    assert engine.is_file() and "ghost.0.delta" in read_interface(engine).spliced, said
