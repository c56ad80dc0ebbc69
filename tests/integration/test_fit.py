"""``fit`` from the command line: candidates of two depths and formats, and what each costs, read off their files."""

import json

import pytest
import yaml

from ghostexport.benchmarking.budget import REACHED


@pytest.mark.slow
def test_fit_chooses_from_measured_variants(cli, tiny_model, text_file, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    asked = {
        "calibration": {"source": str(text_file), "sequences": 24, "length": 64, "held_out_sequences": 4},
        "recover": {"operators": ["ghost"]},
    }
    recipe.write_text(yaml.safe_dump(asked), encoding="utf-8")
    depths = ("--prune", "1", "--prune", "3", "--bandwidth", "0.1", "--context", "100", "--sibling", tiny_model)
    code, out, err = cli("fit", tiny_model, "-o", tmp_path / "fit", "--recipe", recipe, *depths, "--keep", "0.5")
    assert code == 0, err
    found = json.loads((tmp_path / "fit" / "fit.json").read_text(encoding="utf-8"))
    by = {(c["removed"], c["variant"]): c for c in found["candidates"]}
    assert set(by) == {(0, "dense"), (0, "dense.int4")} | {(n, v) for n in (1, 3) for v in ("ghost", "ghost.int4")}
    for (removed, variant), c in by.items():
        run = tmp_path / "fit" / f"prune-{removed or 1}"
        figures = json.loads((run / "model_quality.json").read_text(encoding="utf-8"))["variants"]
        assert c["perplexity"] == figures[variant]["perplexity"]
        assert c["keeps"] == figures["dense"]["perplexity"] / c["perplexity"]
        kv = 100 * (6 - removed) * 2 * 2 * 16 * 4
        assert c["memory"] == c["weight_bytes"] + kv
        assert c["tokens_per_second"] == REACHED * 1e8 / (c["weight_bytes"] + kv)  # the table is tied: read whole
    fitting = [c for c in by.values() if c["keeps"] >= 0.5]
    best = max(fitting, key=lambda c: c["tokens_per_second"])
    assert found["chosen"]["variant"] == best["variant"] and found["chosen"]["removed"] == best["removed"]
    assert f"chosen: {tiny_model.name}, {best['removed']} removed, {best['variant']}" in out
    assert "<svg" in (tmp_path / "fit" / "fit.html").read_text(encoding="utf-8")
    code, _, err = cli("fit", tiny_model, "-o", tmp_path / "fit", "--recipe", recipe, *depths, "--memory", "1kB")
    assert code == 2 and "Nothing measured fits" in err and "MB of 0" in err
