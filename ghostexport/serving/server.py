"""An OpenAI-compatible server of one loaded variant: chat completions, completions, models; streamed or whole.

One answer is computed at a time; further requests wait in a queue whose length is limited, so that a client learns at
once when it is full.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ghostexport.errors import GhostExportError, RecipeError, RuntimeUnavailableError
from ghostexport.serving.generation import Sampling
from ghostexport.serving.speaker import Answer, Request, Speaker

#: Addresses that only this machine reaches.
LOCAL = ("127.0.0.1", "localhost", "::1")


class Options(BaseModel):
    """What the OpenAI API calls these things; fields that nothing here answers to are ignored."""

    model_config = ConfigDict(extra="ignore")
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    n: Literal[1] = 1


class Chat(Options):
    """A body of /v1/chat/completions."""

    messages: list[dict[str, Any]]


class Completion(Options):
    """A body of /v1/completions."""

    prompt: str


def require_local(host: str, allowed: bool) -> None:
    """Raises RecipeError when ``host`` is reachable from elsewhere and nobody allowed that."""
    if host not in LOCAL and not allowed:
        raise RecipeError(
            f"{host} is reachable from other machines, and the server asks nobody for a password.",
            "Bind to 127.0.0.1, or add --allow-remote.",
        )


def make_app(speaker: Speaker, queue: int = 8) -> Any:
    """The FastAPI application.

    Args:
        speaker: what answers.
        queue: requests that may wait or run; one more gets status 429.

    Raises:
        RuntimeUnavailableError: FastAPI is not installed.
    """
    try:
        from fastapi import FastAPI, HTTPException
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"The server needs FastAPI: {error}.", "pip install 'ghostexport[serve]'"
        ) from None

    app, turns = FastAPI(title="ghostexport"), _Turns(queue)
    _explain_errors(app)
    started, stream = int(time.time()), _leaving(turns)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": speaker.name, "object": "model", "created": started, "owned_by": "ghostexport"}
        return {"object": "list", "data": [entry]}

    async def respond(options: Options, chat: bool, begin: Callable[[Request], Answer]) -> Any:
        if options.model not in (None, speaker.name):
            raise HTTPException(404, f"This server answers as {speaker.name!r}, not {options.model!r}.")
        if not turns.enter():
            raise HTTPException(429, f"{queue} requests are waiting already.", {"Retry-After": "1"})
        try:
            answer = begin(_request(options, chat))
        except BaseException:
            turns.leave()
            raise
        shape = _Shape(speaker.name, chat)
        if options.stream:
            return stream(_events(turns, answer, shape), media_type="text/event-stream")
        try:
            async with turns.turn:
                text = await asyncio.to_thread(answer.text)
        finally:
            turns.leave()
        return shape.whole(answer, text)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: Chat) -> Any:
        return await respond(body, True, lambda request: speaker.reply(body.messages, request))

    @app.post("/v1/completions", response_model=None)
    async def completions(body: Completion) -> Any:
        return await respond(body, False, lambda request: speaker.continue_text(body.prompt, request))

    return app


def _explain_errors(app: Any) -> None:
    """Errors as the API's clients read them: ``{"error": {"message": ...}}``."""
    from fastapi import HTTPException
    from fastapi.responses import JSONResponse

    def body(message: str) -> dict[str, Any]:
        return {"error": {"message": message, "type": "invalid_request_error"}}

    async def refused(_: Any, error: GhostExportError) -> JSONResponse:
        return JSONResponse(body(str(error)), 400)

    async def turned_away(_: Any, error: HTTPException) -> JSONResponse:
        return JSONResponse(body(error.detail), error.status_code, error.headers)

    app.add_exception_handler(GhostExportError, refused)
    app.add_exception_handler(HTTPException, turned_away)


class _Turns:
    """At most ``limit`` requests inside, one of them at work."""

    def __init__(self, limit: int) -> None:
        self.turn, self._limit, self._inside = asyncio.Lock(), limit, 0

    def enter(self) -> bool:
        if self._inside >= self._limit:
            return False
        self._inside += 1
        return True

    def leave(self) -> None:
        self._inside -= 1


def _leaving(turns: _Turns) -> Any:
    """A response that leaves the queue also when the client goes away before the first event, unseen by generators."""
    from fastapi.responses import StreamingResponse

    class Stream(StreamingResponse):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            try:
                await super().__call__(scope, receive, send)
            finally:
                turns.leave()

    return Stream


class _Shape:
    """The JSON of the API for one answer."""

    def __init__(self, model: str, chat: bool) -> None:
        self.chat = chat
        kind = "chat.completion" if chat else "text_completion"
        self.kind = kind
        self.head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, answer: Answer, text: str) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **said, "finish_reason": answer.finish_reason, "logprobs": None}
        usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": len(answer.ids)}
        usage["total_tokens"] = sum(usage.values())
        return {**self.head, "object": self.kind, "choices": [choice], "usage": usage}

    def piece(self, text: str, finish: str | None = None) -> dict[str, Any]:
        said = {"delta": {"content": text} if finish is None else {}} if self.chat else {"text": text}
        kind = "chat.completion.chunk" if self.chat else self.kind
        return {**self.head, "object": kind, "choices": [{"index": 0, **said, "finish_reason": finish}]}


async def _events(turns: _Turns, answer: Answer, shape: _Shape) -> AsyncIterator[str]:
    """Server-sent events; a client that goes away ends the answer."""
    async with turns.turn:
        pieces = iter(answer)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield f"data: {json.dumps(shape.piece(piece))}\n\n"
    yield f"data: {json.dumps(shape.piece('', answer.finish_reason))}\n\n"
    yield "data: [DONE]\n\n"


def _request(options: Options, chat: bool) -> Request:
    most = options.max_completion_tokens or options.max_tokens
    stop = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ())
    seed = uuid.uuid4().int & 0x7FFFFFFF if options.seed is None else options.seed
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.repetition_penalty, seed)
    return Request(most if most is not None else None if chat else 16, stop, sampling)
