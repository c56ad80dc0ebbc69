"""Generating, chatting and serving from a run folder, against PyTorch, transformers and the real OpenAI client."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import numpy as np
import pytest
import torch
import transformers

from ghostexport import models
from ghostexport.errors import RecipeError, RunFolderError
from ghostexport.execution import Execution
from ghostexport.serving.codec import Codec
from ghostexport.serving.generation import Sampling, filter_logits
from ghostexport.serving.speaker import Request, open_speaker
from tests.integration.conftest import TEMPLATE

PROMPTS = ("Block number 7", "the river", "A", "stones and trees", "north " * 30)


@pytest.fixture(scope="module")
def run(built_run):
    return built_run


@pytest.fixture(scope="module")
def speaker(run):
    return open_speaker(run.path, "ghost", None, Execution(device="cpu"))


def reference(run, variant="ghost"):
    dense = models.load_model(json.loads(json.dumps(run.read().recipe["model"]["source"])), "float32", Execution())
    return models.patch(dense, run.read_plan(), run.read_operators(variant))


def greedy(loaded, ids, count):
    out = loaded.model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, len(ids) :].tolist()


def test_greedy_tokens_are_pytorchs(run, speaker):
    loaded = reference(run)
    for prompt in PROMPTS:
        answer = speaker.continue_text(prompt, Request(24))
        text = answer.text()
        ids = loaded.tokenizer(prompt)["input_ids"]
        assert answer.ids == greedy(loaded, ids, 24) and answer.prompt_tokens == len(ids)
        assert text == loaded.tokenizer.decode(answer.ids, skip_special_tokens=True)
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}]
    ids = loaded.tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, add_generation_prompt=True)
    ids = ids if isinstance(ids, list) else ids["input_ids"]
    answer = speaker.reply(messages, Request(24))
    answer.text()
    assert answer.ids == greedy(loaded, ids, 24)


def test_description_of_the_model_travels_with_the_run(run):
    assert (run.model_path / "LICENSE").read_text() == "Do what you like."
    codec = Codec(run.model_path)
    assert codec.template == TEMPLATE and codec.positions and codec.ends == {2}


def test_filters_are_those_of_transformers():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3, 50)).astype(np.float32)
    ids = rng.integers(0, 50, (3, 7))
    ours = Sampling(temperature=0.7, top_k=12, top_p=0.8, repetition_penalty=1.3)
    seen = np.zeros((3, 50), bool)
    np.put_along_axis(seen, ids, True, axis=1)
    processors = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(1.3),
            transformers.TemperatureLogitsWarper(0.7),
            transformers.TopKLogitsWarper(12),
            transformers.TopPLogitsWarper(0.8),
        ]
    )
    expected = processors(torch.from_numpy(ids), torch.from_numpy(logits)).numpy()
    found = filter_logits(logits, ours, seen)
    assert np.array_equal(np.isinf(found), np.isinf(expected))
    assert np.allclose(found[np.isfinite(found)], expected[np.isfinite(expected)], rtol=1e-5)


def test_stop_strings_limits_and_refusals(run, speaker):
    whole = speaker.continue_text("the river", Request(24)).text()
    stop = whole[5:8]
    answer = speaker.continue_text("the river", Request(24, (stop,)))
    assert answer.text() == whole[: whole.find(stop)] and answer.finish_reason == "stop"
    answer = speaker.continue_text("the river", Request(3))
    answer.text()
    assert answer.finish_reason == "length" and len(answer.ids) == 3
    with pytest.raises(RecipeError, match="has room for"):
        speaker.continue_text("x" * 5000, Request(3))
    with pytest.raises(RecipeError, match="Did you mean 'ghost'"):
        open_speaker(run.path, "gost", None, Execution(device="cpu"))
    with pytest.raises(RunFolderError, match="no tensorrt engine"):
        open_speaker(run.path, "ghost", "tensorrt", Execution(device="cpu"))


def test_commands(run, cli, monkeypatch):
    code, out, err = cli("generate", run.path, "the river", "--max-new-tokens", "8", "--variant", "ghost.int8")
    assert code == 0, err
    assert out.strip()
    lines = iter(["hello", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    code, out, err = cli("chat", run.path, "--side-by-side", "dense", "ghost", "--max-new-tokens", "4")
    assert code == 0 and "dense" in out and "ghost" in out, err
    code, _, err = cli("serve", run.path, "--host", "0.0.0.0")
    assert code == 2 and "--allow-remote" in err


@pytest.fixture
def client(speaker):
    pytest.importorskip("fastapi")
    openai, uvicorn = pytest.importorskip("openai"), pytest.importorskip("uvicorn")
    from ghostexport.serving.server import make_app

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(make_app(speaker, queue=2), port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    server.should_exit = True
    thread.join()


def test_the_openai_client(client, speaker):
    import openai

    assert [model.id for model in client.models.list()] == ["ghost"]
    messages = [{"role": "user", "content": "hello"}]
    expected = speaker.reply(messages, Request(6)).text()
    how = {"model": "ghost", "messages": messages, "max_tokens": 6, "temperature": 0}
    done = client.chat.completions.create(**how)
    assert done.choices[0].message.content == expected and done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 6
    streamed = list(client.chat.completions.create(stream=True, **how))
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == expected
    assert streamed[-1].choices[0].finish_reason == "length"
    text = client.completions.create(model="ghost", prompt="the river", max_tokens=5, temperature=0)
    assert text.choices[0].text == speaker.continue_text("the river", Request(5)).text()
    twice = [
        client.completions.create(model="ghost", prompt="A", max_tokens=9, temperature=1.5, seed=3).choices[0].text
        for _ in range(2)
    ]
    assert twice[0] == twice[1]
    with pytest.raises(openai.NotFoundError, match="answers as 'ghost'"):
        client.chat.completions.create(**how | {"model": "gpt"})
    with pytest.raises(openai.BadRequestError, match="temperature = -1"):
        client.chat.completions.create(**how | {"temperature": -1})


def test_a_full_queue_turns_requests_away(client, speaker, monkeypatch):
    import openai

    released, forward = threading.Event(), speaker._session.forward
    monkeypatch.setattr(speaker._session, "forward", lambda *given: (released.wait(60), forward(*given))[1])
    prompt = {"model": "ghost", "prompt": "A", "max_tokens": 1}

    def ask():
        with contextlib.suppress(openai.RateLimitError):  # where the question below was in the queue before
            client.completions.create(**prompt)

    waiting = [threading.Thread(target=ask) for _ in range(2)]
    for thread in waiting:
        thread.start()
    try:
        for _ in range(200):
            try:
                client.with_options(timeout=0.3).completions.create(**prompt)
            except openai.RateLimitError as full:
                assert "2 requests are waiting" in str(full)
                break
            except openai.APITimeoutError:
                continue  # it was in the queue before one of the two
        else:
            pytest.fail("the queue was never full")
    finally:
        released.set()
        for thread in waiting:
            thread.join()
    assert client.completions.create(**prompt).usage.completion_tokens == 1


def test_a_client_that_goes_away_before_the_first_event_leaves_the_queue(speaker):
    pytest.importorskip("fastapi")
    from ghostexport.serving.server import make_app

    app = make_app(speaker, queue=1)
    body = json.dumps({"prompt": "A", "max_tokens": 1, "stream": True}).encode()
    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "query_string": b"", "http_version": "1.1",
        "asgi": {"spec_version": "2.4"}, "scheme": "http",
    }  # fmt: skip
    sent = []

    def request(gone):
        async def receive():
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message):
            if gone:
                raise OSError("connection lost")
            sent.append(message)

        try:
            asyncio.run(app(scope, receive, send))
        except Exception:
            assert gone

    request(gone=True)
    request(gone=False)
    assert sent[0]["status"] == 200 and b"[DONE]" in b"".join(m.get("body", b"") for m in sent)
