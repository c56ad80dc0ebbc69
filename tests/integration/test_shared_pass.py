"""One pass of the dense model serves select and recover, through the files of a run folder."""

import pytest

from ghostexport import calibration, models
from ghostexport.cli import resolve
from ghostexport.errors import RunFolderError
from ghostexport.execution import Execution
from ghostexport.pipeline import run as run_pipeline
from ghostexport.recovery.recover import recover

OPERATORS = ["ghost", "ghost-weighted", "ghost-affine", "linearpatch-diag", "linearpatch-rotate"]


@pytest.fixture
def recovered(tiny_model, text_file, tmp_path):
    """``recovered(**sections)`` runs to recover in one folder and returns it and the lines said."""

    def call(**sections):
        flags = {
            "calibration": {"source": str(text_file), "sequences": 24, "length": 64} | sections.get("calibration", {}),
            "select": {"prune": 2} | sections.get("select", {}),
            "recover": {"operators": OPERATORS} | sections.get("recover", {}),
            "build": {"runtimes": ["onnxruntime"]},
        }
        recipe, folder = resolve(str(tiny_model), tmp_path / "run", None, flags)
        said = []
        run_pipeline(recipe, folder, Execution(device="cpu", say=said.append), goal="recover")
        check_against_own_pass(recipe, folder)
        return folder, said

    return call


def check_against_own_pass(recipe, folder):
    """The operators on disk are those of recovery with a pass of its own, bit for bit."""
    loaded = models.load_model(recipe.model.source, "float32", Execution(device="cpu"))
    drawn, held_out = calibration.load(folder.calibration_path)
    for name, operators in recover(loaded, folder.read_plan(), drawn, held_out, recipe.recover).items():
        assert folder.operators_path(name).read_bytes() == operators.to_bytes(), name


def shared(said):
    """Whether recover said that it made no pass over the calibration set."""
    (line,) = [line for line in said if " own pass over the calibration set" in line]
    assert line.startswith(("recover: own pass", "recover: no own pass"))
    return line.startswith("recover: no own pass")


def test_recover_fits_from_the_pass_of_select(recovered):
    folder, said = recovered()
    assert shared(said)
    assert folder.statistics_path in folder.outputs("select")
    _, said = recovered(recover={"operators": ["ghost"], "ridge": 1e-3})
    assert "select: current, kept" in said and shared(said)


@pytest.mark.parametrize("change", ({"ridge": "cv"}, {"operators": ["ghost-split"]}, {"operators": OPERATORS}))
def test_a_changed_recovery_section_makes_its_own_pass_where_the_statistics_do_not_serve_it(recovered, change):
    recovered(recover={"operators": ["ghost"]})
    _, said = recovered(recover={"operators": ["ghost"]} | change)
    assert "select: current, kept" in said and not shared(said)


def test_changed_windows_or_another_plan_never_meet_old_statistics(recovered):
    folder, _ = recovered()
    first = folder.statistics_path.read_bytes()
    _, said = recovered(calibration={"seed": 1})
    assert shared(said) and folder.statistics_path.read_bytes() != first
    folder, said = recovered(select={"prune": None, "spans": [[1, 3]]})
    assert not shared(said) and not folder.statistics_path.exists()
    assert folder.outputs("select") == [folder.plan_path]


def test_a_damaged_file_is_named_and_made_again_after_deleting_it(recovered):
    folder, _ = recovered()
    whole = folder.statistics_path.read_bytes()
    folder.statistics_path.write_bytes(whole[:-8])
    with pytest.raises(RunFolderError, match=r"statistics\.safetensors was changed after the select stage"):
        recovered()
    folder.statistics_path.unlink()
    folder, said = recovered()
    assert folder.statistics_path.read_bytes() == whole and "recover: current, kept" in said


def test_a_disk_too_full_for_the_statistics_stops_nothing(recovered, monkeypatch):
    def full(*args):
        raise RunFolderError("The disk is full.", "Make room.")

    monkeypatch.setattr("ghostexport.recovery.gathered_file.require_space", full)
    folder, said = recovered()
    assert not shared(said) and not folder.statistics_path.exists()
    assert "select: the statistics for recover were not kept. The disk is full." in said
    _, said = recovered()
    assert "select: current, kept" in said and "recover: current, kept" in said
