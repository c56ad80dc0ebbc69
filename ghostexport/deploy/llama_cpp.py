"""Target ``gguf``: llama.cpp, in 16 and in 8 bits.

Its rotary embedding turns neighbouring channels of a head, that of transformers channels half a head apart; where
llama.cpp kept its own way (architecture ``llama``), rows of q and k are put in its order. Without that the model loads,
writes fluently, and is wrong.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ghostexport.deploy.bundle import Bundle
from ghostexport.deploy.remote_code import patched
from ghostexport.deploy.selftest import Answer
from ghostexport.errors import RecipeError
from ghostexport.execution import Execution
from ghostexport.files import atomic_path

#: Type of the checkpoint -> llama.cpp's architecture, and whether it turns neighbouring channels.
ARCHITECTURES = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}
FILES = {"F16": "model.f16.gguf", "Q8_0": "model.q8_0.gguf"}


def refusal(bundle: Bundle) -> str | None:
    """Why the variant does not fit, or None."""
    if bundle.adds_nodes:
        return "llama.cpp's graphs have no place for an operator"
    kind, config = str(bundle.config.get("model_type")), bundle.config
    if kind not in ARCHITECTURES:
        return f"the order of q and k in {kind} is not known here, only in {', '.join(ARCHITECTURES)}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return "its rotary positions are scaled"
    if bundle.window is not None:
        return f"each token attends to {bundle.window} tokens, and in llama.cpp's {ARCHITECTURES[kind][0]} to all"
    if kind in ("llama", "mistral") and (config.get("attention_bias") or config.get("mlp_bias")):
        return "llama.cpp reads no biases of this architecture"
    return None if _pre(bundle) else "its tokenizer is no byte-level BPE with merges that llama.cpp has a name for"


def write(bundle: Bundle, output: Path, execution: Execution) -> None:
    """Writes :data:`FILES`; needs PyTorch, the base model and the ``gguf`` package.

    Raises:
        RecipeError: a weight has no place in the format, such as the bias of a fold.
    """
    import gguf

    model, _ = patched(bundle, execution)
    kind, turned = ARCHITECTURES[str(bundle.config["model_type"])]
    tensors = _tensors(model, kind, turned)
    for quantisation, name in FILES.items():
        with atomic_path(output / name) as temporary:
            writer = gguf.GGUFWriter(temporary, kind)
            _settings(writer, model.config, bundle, gguf.LlamaFileType[f"MOSTLY_{quantisation}"])
            _tokenizer(writer, bundle, output)
            for key, values in tensors.items():
                wanted = gguf.GGMLQuantizationType[quantisation] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
                writer.add_tensor(key, gguf.quantize(values, wanted), raw_dtype=wanted)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()


def _tensors(model: Any, kind: str, turned: bool) -> dict[str, NDArray[np.float32]]:
    import gguf

    config = model.config
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == kind)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors, seen = {}, set()
    for name, values in model.state_dict().items():
        if values.data_ptr() in seen:  # a tied head
            continue
        seen.add(values.data_ptr())
        place = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if place is None or (turned and name.endswith(".bias")):
            raise RecipeError(f"GGUF has no place for {name}.", "Deploy for transformers or genai.")
        array = values.float().cpu().numpy()
        own = next((count for part, count in heads.items() if f".{part}." in name), None)
        tensors[place] = _neighbouring(array, own) if turned and own else array
    return tensors


def _neighbouring(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows ``[heads * D, ...]`` whose halves of a head alternate."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows.shape))


def _settings(writer: Any, config: Any, bundle: Bundle, file_type: Any) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or vars(config)
    writer.add_name(f"{Path(str(bundle.recipe['model']['source'])).name} {bundle.variant}")
    if bundle.licence is not None:
        writer.add_license(bundle.licence)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float(rope.get("rope_theta") or 10000.0))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(file_type)


def _tokenizer(writer: Any, bundle: Bundle, folder: Path) -> None:
    import gguf

    codec, kinds = bundle.codec, gguf.TokenType
    vocabulary = {index: token for token, index in codec.tokenizer.get_vocab(with_added_tokens=True).items()}
    added = codec.tokenizer.get_added_tokens_decoder()
    size = int(bundle.config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre(bundle))
    writer.add_token_list([vocabulary.get(i, f"[PAD{i}]") for i in range(size)])
    special = [kinds.CONTROL if added[i].special else kinds.USER_DEFINED for i in sorted(added)]
    types = dict(zip(sorted(added), special, strict=True))
    writer.add_token_types([types.get(i, kinds.NORMAL if i in vocabulary else kinds.UNUSED) for i in range(size)])
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=size).add_to_gguf(writer)
    begins = codec.tokenizer.encode("a").ids != codec.tokenizer.encode("a", add_special_tokens=False).ids
    if "tokenizer.ggml.add_bos_token" not in writer.kv_data[0]:
        writer.add_add_bos_token(begins)
    if codec.template is not None and "tokenizer.chat_template" not in writer.kv_data[0]:
        writer.add_chat_template(codec.template)


def _pre(bundle: Bundle) -> str | None:
    """llama.cpp's name of how the tokenizer splits text before its merges."""
    found = json.loads(bundle.codec.tokenizer.to_str())
    if found["model"]["type"] != "BPE" or not found["model"]["merges"]:
        return None
    steps = found["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    kinds = [step.get("type") for step in steps]
    patterns = [str(step["pattern"]) for step in steps if step.get("type") == "Split"]
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"]:
        return "llama-bpe" if r"\p{N}{1,3}" in patterns[0].replace("\\\\", "\\") else "qwen2"
    return None


def run(folder: Path, prompts: Sequence[list[int]], count: int) -> list[Answer]:
    """See :data:`selftest.Runner`: llama.cpp on the CPU, which gives no logits."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(folder / FILES["F16"])
    parameters.n_ctx = max(map(len, prompts)) + count + 8
    parameters.n_parallel, parameters.n_gpu_layers, parameters.warmup = 1, 0, False
    server = xllamacpp.Server(parameters)
    return [(None, _completed(server.listening_address, ids, count)) for ids in prompts]


def _completed(address: str, ids: list[int], count: int) -> list[int]:
    """Greedy tokens from the server's own route: OpenAI's leaves out those that end within a character."""
    asked = {"prompt": ids, "n_predict": count, "temperature": 0, "top_k": 1, "cache_prompt": False}
    body = json.dumps(asked | {"return_tokens": True}).encode()
    request = urllib.request.Request(f"{address}/completion", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return [int(token) for token in json.load(answer)["tokens"]]
