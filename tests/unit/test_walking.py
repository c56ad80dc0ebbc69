"""A model walked block by block gives what it gives batch by batch, bit for bit."""

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ghostexport import api, models
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import RunFolderError
from ghostexport.execution import Execution
from ghostexport.models import Shelf, read_streams
from ghostexport.plan import PrunePlan
from ghostexport.recipe import RecoverSection, SelectSection
from ghostexport.recovery.recover import recover
from ghostexport.selection.choosing import select, select_and_gather
from ghostexport.sizing.capacity import Machine
from tests.tiny import CONFIGS, SHAPES, tiny, tiny_folder


def windows(seed, count=16, length=24):
    random = np.random.default_rng(seed)
    mask = np.arange(length) < random.integers(length // 2, length + 1, (count, 1))
    return CalibrationSet.from_tokens(random.integers(3, 128, (count, length)), mask)


@pytest.fixture
def on_disk(monkeypatch):
    """Nothing fits on the shelf: every value goes over the disk, and a batch is of four sequences."""
    monkeypatch.setattr(Shelf.__init__, "__defaults__", (0,))
    monkeypatch.setattr(CalibrationSet.batches, "__defaults__", ("cpu", 100))


@pytest.fixture(params=["llama", "olmo2", "mixtral", "llama-tied"])
def both(request):
    loaded = models.from_memory(tiny(request.param))
    return loaded, replace(loaded, walked=True)


def seen(loaded, points, tokens):
    found = {}
    read_streams(
        loaded,
        tokens.batches(),
        points,
        lambda batch, point, x: found.__setitem__((batch.sequences.start, point), x[batch.mask].clone()),
        Execution(),
        "test",
        len(tokens),
    )
    return found


@pytest.mark.parametrize("name", [*CONFIGS, *(name for name in SHAPES if name != "llama4")])
def test_residual_values_are_those_of_whole_passes(name, on_disk):
    loaded = models.from_memory(tiny(name))
    tokens = windows(0, 12)
    for points in (range(7), [0], [2, 5], [6]):
        whole, walked = (seen(m, points, tokens) for m in (loaded, replace(loaded, walked=True)))
        assert whole.keys() == walked.keys() and len(whole) == 3 * len(points)
        assert all(torch.equal(whole[key], walked[key]) for key in whole)


def test_every_block_is_done_before_the_next_one():
    loaded = replace(models.from_memory(tiny("llama")), walked=True)
    order = []
    for index, block in enumerate(loaded.blocks):
        block.register_forward_hook(lambda *_, index=index: order.append(index))
    told = []
    execution = Execution(progress=lambda task, done, total: told.append((task, done, total)))
    read_streams(loaded, windows(0, 12).batches(tokens=100), [4], lambda *_: None, execution, "test", 12)
    assert order[1:] == sorted([0, 1, 2, 3] * 3)  # the first is the look at what a block returns
    assert told == [(f"test · block {done // 3} of 6", done + 1, 12) for done in range(12)]


@pytest.mark.parametrize("criterion", ["streamline", "angular", "lorp", "residual", "prune-and-comp", "perplexity"])
def test_every_criterion_chooses_and_scores_the_same(criterion, on_disk):
    loaded = models.from_memory(tiny("llama"))
    section = SelectSection(criterion=criterion, prune=2, protect_first=1, protect_last=1)
    plans = [select(m, windows(0), section) for m in (loaded, replace(loaded, walked=True))]
    assert plans[0].removed == plans[1].removed and plans[0].to_json() == plans[1].to_json()


def test_the_same_operators(both, on_disk):
    section = SelectSection(prune=2, protect_first=1)
    best = "ghost-split" if models.find_anatomies(both[0].model, [2])[2].additive else "ghost-weighted"
    wanted = RecoverSection(operators=("ghost", "linearpatch-rotate", best, f"{best}+refit"), ridge="cv")
    sets = []
    for loaded in both:
        plan, gathered = select_and_gather(loaded, windows(0), section, wanted, Execution())
        sets.append(recover(loaded, plan, windows(0), windows(1, 8), wanted, gathered=gathered))
    for name, one in sets[0].items():
        assert one.to_bytes() == sets[1][name].to_bytes()


def test_the_same_operators_at_several_cuts(on_disk):
    loaded = models.from_memory(tiny("llama"))
    plan = PrunePlan.from_spans(6, [[1, 2], [3, 5]])
    section = RecoverSection(operators=("ghost", "ghost-split", "ghost-weighted+refit"), statistics="sequential")
    sets = [recover(m, plan, windows(0), windows(1, 8), section) for m in (loaded, replace(loaded, walked=True))]
    for name, one in sets[0].items():
        assert one.to_bytes() == sets[1][name].to_bytes()


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2"])
def test_the_same_evaluation_of_every_variant(name, on_disk):
    found = []
    for walked in (False, True):
        loaded = replace(models.from_memory(tiny(name)), walked=walked)
        kinds = ("ghost", "ghost-split") if name == "llama" else ("ghost",)
        variants = {"dense": loaded}
        for spans in ([[1, 3]], [[4, 6]]):  # in the middle and at the end
            plan = PrunePlan.from_spans(6, spans)
            sets = recover(loaded, plan, windows(0), windows(1, 8), RecoverSection(operators=kinds))
            variants |= {f"{spans} {kind}": models.patch(loaded, plan, one) for kind, one in sets.items()}
        found.append(api.evaluate(variants, windows(2, 8)))
    assert found[0] == found[1]
    assert all(quality.mean_kl > 0 for key, quality in found[0].items() if key != "dense")


def test_a_shelf_gives_back_what_was_put_there(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shelf = Shelf(room=215)
    values = [torch.randn(5, 7).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    for key, value in enumerate(values):
        shelf.put(key, value)
    stored = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert stored == [70]  # beside 140 + 70 bytes there is no room for 70
    assert torch.equal(shelf.look(2), values[2]) and torch.equal(shelf.take(0), values[0])
    shelf.put(0, values[0][:2])  # there is room again
    assert all(torch.equal(shelf.take(key), value) for key, value in enumerate([values[0][:2], *values[1:]]))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    with pytest.raises(KeyError):
        shelf.look(1)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 0}))
    with pytest.raises(RunFolderError, match="No disk space for residual values"):
        shelf.put(1, torch.zeros(100))
    del shelf
    assert not list(tmp_path.iterdir())


def test_streaming_is_asked_for_or_follows_from_the_memory(tmp_path, monkeypatch):
    folder, said = tiny_folder(tmp_path / "model", "llama"), []
    asked = models.load_model(folder, "float32", Execution(device="cpu", streaming=True, say=said.append))
    assert asked.walked and "streamed from its files block by block" in said[-1]
    assert not models.load_model(folder, "float32", Execution(device="cpu", say=said.append)).walked
    small = Machine(memory=100_000, total_memory=10**9, disk=10**9)
    monkeypatch.setattr("ghostexport.models.loading.measure_machine", lambda *_: small)
    assert models.load_model(folder, "float32", Execution(device="cpu", say=said.append)).walked
    assert "0.0 GB of memory free" in said[-1] and len(said) == 2
    whole = Execution(device="cpu", streaming=False, say=said.append)
    assert not models.load_model(folder, "float32", whole).walked and len(said) == 2


def test_blocks_that_read_values_of_others_are_not_streamed(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    tiny_decoders = importlib.import_module("tiny_decoders")
    shared = models.from_memory(tiny_decoders.build("gemma4-kv-shared"), streaming=True)
    assert not shared.walked and models.from_memory(tiny("mixtral"), streaming=True).walked
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in shared.blocks)
