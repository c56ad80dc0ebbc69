"""Target ``openvino``: the verified graph with its cache inside (stateful), as OpenVINO and OpenVINO GenAI run it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ghostexport.deploy.bundle import Bundle
from ghostexport.deploy.selftest import Answer
from ghostexport.errors import RuntimeUnavailableError
from ghostexport.execution import Execution

MODEL = "openvino_model.xml"
INSTALL = "pip install openvino==2026.4.1 openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0"
#: Compute as the graph says: by default it picks what is fast.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


def refusal(bundle: Bundle) -> str | None:
    """Why the variant does not fit, or None."""
    dims = {t.name: t.dims for t in bundle.interface.inputs}
    past = dims[bundle.interface.kv[0][0]]
    return None if len(past) == 4 and past[2] == "past" else f"its cache is laid out as {list(past)}"


def write(bundle: Bundle, output: Path, execution: Execution) -> None:
    """Writes the stateful model and, where openvino-tokenizers and transformers are installed, both tokenizer models.

    Raises:
        RuntimeUnavailableError: OpenVINO is not installed.
    """
    try:
        import openvino as ov
    except ImportError as error:
        raise RuntimeUnavailableError(f"OpenVINO converts the graph itself: {error}.", INSTALL) from None
    model = ov.Core().read_model(bundle.graph)
    _make_stateful(ov, model, bundle)
    bundle.copy_description(output, config=True)
    ov.save_model(model, output / MODEL, compress_to_fp16=False)
    try:
        from openvino_tokenizers import convert_tokenizer
        from transformers import AutoTokenizer
    except ImportError as error:
        execution.say(f"openvino: no tokenizer models ({error}); LLMPipeline needs them: {INSTALL} transformers")
        return
    both = convert_tokenizer(AutoTokenizer.from_pretrained(output), with_detokenizer=True)
    for name, part in zip(("tokenizer", "detokenizer"), both, strict=True):
        ov.save_model(part, output / f"openvino_{name}.xml")


def _make_stateful(ov: Any, model: Any, bundle: Bundle) -> None:
    """Past inputs and present outputs become variables, reordered by ``beam_idx`` and empty at first."""
    from openvino import opset13 as ops
    from openvino._offline_transformations import apply_make_stateful_transformation

    interface = bundle.interface
    inputs = {name: port for port in model.inputs for name in port.get_names()}
    outputs = {name: port for port in model.outputs for name in port.get_names()}
    pairs = [(inputs[past], outputs[present]) for past, present in interface.kv]
    named = {}
    beams = ops.parameter(ov.PartialShape([-1]), ov.Type.i32, name="beam_idx")
    beams.output(0).get_tensor().add_names({"beam_idx"})
    axis = ops.constant(np.int64(0))
    for index, (past, present) in enumerate(pairs):
        kind = ("key", "value")[index % 2]
        names = f"past_key_values.{index // 2}.{kind}", f"present.{index // 2}.{kind}"
        past.get_tensor().set_names({names[0]})
        present.get_tensor().set_names({names[1]})
        named[names[0]] = names[1]
        readers = past.get_target_inputs()
        gathered = ops.gather(past, beams, axis)
        for reader in readers:
            reader.replace_source_output(gathered.output(0))
    model.add_parameters([beams])
    model.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(model, named)
    ids = next(port for port in model.inputs if "input_ids" in port.get_names())
    batch = ops.gather(ops.shape_of(ids, output_type="i64"), ops.constant(np.array([0], np.int64)), axis)
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            shape = node.get_output_partial_shape(0)
            fixed = [shape[1].get_length(), 0, shape[3].get_length()]
            sizes = [batch, ops.constant(np.array(fixed, np.int64))]
            zero = ops.constant(np.zeros((), node.get_output_element_type(0).to_dtype()))
            node.set_arguments([ops.broadcast(zero, ops.concat(sizes, 0))])
    model.validate_nodes_and_infer_types()


def run(folder: Path, prompts: Sequence[list[int]], count: int) -> list[Answer]:
    """See :data:`selftest.Runner`: on the CPU, in the graph's precision."""
    import openvino as ov

    compiled = ov.Core().compile_model(folder / MODEL, "CPU", EXACT)
    request = compiled.create_infer_request()
    known = {name for port in compiled.inputs for name in port.get_names()}
    answers: list[Answer] = []
    for ids in prompts:
        request.reset_state()
        step, past, first, tokens = list(ids), 0, None, []
        for _ in range(count):
            total = past + len(step)
            feeds = {
                "input_ids": np.array([step], np.int64),
                "attention_mask": np.ones((1, total), np.int64),
                "position_ids": np.arange(past, total, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
            request.infer({name: value for name, value in feeds.items() if name in known})
            logits = np.array(request.get_tensor("logits").data)[0, -1]
            first = logits if first is None else first
            tokens.append(int(logits.argmax()))
            step, past = [tokens[-1]], total
        answers.append((first, tokens))
    return answers
