"""Broken and malicious files: a clear error, nothing written outside the output, no partial output."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from ghostexport.errors import RunFolderError, SurgeryError
from ghostexport.plan import PrunePlan
from ghostexport.surgery import operate
from tests.unit.surgery.toy import Toy, build, save

PLAN = PrunePlan.from_spans(4, [(1, 2)])


def _edit(folder: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    source = save(Toy(), folder / "dense.onnx")
    proto = onnx.load(source, load_external_data=False)
    change(proto)
    source.write_bytes(proto.SerializeToString())
    return source


def _external(proto: onnx.ModelProto, index: int, **entries: str) -> None:
    tensor = [t for t in proto.graph.initializer if t.external_data][index]
    for entry in tensor.external_data:
        if entry.key in entries:
            entry.value = entries[entry.key]


def _swap_first_nodes(proto: onnx.ModelProto) -> None:
    last = proto.graph.node.pop()
    proto.graph.node.insert(0, last)


def _cycle(proto: onnx.ModelProto) -> None:
    proto.graph.node[1].input[0] = proto.graph.node[3].output[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: _external(p, 0, location="/etc/passwd"), "outside the model's folder"),
        (lambda p: _external(p, 0, location="../secret"), "outside the model's folder"),
        (lambda p: _external(p, 0, location="C:\\secret"), "outside the model's folder"),
        (lambda p: _external(p, 0, location="absent.data"), "missing"),
        (lambda p: _external(p, 0, offset="99999999"), "truncated|ends at byte"),
        (lambda p: _external(p, 0, offset="-4"), "offset '-4'"),
        (lambda p: _external(p, 0, length="3"), "length 3"),
        (lambda p: _external(p, 1, offset="4"), "overlap"),
        (_cycle, "cycle"),
        (lambda p: p.graph.node[2].output.__setitem__(0, p.graph.node[1].output[0]), "defined twice"),
        (lambda p: p.graph.node[2].input.__setitem__(0, "nowhere"), "never defined"),
        (lambda p: p.graph.initializer.append(p.graph.initializer[0]), "same name"),
        (lambda p: p.opset_import[0].__setattr__("version", 99), "opset 99"),
        (lambda p: p.graph.ClearField("node"), "no nodes"),
    ],
)
def test_hostile_graphs_are_refused(change: Callable[[onnx.ModelProto], None], message: str, tmp_path: Path) -> None:
    source = _edit(tmp_path, change)
    (tmp_path / "out").mkdir()
    with pytest.raises(SurgeryError, match=message):
        operate(source, PLAN, None, tmp_path / "out" / "x.onnx")
    assert not list((tmp_path / "out").iterdir())


def test_an_unsorted_graph_is_sorted(tmp_path: Path) -> None:
    source = _edit(tmp_path, _swap_first_nodes)
    operate(source, PLAN, None, tmp_path / "out.onnx")
    onnx.checker.check_model(tmp_path / "out.onnx")


def test_a_link_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    source = save(Toy(), tmp_path / "model" / "dense.onnx") if (tmp_path / "model").mkdir() is None else None
    assert source is not None
    data = source.with_name("dense.onnx.data")
    data.rename(tmp_path / "elsewhere.data")
    data.symlink_to(tmp_path / "elsewhere.data")
    with pytest.raises(SurgeryError, match="leaves"):
        operate(source, PLAN, None, tmp_path / "out.onnx")


def test_truncated_data_and_truncated_graphs_are_refused(tmp_path: Path) -> None:
    source = save(Toy(), tmp_path / "dense.onnx")
    data = tmp_path / "dense.onnx.data"
    data.write_bytes(data.read_bytes()[:-10])
    with pytest.raises(SurgeryError, match="truncated"):
        operate(source, PLAN, None, tmp_path / "out.onnx")
    source.write_bytes(source.read_bytes()[:-100])
    with pytest.raises(SurgeryError):
        operate(source, PLAN, None, tmp_path / "out.onnx")
    source.write_bytes(b"MZ not a model")
    with pytest.raises(SurgeryError):
        operate(source, PLAN, None, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_names_of_ten_kilobytes_pass(tmp_path: Path) -> None:
    def rename(proto: onnx.ModelProto) -> None:
        long, old = "x" * 10_000, proto.graph.node[0].output[0]
        for node in proto.graph.node:
            for names in (node.input, node.output):
                for i, name in enumerate(names):
                    if name == old:
                        names[i] = long

    operate(_edit(tmp_path, rename), PLAN, None, tmp_path / "out.onnx")
    onnx.checker.check_model(tmp_path / "out.onnx")


def test_a_data_file_beyond_two_gigabytes_is_no_obstacle(tmp_path: Path) -> None:
    """A sparse file: the last weight of the removed block lies beyond 2.1 GB."""
    model = build(Toy())
    big = ir.ExternalTensor(
        "big.data", 0, 2_100_000_000, ir.DataType.INT8, shape=ir.Shape([2_100_000_000]), name="big", base_dir=tmp_path
    )
    with (tmp_path / "big.data").open("wb") as file:
        file.truncate(2_100_000_000)
    model.graph.register_initializer(
        ir.Value(name="big", shape=ir.Shape([2_100_000_000]), type=ir.TensorType(ir.DataType.INT8), const_value=big)
    )
    ir.save(model, tmp_path / "dense.onnx")
    report = operate(tmp_path / "dense.onnx", PLAN, None, tmp_path / "out.onnx")
    assert "big" in report.initializers_dropped
    assert report.weight_bytes_before - report.weight_bytes_after > 2_100_000_000


def test_data_of_another_model_is_not_overwritten(tmp_path: Path) -> None:
    source = save(Toy(), tmp_path / "dense.onnx")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "dense.onnx.data").write_bytes(b"precious")
    with pytest.raises(RunFolderError, match="exists and is not"):
        operate(source, PrunePlan(PLAN.num_blocks), None, tmp_path / "out" / "x.onnx")
    assert not (tmp_path / "out" / "x.onnx").exists()
    operate(source, PLAN, None, tmp_path / "out" / "x.onnx")  # its own data file has another name
    assert (tmp_path / "out" / "dense.onnx.data").read_bytes() == b"precious"


def _hub(folder: Path, data: str = "../../blobs/bb") -> Path:
    """A graph as the Hugging Face cache stores it: links of a snapshot into the repository's blobs."""
    blobs, snapshot = folder / "repo" / "blobs", folder / "repo" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    source = save(Toy(), folder / "dense.onnx")
    source.rename(blobs / "aa")
    (folder / "dense.onnx.data").rename(blobs / "bb")
    (snapshot / "dense.onnx").symlink_to("../../blobs/aa")
    (snapshot / "dense.onnx.data").symlink_to(data)
    return snapshot / "dense.onnx"


def test_a_graph_in_the_hugging_face_cache_is_cut(tmp_path: Path) -> None:
    import onnxruntime

    report = operate(_hub(tmp_path), PLAN, None, tmp_path / "out" / "x.onnx")
    assert report.data_files == ("x.onnx.data",)
    onnxruntime.InferenceSession(tmp_path / "out" / "x.onnx")


@pytest.mark.parametrize("case", ["another repository", "beside the blobs", "blobs are elsewhere", "blob is a link"])
def test_no_other_link_leaves_a_snapshot(case: str, tmp_path: Path) -> None:
    repo, secret = tmp_path / "repo", tmp_path / "other" / "blobs" / "bb"
    data = {"another repository": "../../../other/blobs/bb", "beside the blobs": "../../bb"}
    source = _hub(tmp_path, data.get(case, "../../blobs/bb"))
    secret.parent.mkdir(parents=True)
    (repo / "blobs" / "bb").rename(secret)
    if case == "beside the blobs":
        secret.rename(repo / "bb")
    elif case == "blobs are elsewhere":
        (repo / "blobs").rename(repo / "kept")
        source.unlink()
        source.symlink_to("../../kept/aa")
        (repo / "blobs").symlink_to(secret.parent)
    elif case == "blob is a link":
        (repo / "blobs" / "bb").symlink_to(secret)
    with pytest.raises(SurgeryError, match="is a link that leaves"):
        operate(source, PLAN, None, tmp_path / "out.onnx")
