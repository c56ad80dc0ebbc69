"""Vision-language checkpoints: the language tower is cut, and the checkpoint is written back whole."""

import numpy as np
import pytest
import torch
import transformers

from ghostexport import models
from ghostexport.exporters import export_model
from ghostexport.plan import PrunePlan
from ghostexport.surgery.embedding import split_embedding
from tests.decoding import session

TEXT = {
    "vocab_size": 264, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
QWEN_VISION = {
    "depth": 4, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64, "patch_size": 14,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
}  # fmt: skip
TOKENS = torch.arange(1, 25).view(2, 12)


def built(kind):
    if kind == "Gemma3":
        text = transformers.Gemma3TextConfig(**TEXT, sliding_window=16)
        config = transformers.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    elif kind == "Qwen3VL":
        text = transformers.Qwen3VLTextConfig(**TEXT, rope_parameters=ROPE)
        config = transformers.Qwen3VLConfig(text_config=text.to_dict(), vision_config=QWEN_VISION)
    elif kind == "Llava":
        vision = transformers.CLIPVisionConfig(**VISION)
        config = transformers.LlavaConfig(text_config=transformers.LlamaConfig(**TEXT), vision_config=vision)
    else:
        text = TEXT | {"model_type": "llama"}
        config = transformers.SmolVLMConfig(text_config=text, vision_config=VISION, scale_factor=2)
    return transformers.AutoModelForImageTextToText.from_config(config).eval()


@pytest.mark.parametrize("kind", ["Gemma3", "Qwen3VL", "Llava", "SmolVLM"])
def test_the_language_tower_is_cut_and_everything_else_kept(tmp_path, kind):
    model = built(kind)
    model.save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / "preprocessor_config.json").write_text('{"patch_size": 14}')
    dense = models.load_model(tmp_path / "dense", "float32")
    assert dense.num_blocks == 4 and dense.blocks[0] in set(dense.model.get_decoder().modules())
    pruned = models.patch(dense, PrunePlan.from_spans(4, [[1, 3]]))
    models.save_model(pruned, tmp_path / "pruned")
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "pruned").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=TOKENS).logits, pruned.model(input_ids=TOKENS).logits)
    decoder = {f"{n}." for n, module in model.named_modules() if module is models.find_blocks(model)}
    before, after = model.state_dict(), again.state_dict()
    kept = {name for name in before if not name.startswith(tuple(decoder))}
    assert any("vision" in name or "visual" in name for name in kept)
    for name in kept:
        assert torch.equal(before[name], after[name]), name
    assert (tmp_path / "pruned" / "preprocessor_config.json").read_text() == '{"patch_size": 14}'


def test_an_operator_of_the_tower_comes_back_with_the_checkpoint(tmp_path):
    from ghostexport.operators import Operator, OperatorSet

    built("Llava").save_pretrained(tmp_path / "dense")
    dense = models.load_model(tmp_path / "dense", "float32")
    plan = PrunePlan.from_spans(4, [[1, 2]])
    delta = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).numpy() / 64
    patched = models.patch(dense, plan, OperatorSet("x", (Operator(plan.boundaries[0], "x", delta=delta),), plan))
    models.save_model(patched, tmp_path / "saved")
    again = models.load_model(tmp_path / "saved", "float32")
    with torch.no_grad():
        torch.testing.assert_close(again.model(input_ids=TOKENS).logits, patched.model(input_ids=TOKENS).logits)


@pytest.mark.parametrize("kind", ["Gemma3", "Qwen3VL"])
def test_the_graph_of_the_tower_takes_vectors_that_no_token_has(tmp_path, kind):
    """Images enter a decoder as vectors in place of placeholders' embeddings."""
    model = built(kind)
    export_model(model, tmp_path / "dense.onnx")
    split_embedding(tmp_path / "dense.onnx", tmp_path / "decoder.onnx", tmp_path / "embedding.onnx")
    (vectors,) = session(tmp_path / "embedding.onnx").run(None, {"input_ids": TOKENS.numpy()})
    np.testing.assert_array_equal(vectors, model.get_input_embeddings()(TOKENS).detach().numpy())
    vectors[:, 3:7] = np.random.default_rng(0).normal(0, vectors.std(), vectors[:, 3:7].shape)
    decoder = session(tmp_path / "decoder.onnx")
    empty = {i.name: np.zeros([2, *i.shape[1:2], 0, i.shape[3]], np.float32) for i in decoder.get_inputs()[3:]}
    positions = {"attention_mask": np.ones((2, 12), np.int64), "position_ids": np.tile(np.arange(12), (2, 1))}
    logits = decoder.run(["logits"], {"inputs_embeds": vectors, **positions, **empty})[0]
    with torch.no_grad():
        expected = model(inputs_embeds=torch.from_numpy(vectors)).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=5e-5 * expected.std())
