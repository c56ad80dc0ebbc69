"""A checkpoint is loaded whole or refused: no weight is ever random, no block tensor left out unsaid."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ghostexport import models
from ghostexport.errors import ModelLayoutError, RecipeError, RunFolderError, RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.models.sources import hub_files
from ghostexport.operators import Operator, OperatorSet, WeightFold
from ghostexport.plan import PrunePlan
from tests.tiny import tiny


@pytest.fixture
def folder(tmp_path):
    tiny("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    return tmp_path


def configure(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def test_a_checkpoint_with_fewer_blocks_than_its_configuration_is_refused(folder):
    configure(folder, num_hidden_layers=6)
    with pytest.raises(ModelLayoutError, match=r"lacks tensors .*model\.layers\.4\.input_layernorm.* and 14 more"):
        models.load_model(folder, "float32")


def test_a_missing_tensor_is_refused_by_name(folder):
    rewrite(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelLayoutError, match=r"lacks tensors .*: lm_head\.weight\."):
        models.load_model(folder, "float32")


def test_a_tied_head_may_be_missing(tmp_path):
    model = tiny("llama-tied")
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = models.load_model(tmp_path, "float32")
    tokens = torch.tensor([[1, 5, 9]])
    torch.testing.assert_close(loaded.model(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_block_tensors_without_a_place_are_refused(folder, prefix):
    rewrite(folder, lambda t: t.update({f"{prefix}layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    with pytest.raises(ModelLayoutError, match=r"does not name: .*layers\.0\.self_attn\.q_proj\.bias"):
        models.load_model(folder, "float32")


def test_a_block_too_many_is_refused_unless_it_predicts_further_tokens(folder):
    configure(folder, num_hidden_layers=3)
    with pytest.raises(ModelLayoutError, match=r"does not name: model\.layers\.3\."):
        models.load_model(folder, "float32")
    configure(folder, num_nextn_predict_layers=1)
    said = []
    assert models.load_model(folder, "float32", Execution(say=said.append)).num_blocks == 3
    assert "9 tensors of the checkpoint are left out (multi-token prediction): model.layers.3." in said[0]


def test_other_tensors_without_a_place_are_said(folder):
    rewrite(folder, lambda tensors: tensors.update({"value_head.weight": torch.ones(3)}))
    said = []
    models.load_model(folder, "float32", Execution(say=said.append))
    assert said == ["1 tensors of the checkpoint are left out (no use here): value_head.weight"]


def test_shapes_that_differ_are_refused_with_both(folder):
    configure(folder, intermediate_size=80)
    with pytest.raises(ModelLayoutError, match=r"layers\.0\.mlp\.down_proj\.weight \[64, 96\] for \[64, 80\]"):
        models.load_model(folder, "float32")


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "gemma3"])
@pytest.mark.parametrize("form", ["delta", "factors", "mid", "fold", "scale"])
def test_a_saved_variant_comes_back_with_the_same_logits_or_transformers_refuses_it(name, form, tmp_path):
    loaded = models.from_memory(tiny(name))
    plan = PrunePlan.from_spans(6, [(2, 4)])
    rng = np.random.default_rng(0)
    C = loaded.hidden_size
    small = 0.1 * rng.standard_normal((C, C)).astype(np.float32)
    shape = models.right_multiply(models.find_projections(loaded.model, 1).mlp_output).shape
    fold = WeightFold(1, "mlp_output", rng.standard_normal(tuple(shape)).astype(np.float32))
    forms = {
        "delta": {"delta": small, "bias": small[0], "folds": (fold,)},
        "factors": {"factors": (small[:, :4], small[:4])},
        "mid": {"delta": small, "site": "mid"},
        "fold": {"folds": (fold,)},
        "scale": {"scale": 1.5},
    }
    operator = Operator(plan.boundaries[0], "test", **forms[form])
    patched = models.patch(loaded, plan, OperatorSet("test", (operator,), plan))
    models.save_model(patched, tmp_path / "saved")

    again = models.load_model(tmp_path / "saved", "float32", Execution(device="cpu"))
    ids = torch.arange(3, 23)[None]
    torch.testing.assert_close(again(ids).logits, patched(ids).logits, rtol=0, atol=0)
    assert torch.equal(again.generate(ids, max_new_tokens=4), patched.generate(ids, max_new_tokens=4))
    if form in ("fold", "scale"):  # an ordinary checkpoint
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        torch.testing.assert_close(plain(ids).logits, patched(ids).logits, rtol=0, atol=0)
        assert again.operators is None
    else:
        with pytest.raises(ValueError, match="ghostexport"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        models.save_model(again, tmp_path / "twice")  # what was loaded can be saved
        twice = models.load_model(tmp_path / "twice", "float32", Execution(device="cpu"))
        torch.testing.assert_close(twice(ids).logits, patched(ids).logits, rtol=0, atol=0)


def test_saving_never_replaces_a_folder_of_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="holds other files"):
        models.save_model(models.from_memory(tiny("llama")), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own-decoder"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_sources_own_code_runs_only_when_it_is_trusted(folder):
    expected = models.load_model(folder, "float32")
    (folder / "own.py").write_text(CODE)
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    configure(folder, model_type="own-decoder", architectures=["OwnForCausalLM"], auto_map=auto)
    with pytest.raises(ModelLayoutError, match="--trust-remote-code"):
        models.load_model(folder, "float32")
    own = models.load_model(folder, "float32", trust_remote_code=True)
    assert type(own.model).__name__ == "OwnForCausalLM"
    ids = torch.arange(3, 23)[None]
    torch.testing.assert_close(own(ids).logits, expected(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("names", "fetched"),
    [
        (["pytorch_model.bin", "training.h5"], {"pytorch_model.bin"}),
        (["model.safetensors", "pytorch_model.bin", "qwen.tiktoken"], {"model.safetensors", "qwen.tiktoken"}),
        (
            ["consolidated.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"],
            {"model-00001-of-00002.safetensors", "model.safetensors.index.json"},
        ),
        (["weights.safetensors", "onnx/model.onnx", "original/a.safetensors"], {"weights.safetensors"}),
        (["tokenization_x.py", "code/y.py", "flax_model.msgpack"], {"tokenization_x.py", "code/y.py"}),
    ],
)
def test_weights_are_fetched_once(names, fetched):
    assert set(hub_files(["config.json", *names])) == {"config.json", *fetched}


def test_an_adapter_beside_a_model_is_refused_with_the_way_to_merge_it(folder):
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "maker/base-7b"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    with pytest.raises(RecipeError, match=r"LORA adapter of maker/base-7b") as caught:
        models.load_model(folder, "float32")
    assert "merge_and_unload" in str(caught.value)


@pytest.fixture
def adapter(folder, tmp_path, monkeypatch):
    """A LoRA adapter of rank 4 of the tiny model, every matrix random, and ``scale B A`` by module."""
    peft = pytest.importorskip("peft")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"])
    wrapped = peft.get_peft_model(base, config)
    changes, generator = {}, torch.Generator().manual_seed(0)
    for name, module in wrapped.named_modules():
        if hasattr(module, "lora_B"):
            for part in (module.lora_A, module.lora_B):
                weight = part["default"].weight
                weight.data = torch.randn(weight.shape, generator=generator) * 0.1
            key = name.removeprefix("base_model.model.") + ".weight"
            changes[key] = 12 / 4 * module.lora_B["default"].weight @ module.lora_A["default"].weight
    wrapped.peft_config["default"].base_model_name_or_path = str(folder)
    wrapped.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", changes


def test_an_adapter_is_merged_into_its_base_once(folder, adapter):
    path, changes = adapter
    before, said = load_file(folder / "model.safetensors"), []
    merged = models.resolve_source(path, execution=Execution(say=said.append))
    assert len(changes) == 8 and "merging the LORA adapter" in said[0]
    after = models.load_model(merged, "float32").model.state_dict()
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight + changes[name] if name in changes else weight)
    del said[:]
    assert models.resolve_source(path, execution=Execution(say=said.append)) == merged and not said
    rewrite(folder, lambda tensors: tensors["model.norm.weight"].mul_(2))  # another base is another model
    assert models.resolve_source(path) != merged


def test_an_adapter_of_another_base_or_of_none_is_refused(folder, adapter, monkeypatch):
    path, _ = adapter
    config = path / "adapter_config.json"
    tiny("llama", num_hidden_layers=3).save_pretrained(path.parent / "shallow")

    def based_on(base):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": base}))

    based_on(str(path.parent / "shallow"))
    with pytest.raises(ModelLayoutError, match=r"do not belong together: .*layers\.3"):
        models.load_model(path, "float32")
    based_on("maker/base-7b")
    with pytest.raises(RecipeError, match="LORA adapter of maker/base-7b, which was not found") as caught:
        models.load_model(path, "float32")
    assert "base_model_name_or_path" in str(caught.value)
    based_on(None)
    with pytest.raises(RecipeError, match="names no base model"):
        models.load_model(path, "float32")
    based_on(str(folder))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeUnavailableError, match=r"pip install 'ghostexport\[peft\]'"):
        models.load_model(path, "float32")


def fp8(weight):
    """Blocks of 128 x 128 in float8, each with its scale, as DeepSeek publishes them."""
    blocks = weight.float().view(weight.shape[0] // 128, 128, weight.shape[1] // 128, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    return (blocks / scale[:, None, :, None]).view(weight.shape).to(torch.float8_e4m3fn), scale


def test_fp8_weights_become_ordinary_ones_that_can_be_saved(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
    tiny("llama", **sizes, num_key_value_heads=4).save_pretrained(tmp_path)
    expected = {}

    def quantise(tensors):
        for name in [name for name in tensors if "_proj" in name]:
            quantised, scale = fp8(tensors[name])
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            expected[name] = quantised.float() * wide
            tensors |= {name: quantised, f"{name}_scale_inv": scale}

    rewrite(tmp_path, quantise)
    configure(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    loaded = models.load_model(tmp_path, "float32")
    state = loaded.model.state_dict()
    for name, weight in expected.items():
        torch.testing.assert_close(state[name], weight)
    models.save_model(loaded, tmp_path / "plain")
    assert models.load_model(tmp_path / "plain", "float32").sha256 == loaded.sha256


def test_a_quantisation_that_cannot_be_undone_is_named(folder):
    configure(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelLayoutError, match="quantised as 'gptq'"):
        models.load_model(folder, "float32")
