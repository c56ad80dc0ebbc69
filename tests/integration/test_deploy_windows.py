"""Models whose attention slides, deployed: prompts are longer than the window, and notice another one."""

import json

import numpy as np
import pytest

from ghostexport.deploy import deploy, selftest
from ghostexport.deploy.bundle import SUMS, write_sums
from ghostexport.deploy.selftest import read_selftest
from ghostexport.errors import ParityError, RecipeError
from ghostexport.execution import Execution
from tests.integration.conftest import TEMPLATE
from tests.tiny import tiny_folder

CPU = Execution(device="cpu")
WINDOW = 48
SLOW = pytest.mark.slow
RUN_HERE = {"transformers": "transformers", "genai": "onnxruntime_genai", "openvino": "openvino"}


@pytest.fixture(scope="module", params=["mistral", pytest.param("gemma3", marks=SLOW)])
def run(request, text_file, tmp_path_factory):
    """Verified, every block of it sliding, or all but every sixth."""
    from ghostexport.cli import resolve
    from ghostexport.pipeline import run as run_pipeline

    root = tmp_path_factory.mktemp("sliding")
    model = tiny_folder(root / "model", request.param, sliding_window=WINDOW)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    given = {
        "calibration": {"source": str(text_file), "sequences": 24, "length": 64},
        "select": {"spans": [[2, 4]]},
        "recover": {"operators": ["ghost"] if request.param == "gemma3" else ["ghost", "ghost-zero+refit"]},
    }
    recipe, folder = resolve(str(model), root / "run", None, given)
    run_pipeline(recipe, folder, goal="verify")
    return folder


@pytest.mark.parametrize("target", ["transformers", "genai", pytest.param("openvino", marks=SLOW)])
def test_a_prompt_longer_than_the_window_is_answered_as_verified(target, run, tmp_path):
    pytest.importorskip(RUN_HERE[target])
    assert "passed" in deploy(run.path, target, tmp_path / "out", "ghost", CPU)
    lengths = [len(entry["ids"]) for entry in read_selftest(tmp_path / "out")["prompts"]]
    assert max(lengths) == WINDOW + 8 and min(lengths) < WINDOW  # with its answer, every prompt leaves the window


def test_a_folder_that_says_another_window_is_caught(run, tmp_path):
    folder = tmp_path / "out"
    deploy(run.path, "transformers", folder, "ghost", CPU)
    config = json.loads((folder / "config.json").read_text())
    assert config["base"]["sliding_window"] == WINDOW
    config["base"]["sliding_window"] -= 1
    (folder / "config.json").write_text(json.dumps(config))
    (folder / SUMS).unlink()
    write_sums(folder)
    with pytest.raises(ParityError, match="FAILED"):
        selftest(folder)


def test_llama_cpp_which_would_not_slide_is_refused(run, tmp_path):
    if "ghost-zero+refit" not in run.graphs():
        pytest.skip("llama.cpp holds folded variants, and this model's norm behind a block lets none fold")
    with pytest.raises(RecipeError, match=rf"attends to {WINDOW} tokens.*to all"):
        deploy(run.path, "gguf", tmp_path / "out", "ghost-zero+refit", CPU)


def test_genai_answers_several_prompts_of_one_length_and_the_card_says_so(run, tmp_path):
    og = pytest.importorskip("onnxruntime_genai")
    deploy(run.path, "genai", tmp_path / "out", "ghost", CPU)
    assert "only of one length" in (tmp_path / "out" / "README.md").read_text()
    first, _, second = (entry["ids"][:24] for entry in read_selftest(tmp_path / "out")["prompts"][:3])
    assert len(first) == len(second) and first != second
    model = og.Model(str(tmp_path / "out"))

    def answers(rows):
        parameters = og.GeneratorParams(model)
        lengths = {"min_length": 24 + WINDOW, "max_length": 24 + WINDOW}  # no end token ends it: beyond the window
        parameters.set_search_options(**lengths, batch_size=len(rows), do_sample=False)
        generator = og.Generator(model, parameters)
        generator.append_tokens(np.array(rows, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return [list(generator.get_sequence(i)) for i in range(len(rows))]

    both = answers([first, second])
    assert min(map(len, both)) == 24 + WINDOW
    assert both == [*answers([first]), *answers([second])]
