"""What a deployed folder does on its runtime beside the self-test; runs in the runtime's environment, without torch.

python benchmarks/runtime_checks.py FOLDER       # prints JSON; `runtimes.py` asks it, tests call the functions
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ghostexport.deploy import TARGETS
from ghostexport.deploy.openvino import EXACT
from ghostexport.deploy.selftest import GREEDY, TEXTS, Answer, check, read_selftest
from ghostexport.errors import GhostExportError
from ghostexport.serving.codec import Codec

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


def genai_streams(folder: Path) -> None:
    """Text goes in, text comes out piece by piece: that of the reference's tokens.

    Bytes that are no text, which random weights write, are dropped by its stream and replaced by others.
    """
    import onnxruntime_genai as og

    model, tokens, pieces = og.Model(str(folder)), [], []
    tokenizer = og.Tokenizer(model)
    stream = tokenizer.create_stream()
    ids = list(map(int, tokenizer.encode(TEXTS[0])))
    generator = _genai_generator(og, model, [ids])
    while not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
        pieces.append(stream.decode(tokens[-1]))
    reference = _prompts(folder)[0]
    _equal(ids, reference["ids"])
    _equal(_until_end(folder, tokens), _until_end(folder, reference["greedy"]))
    text = Codec(folder).decode(_until_end(folder, tokens))
    if "\ufffd" not in text:
        _equal("".join(pieces), text)


def genai_chat(folder: Path) -> None:
    """Its own reading of the chat template is ours."""
    import onnxruntime_genai as og

    tokenizer = og.Tokenizer(og.Model(str(folder)))
    own = tokenizer.apply_chat_template(messages=json.dumps(CHAT), add_generation_prompt=True)
    _equal(own, Codec(folder).render(CHAT))
    _equal(list(map(int, tokenizer.encode(own))), Codec(folder).encode_chat(CHAT))


def genai_batch(folder: Path) -> None:
    """Two prompts of unequal length at once, padded as it pads (on the right), are what each is alone."""
    import onnxruntime_genai as og

    model, asked = og.Model(str(folder)), (0, 2)
    tokenizer, prompts = og.Tokenizer(model), [_prompts(folder)[i] for i in asked]
    padded = tokenizer.encode_batch([TEXTS[i] for i in asked]).as_numpy()
    assert padded.shape[0] == 2 and len(prompts[0]["ids"]) != len(prompts[1]["ids"])
    for row, (logits, tokens), entry in zip(padded, _genai_answers(og, model, padded), prompts, strict=True):
        _equal(row[: len(entry["ids"])].tolist(), entry["ids"])
        own, alone = _genai_answers(og, model, [entry["ids"]])[0]
        np.testing.assert_allclose(logits, own, rtol=0, atol=1e-4 * float(own.std()))
        _equal(_until_end(folder, tokens), _until_end(folder, alone))
        _equal(_until_end(folder, alone), _until_end(folder, entry["greedy"]))


def _genai_answers(og: Any, model: Any, rows: Sequence[Sequence[int]]) -> list[Answer]:
    generator = _genai_generator(og, model, rows)
    first = np.asarray(generator.get_logits())[:, -1].copy()
    while not generator.is_done():
        generator.generate_next_token()
    return [(first[i], list(map(int, generator.get_sequence(i)[len(rows[0]) :]))) for i in range(len(rows))]


def _genai_generator(og: Any, model: Any, rows: Sequence[Sequence[int]]) -> Any:
    """Of rows of one length."""
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=len(rows[0]) + GREEDY, batch_size=len(rows), do_sample=False)
    generator = og.Generator(model, parameters)
    generator.append_tokens(np.array(rows, np.int32))
    return generator


def openvino_pipeline(folder: Path) -> None:
    """OpenVINO GenAI's own loop has the reference's tokens."""
    import openvino as ov
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(folder, "CPU", **EXACT)
    for entry in _prompts(folder):
        ids = np.array([entry["ids"]], np.int64)
        asked = openvino_genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        found = pipeline.generate(asked, _openvino_settings(openvino_genai)).tokens[0]
        _equal(_until_end(folder, found), _until_end(folder, entry["greedy"]))


def openvino_streams(folder: Path) -> None:
    """Text goes in, text comes out piece by piece, also through the chat template."""
    import openvino_genai

    pipeline, pieces = openvino_genai.LLMPipeline(folder, "CPU", **EXACT), []
    pipeline.generate(TEXTS[0], _openvino_settings(openvino_genai), pieces.append)
    _equal("".join(pieces), Codec(folder).decode(_until_end(folder, _prompts(folder)[0]["greedy"])))
    own = pipeline.get_tokenizer().apply_chat_template(CHAT, add_generation_prompt=True)
    _equal(own, Codec(folder).render(CHAT))


def _openvino_settings(openvino_genai: Any) -> Any:
    return openvino_genai.GenerationConfig(max_new_tokens=GREEDY, do_sample=False, apply_chat_template=False)


CHECKS: dict[str, dict[str, Callable[[Path], None]]] = {
    "genai": {"streams text": genai_streams, "chat template": genai_chat, "two prompts at once": genai_batch},
    "openvino": {"LLMPipeline": openvino_pipeline, "streams text, chat template": openvino_streams},
}


def examine(folder: Path) -> dict[str, Any]:
    """Self-test and checks of a folder, or what kept it from running."""
    name, answers = read_selftest(folder)["target"], []
    target, started = TARGETS[name], time.monotonic()

    def run(*asked: Any) -> list[Answer]:
        assert target.run is not None
        answers.extend(target.run(*asked))
        return answers

    try:
        outcome = check(folder, run, target.dtype)
    except GhostExportError as error:
        return {"verdict": "failed", "error": str(error)}
    both = zip(answers, _prompts(folder), strict=True)
    same = [_until_end(folder, tokens) == _until_end(folder, entry["greedy"]) for (_, tokens), entry in both]
    found = {"verdict": "passed", "logits": outcome.logits, "tokens": outcome.tokens, "of": outcome.total}
    found |= {"prompts_identical": sum(same), "seconds": round(time.monotonic() - started, 1)}
    return found | {"also": {what: _tried(test, folder) for what, test in CHECKS.get(name, {}).items()}}


def versions(requirements: Sequence[str]) -> dict[str, str]:
    """Installed versions of what a ``pip install`` line names, and of Python."""
    names = [re.split(r"[\[=<>]", one)[0] for one in requirements]
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def _tried(test: Callable[[Path], None], folder: Path) -> str:
    try:
        test(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "equal"


def _prompts(folder: Path) -> list[dict[str, Any]]:
    return list(read_selftest(folder)["prompts"])


def _until_end(folder: Path, tokens: Sequence[int]) -> list[int]:
    """Up to an end token, where runtimes stop or go on, as they like."""
    ends = set(read_selftest(folder)["ends"])
    return list(tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))])


def _equal(found: object, expected: object) -> None:
    if found != expected:
        raise AssertionError(f"{found!r} instead of {expected!r}")


if __name__ == "__main__":
    report = examine(Path(sys.argv[1])) | {"versions": versions(sys.argv[2:])}
    print("\n" + json.dumps(report))
