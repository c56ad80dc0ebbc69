"""Mixtures of experts: the exported graph equals PyTorch and builds with the real TensorRT-RTX builder."""

from __future__ import annotations

import onnx
import pytest
import torch
import transformers

from ghostexport.execution import Execution
from ghostexport.exporters import export_model
from ghostexport.recipe import BuildSection
from ghostexport.runtimes import RUNTIMES
from ghostexport.verification import verify

OWN_EXPORTS = True

_COMMON = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_GROUPS = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
FAMILIES = {
    "Mixtral": {"intermediate_size": 48, "num_local_experts": 4},
    "Qwen3Moe": {"head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 4},
    "DeepseekV3": {"intermediate_size": 96, "moe_intermediate_size": 48} | _LATENT | _GROUPS,
    "GptOss": {"head_dim": 16, "intermediate_size": 48, "num_local_experts": 4, "sliding_window": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_equal_pytorch_and_build(family, tmp_path):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**_COMMON | FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    before = model.get_experts_implementation()
    graph = tmp_path / "dense.onnx"
    export_model(model, graph)
    # PyTorch computes with another implementation of the experts than the graph
    assert model.get_experts_implementation() == before and "batched_mm" not in before.values()
    nodes = onnx.load(graph, load_external_data=False).graph.node
    reduced = [a.s for n in nodes if n.op_type.startswith("Scatter") for a in n.attribute if a.name == "reduction"]
    assert set(reduced) <= {b"none"}
    assert verify(model, graph).worst_relative < 1e-5
    runtime = RUNTIMES["tensorrt-rtx"]
    if runtime.availability().build:
        settings = BuildSection(profiles="single", max_tokens=32, max_past=31)
        assert runtime.build(graph, tmp_path / "dense", "dense", settings, Execution()).plan_bytes > 0
