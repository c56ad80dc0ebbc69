import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto

from ghostexport.errors import BuildError, RecipeError, RunFolderError, RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.operators import OperatorSet
from ghostexport.plan import PrunePlan
from ghostexport.recipe import BuildSection
from ghostexport.runtimes import RUNTIMES, current_engine, swap_operator
from ghostexport.runtimes.sidecar import read_sidecar
from ghostexport.serving.generation import generate
from tests.runtime_graphs import dense_graph, model, operators, variant_graph
from tests.unit.runtimes.test_interface import toy

RUNTIME = RUNTIMES["onnxruntime"]
CPU = Execution(device="cpu")
# logits of the tiny model are of order 1: float32 rounding of three blocks, float16 rounding
TOLERANCE = {"float32": 1e-5, "float16": 2e-2}


def build(graph, folder, **settings):
    return RUNTIME.build(graph, folder / graph.stem, graph.stem, BuildSection(**settings), CPU)


def tokens(batch, length, seed=0):
    return np.random.default_rng(seed).integers(3, 128, (batch, length))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_engine_equals_pytorch_at_prefill_and_at_decode(tmp_path, dtype):
    session = RUNTIME.load(build(dense_graph(dtype), tmp_path), CPU)
    ids = tokens(2, 9)
    with torch.no_grad():
        expected = model(dtype)(torch.from_numpy(ids)).logits.float().numpy()
    first, cache = session.forward(ids[:, :6], session.new_cache(2))
    second, longer = session.forward(ids[:, 6:], cache)
    assert np.abs(first - expected[:, :6]).max() < TOLERANCE[dtype]
    assert np.abs(second - expected[:, 6:]).max() < TOLERANCE[dtype]
    # keys and values of 3 blocks, 2 sequences, 2 heads of 16
    assert (cache.length, longer.length) == (6, 9)
    assert longer.nbytes == 2 * 3 * 2 * 2 * 9 * 16 * np.dtype(dtype).itemsize
    again, _ = session.forward(ids[:, 6:], cache)  # a cache is a value: it can be continued twice
    assert np.array_equal(again, second)


def test_greedy_generation_gives_the_tokens_of_pytorch(tmp_path):
    session = RUNTIME.load(build(dense_graph(), tmp_path), CPU)
    ids = tokens(2, 7)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model().generate(torch.from_numpy(ids), max_new_tokens=12, **options)[:, 7:].numpy()
    assert np.array_equal(generate(session, ids, 12), expected)


def test_a_left_padded_prompt_generates_what_it_does_alone(tmp_path):
    session = RUNTIME.load(build(dense_graph(), tmp_path), CPU)
    ids = tokens(2, 7)
    mask = np.ones_like(ids)
    mask[1, :3] = 0
    together = generate(session, ids, 8, attention_mask=mask)
    assert np.array_equal(together[:1], generate(session, ids[:1], 8))
    assert np.array_equal(together[1:], generate(session, ids[1:, 3:], 8))


def test_timing_reports_seconds_and_the_longer_cache(tmp_path):
    session = RUNTIME.load(build(dense_graph(), tmp_path), CPU)
    seconds, cache = session.timed_forward(tokens(1, 1), session.new_cache(1, 5))
    assert 0 < seconds < 10 and cache.length == 6 and session.provider == "cpu"


def test_engines_of_two_variants_hold_the_models_weights_once(tmp_path):
    dense, ghost = (build(graph, tmp_path) for graph in (dense_graph(), variant_graph("ghost")))
    assert dense.extra["build_peak_bytes"] > 0
    assert list(dense.sha256)[:2] == ["dense.onnx", "dense.onnx.data"]
    shared = tmp_path / "dense.onnx.data"
    assert shared.read_bytes() == dense_graph().with_name("dense.onnx.data").read_bytes()
    onnx.load(dense.path)  # refuses data files that are links
    assert {"dense.onnx.data", "ghost.onnx.data"} < set(ghost.sha256)
    assert ghost.path.stat().st_size < shared.stat().st_size / 4
    assert read_sidecar(ghost.path) == ghost == read_sidecar(ghost.sidecar)


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_tied_head_stays_the_embedding(tmp_path, device):
    # [5000, 64] float32: 1.28 MB, more than is folded
    rng = np.random.default_rng(0)
    embedding = (rng.standard_normal((5000, 64)) / 8).astype(np.float32)
    value, node = onnx.helper.make_tensor_value_info, onnx.helper.make_node
    graph = onnx.helper.make_graph(
        [
            node("Gather", ["embedding", "input_ids"], ["x"]),
            node("Transpose", ["embedding"], ["head"], perm=[1, 0]),
            node("MatMul", ["x", "head"], ["logits"]),
        ],
        "tied",
        [value("input_ids", TensorProto.INT64, ["batch", "tokens"])],
        [value("logits", TensorProto.FLOAT, ["batch", "tokens", 5000])],
        [onnx.numpy_helper.from_array(embedding, "embedding")],
    )
    path = tmp_path / "tied.onnx"
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10),
        path, save_as_external_data=True, location="tied.onnx.data",
    )  # fmt: skip
    engine = RUNTIME.build(path, tmp_path / "out" / "tied", "dense", BuildSection(), Execution(device=device))
    assert list(engine.sha256) == ["tied.onnx", "tied.onnx.data"]
    assert embedding.nbytes < engine.plan_bytes < embedding.nbytes + 4096
    session = RUNTIME.load(engine, CPU)
    logits, _ = session.forward(ids := rng.integers(0, 5000, (2, 3)), session.new_cache(2))
    assert np.abs(logits - embedding[ids] @ embedding.T).max() < TOLERANCE["float32"]


def test_an_engine_is_current_until_graph_setting_or_file_changes(tmp_path):
    graph = dense_graph()
    engine = build(graph, tmp_path)
    target = tmp_path / "dense"
    assert current_engine(RUNTIME, graph, target, BuildSection()) == engine
    assert current_engine(RUNTIME, graph, target, BuildSection(max_past=99)) is None
    assert current_engine(RUNTIME, variant_graph("pruned"), target, BuildSection()) is None
    engine.path.write_bytes(engine.path.read_bytes() + b"x")
    with pytest.raises(RunFolderError, match=r"dense\.onnx was truncated or edited"):
        current_engine(RUNTIME, graph, target, BuildSection())
    with pytest.raises(RunFolderError, match="its hash differs"):
        RUNTIME.load(engine, CPU)


@pytest.mark.parametrize(("old", "new"), [("ghost", "linearpatch-diag"), ("affine", "ghost")])
def test_swapping_operators_equals_building_their_variant(tmp_path, old, new):
    engine = build(variant_graph(old), tmp_path)
    file = tmp_path / "new.safetensors"
    file.write_bytes(operators(new).to_bytes())
    swapped = swap_operator(engine.path, file)
    assert swapped.path == tmp_path / f"{new}.onnx" and swapped.variant == new
    built = build(variant_graph(new), tmp_path / "built")
    ids = tokens(1, 5)
    logits = []
    for candidate in (engine, swapped, built):
        session = RUNTIME.load(candidate, CPU)
        logits.append(session.forward(ids, session.new_cache(1))[0])
    assert np.abs(logits[1] - logits[2]).max() < TOLERANCE["float32"]
    assert np.abs(logits[1] - logits[0]).max() > 1e-2


def test_operators_that_do_not_fit_are_refused_and_nothing_is_written(tmp_path):
    engine = build(variant_graph("ghost"), tmp_path)
    before = sorted(tmp_path.iterdir())
    other_plan = OperatorSet("empty", (), PrunePlan(3))
    for wrong, message in ((operators("affine"), "needs bias, delta"), (other_plan, "boundaries")):
        with pytest.raises(BuildError, match=message):
            RUNTIME.swap(engine, wrong, tmp_path / "wrong", CPU)
    with pytest.raises(BuildError, match="no operator to swap"):
        RUNTIME.swap(build(dense_graph(), tmp_path / "d"), operators(), tmp_path / "wrong", CPU)
    assert sorted(p for p in tmp_path.iterdir() if p.name != "d") == before


def test_bfloat16_on_the_cpu_is_refused_with_the_reason(tmp_path):
    with pytest.raises(BuildError, match="CPU provider has no bfloat16 kernels"):
        build(toy(tmp_path / "m.onnx"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"providers": ("cuda",)}, RuntimeUnavailableError, "has no cuda provider, only cpu"),
        ({"compute_capability": ("SM86",)}, RecipeError, "compute_capability .* means nothing to onnxruntime"),
        ({"profiles": "split"}, RecipeError, "profiles = 'split' means nothing to onnxruntime"),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path, settings, error, message):
    with pytest.raises(error, match=message):
        build(dense_graph(), tmp_path, **settings)


def test_a_setting_of_another_runtime_of_the_same_build_is_not_refused(tmp_path):
    settings = {"runtimes": ("onnxruntime", "tensorrt-rtx"), "compute_capability": ("SM86",)}
    assert build(dense_graph(), tmp_path, **settings).flags["compute_capability"] == ["SM86"]


def test_the_engine_never_overwrites_its_graph():
    graph = dense_graph()
    with pytest.raises(BuildError, match="would overwrite its own graph"):
        build(graph, graph.parent)


def test_a_graph_that_onnxruntime_refuses_names_the_reason(tmp_path):
    with pytest.raises(BuildError, match="cannot optimise") as caught:
        build(toy(tmp_path / "m.onnx", dtype=TensorProto.FLOAT, op="NoSuchOperator"), tmp_path / "out")
    assert "NoSuchOperator" in caught.value.log and "does not know an operator" in caught.value.remedy
    assert not list((tmp_path / "out").iterdir())
