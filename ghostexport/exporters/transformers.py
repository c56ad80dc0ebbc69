"""Export through transformers' own ``OnnxExporter`` (transformers >= 5.23, torch.export underneath)."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ghostexport.errors import ExportError
from ghostexport.execution import Execution
from ghostexport.exporters.graph_file import OnnxGraphFile, canonicalise, check_interface, write_graph
from ghostexport.exporters.simplify import sharpen_scales, simplify, widen_bfloat16
from ghostexport.models.silence import silenced
from ghostexport.surgery.embedding import EMBEDDINGS, lookups

# Sample lengths: all different and above 1, so that no axis is specialised or confused with another. A model with
# states may compute in chunks of tokens: there must be several of them, too.
BATCH, TOKENS, PAST = 2, 4, 3

_REMEDY = "Try another --opset, or --exporter optimum in an environment with 'ghostexport[optimum]'."
_NOISY_LOGGERS = ("torch.onnx", "torch.export", "torch.fx", "transformers", "onnxscript", "onnx_ir")


def export(model: Any, output: Path, opset: int, execution: Execution) -> OnnxGraphFile:
    """See :func:`ghostexport.exporters.export_model`."""
    from ghostexport.models import find_blocks
    from ghostexport.models.running import cache_argument, cache_tensors

    blocks = find_blocks(model)
    num_blocks = len(blocks)
    total = 2 * num_blocks + 1  # tracing a block takes as long as translating it
    execution.progress("export", 0, total)
    rope = getattr(model.config.get_text_config(), "rope_parameters", None)
    if "dynamic" in str(rope):
        trained = model.config.get_text_config().max_position_embeddings
        execution.say(f"export: dynamic rotary frequencies are those of up to {trained} positions, the trained length")
    with _ready_for_export(model), silenced(*_NOISY_LOGGERS):
        try:
            inputs = sample_inputs(model)
            with _counting(blocks, lambda done: execution.progress("export", min(done, num_blocks), total)):
                exported = simplify(_trace(model, inputs, opset))
        except ExportError:
            raise
        except Exception as error:  # whatever torch.export, torch.onnx or transformers raises
            raise ExportError(
                f"transformers' ONNX exporter failed on {type(model).__name__} at opset {opset}: {error}", _REMEDY
            ) from error
    if next(model.parameters()).dtype.itemsize == 4:
        widen_bfloat16(exported)
    sharpen_scales(exported, {m.scaling for m in model.modules() if isinstance(getattr(m, "scaling", None), float)})
    _name_cache(exported.graph)
    _name_embedding(exported.graph, model)
    canonicalise(exported)
    kept = cache_tensors(inputs[cache_argument(model)])
    check_interface(exported.graph, {block: len(tensors) for block, tensors in enumerate(kept)})
    if exported.graph.opset_imports.get("") != opset:
        raise ExportError(
            f"The exporter made opset {exported.graph.opset_imports.get('')}, not {opset} as asked.", _REMEDY
        )
    execution.progress("export", total - 1, total)
    hidden_size = int(model.config.get_text_config().hidden_size)
    written = write_graph(exported, output, producer="transformers", hidden_size=hidden_size, num_blocks=num_blocks)
    execution.progress("export", total, total)
    return written


def _trace(model: Any, inputs: dict[str, Any], opset: int) -> ir.Model:
    import torch

    hugging_face = importlib.import_module("transformers.exporters")
    config = hugging_face.OnnxConfig(
        dynamic=True, dynamic_shapes=_dynamic_shapes(inputs), opset_version=opset, optimize=False
    )
    hook = model.register_forward_pre_hook(_link_lengths, with_kwargs=True)
    try:
        with torch.no_grad(), _complex_indexing():
            program: ir.Model = hugging_face.OnnxExporter().export(model, inputs, config=config).program
            return program
    finally:
        hook.remove()


def _complex_indexing() -> Any:
    """A mode that indexes complex rotary factors (Llama 4) by their parts: ONNX has no form of the whole."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Parts(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.__getitem__ and args[0].is_complex():
                return torch.complex(args[0].real[args[1]], args[0].imag[args[1]])
            return func(*args, **(kwargs or {}))

    return Parts()


def sample_inputs(model: Any) -> dict[str, Any]:
    """Arguments of a step after 3 cached tokens: ids and positions ``[2, 4]`` (or more), mask ``[2, 7]``."""
    import torch

    from ghostexport.exporters import require_exportable
    from ghostexport.models.running import MANY, accepts, cache_argument, keeps_states, step, whole_cache

    vocab_size = int(model.config.get_text_config().vocab_size)
    require_exportable(model, "transformers")
    _, cache = step(model, torch.arange(BATCH * PAST).reshape(BATCH, -1) % vocab_size, whole_cache(model))
    tokens = MANY if keeps_states(cache) else TOKENS
    inputs: dict[str, Any] = {
        "input_ids": torch.arange(BATCH * tokens).reshape(BATCH, -1) % vocab_size,
        "attention_mask": torch.ones(BATCH, PAST + tokens, dtype=torch.int64),
        "position_ids": torch.arange(PAST, PAST + tokens).repeat(BATCH, 1),
        cache_argument(model): cache,
    }
    return {name: value for name, value in inputs.items() if accepts(model, name)}


def _dynamic_shapes(inputs: dict[str, Any]) -> dict[str, Any]:
    """Only batch and lengths vary; marking heads and head size too would have the tracer reason about them."""
    import torch
    from torch.export import Dim

    from ghostexport.models.running import cache_tensors

    def varying(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {0: Dim.AUTO, 1: Dim.AUTO}
        names = [name for tensors in cache_tensors(value) for name in tensors]
        return [{0: Dim.AUTO, 2: Dim.AUTO} if name in ("keys", "values") else {0: Dim.AUTO} for name in names]

    return {name: varying(value) for name, value in inputs.items()}


def _link_lengths(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tells the tracer which axes are equal: one symbol per length instead of two per block, which is also faster."""
    import torch

    from ghostexport.models.running import cache_argument, cache_tensors

    batch, tokens = kwargs["input_ids"].shape
    kept = [item for own in cache_tensors(kwargs[cache_argument(module)]) for item in own.items()]
    growing = [tensor for name, tensor in kept if name in ("keys", "values")]
    for _, tensor in kept:
        torch._check(tensor.shape[0] == batch)
    for tensor in growing:
        torch._check(tensor.shape[2] == growing[0].shape[2])
    expected = {"position_ids": tokens} | ({"attention_mask": growing[0].shape[2] + tokens} if growing else {})
    for name in expected.keys() & kwargs.keys():
        torch._check(kwargs[name].shape[0] == batch)
        torch._check(kwargs[name].shape[1] == expected[name])


def _name_cache(graph: ir.Graph) -> None:
    """One spelling for every transformers release: ``past_key_values.layers.N.*`` in, ``cache.layers.N.*`` out."""
    for values, prefix in ((graph.inputs, "past_key_values.layers."), (graph.outputs, "cache.layers.")):
        for value in values:
            head, found, tail = (value.name or "").partition(".layers.")
            if found and head.rsplit(".", 1)[-1] in ("cache", "past_key_values"):
                value.name = prefix + tail


def _name_embedding(graph: ir.Graph, model: Any) -> None:
    """Where the embedding module scales what it looks up (Gemma 3), the scaled value is called ``inputs_embeds``."""
    if getattr(model.get_input_embeddings(), "embed_scale", None) is None:
        return
    ids = next(value for value in graph.inputs if value.name == "input_ids")
    for lookup in lookups(ids):
        for scaling in [use.node for use in lookup.outputs[0].uses() if use.node.op_type == "Mul"]:
            scaling.outputs[0].name = EMBEDDINGS


@contextlib.contextmanager
def _counting(blocks: Any, report: Callable[[int], None]) -> Iterator[None]:
    """Calls ``report`` with the number of blocks entered so far."""
    entered = itertools.count(1)
    hooks = [block.register_forward_pre_hook(lambda *_: report(next(entered))) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _ready_for_export(model: Any) -> Iterator[None]:
    """On the CPU, in evaluation mode, dynamic rotary frequencies at rest; put back afterwards.

    Experts compute as ``batched_mm``: every token gathers the weights of its own experts. transformers' ``grouped_mm``
    becomes a ScatterElements with a reduction, which TensorRT refuses, and multiplies every token by every expert.
    """
    device, training = next(model.parameters()).device, model.training
    model.to("cpu").eval()
    growing = [m for m in model.modules() if "dynamic" in str(getattr(m, "rope_type", ""))]
    types = [module.rope_type for module in growing]
    for module in growing:  # its frequencies change only past the trained length: the graph keeps the trained ones
        kept = module.rope_type
        module.rope_type = dict.fromkeys(kept, "default") if isinstance(kept, dict) else "default"
    routed = getattr(model, "_can_set_experts_implementation", bool)()
    experts = model.get_experts_implementation() if routed else None
    if routed:
        model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        if routed:
            model.set_experts_implementation(experts)
        for module, kept in zip(growing, types, strict=True):
            module.rope_type = kept
        model.to(device).train(training)
