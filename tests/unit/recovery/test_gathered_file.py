"""What comes back from disk is what was gathered, and nothing is taken for what it is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from ghostexport import models
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import RunFolderError
from ghostexport.execution import Execution
from ghostexport.plan import PrunePlan
from ghostexport.recovery import gathered_file
from ghostexport.recovery.gathering import Request, gather
from tests.tiny import tiny

PLAN = PrunePlan.from_spans(6, [[1, 2], [3, 5]])
REQUEST = Request(frozenset({"identity", "hadamard"}), frozenset({"weighted"}), 4)


def windows(seed=0):
    return CalibrationSet.from_tokens(np.random.default_rng(seed).integers(3, 128, (40, 60)))


@pytest.fixture(scope="module")
def loaded():
    return models.from_memory(tiny("llama"))


@pytest.fixture(scope="module")
def gathered(loaded):
    return gather(loaded, PLAN.boundaries, windows(), REQUEST, Execution())


@pytest.fixture
def path(tmp_path, loaded, gathered):
    return gathered_file.save(tmp_path / "statistics.safetensors", loaded, windows(), gathered)


def test_every_number_comes_back(path, loaded, gathered):
    back = gathered_file.load(path, loaded, windows(), PLAN, REQUEST)
    for one, other in zip(back, gathered, strict=True):
        assert one.boundary == other.boundary and one.needs == other.needs and list(one.ratios) == list(other.ratios)
        pairs = [*zip(one.folds, other.folds, strict=True)]
        pairs += zip(one.weighted_folds, other.weighted_folds, strict=True)
        pairs += zip(one.ratios.values(), other.ratios.values(), strict=True)
        assert len(pairs) == 4 + 4 + 2
        for a, b in pairs:
            assert vars(a).keys() == vars(b).keys()
            for name, value in vars(a).items():
                expected = vars(b)[name]
                assert type(value) is type(expected), name
                assert torch.equal(value, expected) if isinstance(value, torch.Tensor) else value == expected, name
        assert all(torch.equal(a, b) for a, b in zip(one.sample.columns, other.sample.columns, strict=True))


def test_equal_content_gives_equal_bytes(path, loaded, gathered, tmp_path):
    again = gathered_file.save(tmp_path / "again.safetensors", loaded, windows(), gathered)
    assert again.read_bytes() == path.read_bytes()


def test_less_than_was_gathered_can_be_asked_for_but_not_more(path, loaded):
    def held(*request):
        return gathered_file.load(path, loaded, windows(), PLAN, Request(*request)) is not None

    assert held(frozenset(), frozenset(), 4) and held(frozenset({"identity"}), frozenset({"weighted"}), 4)
    assert not held(frozenset(), frozenset(), 1)
    assert not held(frozenset(), frozenset({"last-block"}), 4)


def test_statistics_of_something_else_are_not_taken(path, loaded, tmp_path):
    assert gathered_file.load(path, loaded, windows(1), PLAN, REQUEST) is None
    assert gathered_file.load(path, loaded, windows(), PrunePlan.from_spans(6, [[1, 2], [3, 4]]), REQUEST) is None
    assert gathered_file.load(path, models.from_memory(tiny("llama", seed=1)), windows(), PLAN, REQUEST) is None
    assert gathered_file.load(tmp_path / "none.safetensors", loaded, windows(), PLAN, REQUEST) is None


def test_a_damaged_file_is_refused_with_a_remedy(path, loaded):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(RunFolderError, match="not a readable statistics file") as error:
        gathered_file.load(path, loaded, windows(), PLAN, REQUEST)
    assert "Delete the file" in str(error.value)
    save_file({"tokens": np.zeros(3)}, path)
    with pytest.raises(RunFolderError, match="not a statistics file of format"):
        gathered_file.load(path, loaded, windows(), PLAN, REQUEST)
