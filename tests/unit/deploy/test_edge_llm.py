"""What TensorRT Edge-LLM would lose in silence is refused."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from ghostexport.deploy import edge_llm
from ghostexport.errors import RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.models import drop_blocks, insert_operators
from ghostexport.operators import Operator, OperatorSet, WeightFold
from ghostexport.plan import PrunePlan
from tests.decoding import assert_same, chunks, torch_logits
from tests.integration.test_surgery_edge_llm import NAME, SOURCE, _edge_logits
from tests.surgery_cases import FIXTURES, dense_operators, fixture_model, plan_of

PLAN = PrunePlan.from_spans(6, [[2, 4]])
WEIGHT = np.zeros((8, 4), np.float32)


def bundle(operator=None, kind="llama", template="{{ messages }}", **fields):
    made = operator or Operator(PLAN.boundaries[0], "ghost-zero", folds=(WeightFold(1, "mlp_output", WEIGHT),))
    operators = OperatorSet("ghost-zero", (made,), PLAN)
    about = {"operators": operators, "adds_nodes": operators.adds_nodes, "config": {"model_type": kind}}
    return SimpleNamespace(codec=SimpleNamespace(template=template), exported=None, plan=PLAN, **about)


def test_a_fold_without_bias_fits():
    assert edge_llm.refusal(bundle()) is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"operator": Operator(PLAN.boundaries[0], "ghost", delta=np.zeros((4, 4), np.float32))}, "no place for an"),
        (
            {
                "operator": Operator(
                    PLAN.boundaries[0],
                    "ghost-zero",
                    folds=(WeightFold(1, "mlp_output", WEIGHT, np.zeros(4, np.float32)),),
                )
            },
            "reads no bias",
        ),
        ({"kind": "gpt2"}, "not gpt2"),
        ({"template": None}, "chat template"),
    ],
)
def test_what_would_be_lost_is_refused(given, reason):
    assert reason in edge_llm.refusal(bundle(**given))


def test_its_own_export_is_cut_repaired_and_counted_anew(tmp_path):
    model, plan = fixture_model(NAME), plan_of("middle")
    operators, exported, output = dense_operators(plan, 32), tmp_path / "exported", tmp_path / "output"
    exported.mkdir()
    output.mkdir()
    shutil.copyfile(SOURCE, exported / "model.onnx")
    for name in ("embedding.safetensors", "chat_template.jinja"):
        (exported / name).write_text(name)
    windows = [f"window {block}" for block in range(plan.num_blocks)]
    about = {"edgellm_version": "0.11.0", "num_hidden_layers": plan.num_blocks, "attention_layer_types": windows}
    (exported / "config.json").write_text(json.dumps(about | {"eos_token_id": [2]}))
    given = SimpleNamespace(exported=exported, plan=plan, operators=operators)
    assert edge_llm.refusal(given) is None
    edge_llm.write(given, output, Execution())
    found = json.loads((output / "config.json").read_text())
    kept = [windows[block] for block in plan.kept]
    assert (found["num_hidden_layers"], found["attention_layer_types"], found["eos_token_id"]) == (len(kept), kept, [2])
    assert (output / "embedding.safetensors").read_text() == "embedding.safetensors"
    onnx.save(onnx.load(output / "model.onnx"), tmp_path / "whole.onnx")
    tokens = chunks(96, (7, 1, 5), batch=1, seed=0)
    logits = _edge_logits(tmp_path / "whole.onnx", model, [tokens, tokens], len(plan.kept))[0]
    repaired = insert_operators(drop_blocks(model, plan), operators)
    assert_same(logits, torch_logits(repaired, tokens), FIXTURES[NAME].tolerance)
    with pytest.raises(RuntimeUnavailableError, match="on the device"):
        edge_llm.run(output, [[1]], 1)
    (exported / "config.json").write_text(json.dumps(about | {"num_hidden_layers": 9}))
    assert f"has 9 blocks, the whole model {plan.num_blocks}" in edge_llm.refusal(given)
    (exported / "config.json").unlink()
    assert "of tensorrt-edgellm-export" in edge_llm.refusal(given)
