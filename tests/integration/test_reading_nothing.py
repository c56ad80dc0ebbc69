"""What is only looked at, or run again while it is current, reads no weights, neither the model's nor the run's."""

import os
import shutil

import pytest

from ghostexport import files, models, pipeline
from ghostexport.execution import Execution
from ghostexport.recipe import parse_recipe, read_recipe
from ghostexport.runfolder import RunFolder

WEIGHTS = (".safetensors", ".data", ".constants")


@pytest.mark.slow
def test_show_and_a_rerun_of_a_current_run_read_no_weights(built_run, cli, tmp_path, monkeypatch):
    folder = RunFolder(shutil.copytree(built_run.path, tmp_path / "run"))
    weights = [path for path in folder.path.rglob("*") if path.suffix in WEIGHTS]
    assert len(weights) > 6
    for path in weights:  # nonsense of the same size and time: whoever reads it fails, or makes everything again
        stat, content = path.stat(), path.read_bytes()
        head = content[: 8 + int.from_bytes(content[:8], "little")] if path.suffix == ".safetensors" else b""
        path.write_bytes(head + b"\xff" * (stat.st_size - len(head)))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    said, hashed, real = [], [], files._digest
    monkeypatch.setattr(files, "_digest", lambda path: hashed.append(path.name) or real(path))
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    recipe = parse_recipe(read_recipe(folder.recipe_path))
    pipeline.run(recipe, folder, Execution(device="cpu", say=said.append))
    # what best stood for is known from the run, as long as nothing changed that it hangs on
    folder.note("recover", asked=["best"])
    best = recipe.model_copy(update={"recover": recipe.recover.model_copy(update={"operators": ("best",)})})
    pipeline.run(best, folder, Execution(device="cpu", say=said.append))
    assert len(said) >= 12 and [line for line in said if not line.endswith("current, kept")] == []
    code, out, _ = cli("show", folder.path)
    assert code == 0 and "NMSE" in out and hashed == []
