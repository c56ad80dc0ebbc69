"""Checkpoints with an operator inside, as transformers' own loader and cache run them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import RepoUrl

from ghostexport import models
from ghostexport.deploy.remote_code import write_model
from ghostexport.operators import Operator, OperatorSet
from ghostexport.plan import PrunePlan
from tests.tiny import tiny

TOKENS = torch.tensor([[1, 5, 9, 77, 33, 8, 21, 64, 90, 3, 17, 5], [1, 99, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20]])
TWO = [[1, 2], [4, 6]]  # in the middle and at the end
ARCHITECTURES = (
    "llama",
    "llama-tied",
    "qwen3",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt-neox",
    "phi",
    "mistral",
    "olmo2",
    "cohere",
)


def operators_of(plan, **fields):
    rng = np.random.default_rng(0)
    made = [
        Operator(
            boundary,
            "ghost",
            **(fields or {"delta": rng.normal(0, 0.3 / 8, (64, 64)).astype(np.float32)}),
            bias=rng.normal(0, 0.1, 64).astype(np.float32),
        )
        for boundary in plan.boundaries
    ]
    return OperatorSet("ghost", tuple(made), plan)


def deployed(name, folder, spans=TWO, **fields):
    model = tiny(name)
    plan = PrunePlan.from_spans(6, spans)
    operators = operators_of(plan, **fields)
    patched = models.insert_operators(models.drop_blocks(model, plan), operators)
    write_model(patched, None, operators, folder)
    return patched


def load(folder, **options):
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, trust_remote_code=True, **options).eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_folder_is_the_model_with_and_without_cache(name, tmp_path):
    patched = deployed(name, tmp_path / "hf")
    loaded = load(tmp_path / "hf")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in loaded.modules())
    with torch.no_grad():
        expected = patched(TOKENS).logits
        assert torch.equal(loaded(TOKENS).logits, expected)
        how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        found = [loaded.generate(TOKENS, use_cache=cached, **how) for cached in (True, False)]
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], patched.generate(TOKENS, **how))
    body = transformers.AutoModel.from_pretrained(tmp_path / "hf", trust_remote_code=True).eval()
    with torch.no_grad():
        own = getattr(loaded, loaded.base_model_prefix)
        assert torch.equal(body(TOKENS).last_hidden_state, own(TOKENS).last_hidden_state)
    loaded.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "again")(TOKENS).logits, expected)
    with pytest.raises(Exception, match=r"hidden size|embed_dim|divisible|[Mm]ismatch|shape|negative power"):
        type(patched).from_pretrained(tmp_path / "again")  # the stock class, which would pass over the operators


@pytest.mark.parametrize("form", ["factors", "diagonal", "bias", "mid"])
def test_other_forms_and_sites(form, tmp_path):
    rng = np.random.default_rng(1)
    U, V, d = (rng.normal(0, 0.1, shape).astype(np.float32) for shape in ((64, 5), (5, 64), (64,)))
    fields = {"factors": {"factors": (U, V)}, "diagonal": {"diagonal": d}, "bias": {"delta": None}}
    fields["mid"] = {"delta": U @ V, "site": "mid"}
    patched = deployed("llama", tmp_path / "hf", **fields[form])
    with torch.no_grad():
        assert torch.allclose(load(tmp_path / "hf")(TOKENS).logits, patched(TOKENS).logits, atol=1e-6)


def test_an_offloaded_model_keeps_its_operators(tmp_path):
    patched = deployed("llama", tmp_path / "hf")
    blocks = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(3)}
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu", **blocks}
    loaded = load(tmp_path / "hf", device_map=places, offload_folder=str(tmp_path / "offload"))
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, patched(TOKENS).logits)


class Hub:
    """What is sent to the Hub, without one."""

    def __init__(self, monkeypatch):
        self.sent = {}
        api = "huggingface_hub.HfApi."
        monkeypatch.setattr(f"{api}create_repo", lambda *a, **k: RepoUrl("https://huggingface.co/me/cut"))
        monkeypatch.setattr(f"{api}create_commit", self.commit)
        card = SimpleNamespace(save=lambda path: None)
        monkeypatch.setattr("transformers.utils.hub.create_and_tag_model_card", lambda *a, **k: card)

    def commit(self, *args, operations, **kwargs):
        for operation in operations:
            with operation.as_file() as file:
                self.sent[operation.path_in_repo] = file.read()
        return SimpleNamespace(commit_url="", pr_url=None, oid="0")


def test_what_is_pushed_to_the_hub_is_the_model(tmp_path, monkeypatch):
    patched, hub = deployed("llama", tmp_path / "hf"), Hub(monkeypatch)
    load(tmp_path / "hf").push_to_hub("me/cut", token="hf_none")
    assert {"config.json", "model.safetensors", "modeling_ghost.py"} <= hub.sent.keys()
    (tmp_path / "pulled").mkdir()
    for name, content in hub.sent.items():
        (tmp_path / "pulled" / name).write_bytes(content)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "pulled")(TOKENS).logits, patched(TOKENS).logits)


def test_no_class_runs_it_without_its_operator(tmp_path):
    from safetensors.torch import load_file, save_file

    deployed("llama", tmp_path / "hf")
    with pytest.raises(Exception, match="hidden size"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=False)
    weights = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.1.ghost.linear.weight"
    for changed in ({name: tensors[name] * 1.5}, {}):
        save_file({k: v for k, v in tensors.items() if k != name} | changed, weights, {"format": "pt"})
        with pytest.raises(ValueError, match="is not the operator"):
            load(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["model_type"] == "ghost_llama" and config["auto_map"]["AutoModel"] == "modeling_ghost.GhostModel"
