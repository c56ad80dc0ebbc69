"""One loaded variant that continues text, piece by piece, until an end token, a stop string or a limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ghostexport.errors import RecipeError, RunFolderError
from ghostexport.execution import Execution
from ghostexport.recipe import is_repaired
from ghostexport.runfolder import RunFolder
from ghostexport.runtimes import RUNTIMES, load_engine
from ghostexport.runtimes.base import EngineFile, Session
from ghostexport.runtimes.ort.onnxruntime import open_graph
from ghostexport.serving.codec import Codec
from ghostexport.serving.generation import CHUNK, Sampling, steps
from ghostexport.validation import require_name


@dataclass(frozen=True)
class Limits:
    """What an engine takes: ``context`` tokens in all (None: no limit known), ``chunk`` tokens in one call."""

    context: int | None
    chunk: int = CHUNK


@dataclass(frozen=True)
class Request:
    """What is asked: at most ``max_tokens`` new tokens (None: as many as fit), ended early by a ``stop`` string."""

    max_tokens: int | None = 256
    stop: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)


class Answer:
    """Iterating gives pieces of text as they come; afterwards the rest is known, too.

    Attributes:
        prompt_tokens: how many tokens were asked with.
        ids: generated ids, the end token included.
        finish_reason: ``stop`` at an end token or a stop string, ``length`` at a limit; None while it runs.
    """

    def __init__(self, tokens: Iterator[int], prompt_tokens: int, codec: Codec, stop: Sequence[str]) -> None:
        self.prompt_tokens = prompt_tokens
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self._tokens, self._codec, self._stop = tokens, codec, [s for s in stop if s]

    def __iter__(self) -> Iterator[str]:
        from tokenizers.decoders import DecodeStream

        stream, decoded, given = DecodeStream(skip_special_tokens=True), "", 0
        for token in self._tokens:
            self.ids.append(token)
            if token in self._codec.ends:
                self.finish_reason = "stop"
                break
            decoded += stream.step(self._codec.tokenizer, token) or ""
            cut = min((at for s in self._stop if (at := decoded.find(s, given)) >= 0), default=None)
            if cut is not None:
                self.finish_reason = "stop"
                if cut > given:
                    yield decoded[given:cut]
                return
            ready = len(decoded) - _beginning(decoded[given:], self._stop)
            if ready > given:
                yield decoded[given:ready]
                given = ready
        self.finish_reason = self.finish_reason or "length"
        whole = self._codec.decode(self.ids)  # the stream keeps back a character that has not all of its bytes
        if rest := (whole if whole.startswith(decoded) else decoded)[given:]:
            yield rest

    def text(self) -> str:
        """The whole answer."""
        return "".join(self)


class Speaker:
    """A variant of a run, loaded on a runtime, with its tokenizer. One answer at a time.

    Attributes:
        name: of the variant.
        runtime: that runs it.
    """

    def __init__(self, name: str, runtime: str, session: Session, codec: Codec, limits: Limits) -> None:
        self.name, self.runtime, self.codec, self.limits = name, runtime, codec, limits
        self._session = session

    def continue_text(self, prompt: str, request: Request) -> Answer:
        """An answer that goes on where ``prompt`` ends."""
        return self.answer(self.codec.encode(prompt), request)

    def reply(self, messages: Sequence[Mapping[str, Any]], request: Request) -> Answer:
        """An answer to a conversation: ``{"role": ..., "content": ...}`` each."""
        return self.answer(self.codec.encode_chat(messages), request)

    def answer(self, ids: Sequence[int], request: Request) -> Answer:
        """An answer to token ids.

        Raises:
            RecipeError: there are none, or they fill the context.
        """
        context = self.limits.context
        if not ids:
            raise RecipeError("The prompt is empty.", "Give some text.")
        if context is not None and len(ids) >= context:
            raise RecipeError(
                f"The prompt has {len(ids)} tokens; {self.name} on {self.runtime} has room for {context} in all.",
                "Shorten it, or build the engine with a larger --max-past.",
            )
        room = [limit for limit in (request.max_tokens, None if context is None else context - len(ids)) if limit]
        most = min(room, default=1 << 20) if request.max_tokens != 0 else 0
        prompt = np.asarray([list(ids)], np.int64)
        tokens = (int(t[0]) for t in steps(self._session, prompt, most, request.sampling, chunk=self.limits.chunk))
        return Answer(tokens, len(ids), self.codec, request.stop)

    def close(self) -> None:
        """Frees the engine."""
        self._session.close()


def open_speaker(
    run: Path, variant: str | None = None, runtime: str | None = None, execution: Execution | None = None
) -> Speaker:
    """Loads a variant of a run: its engine of the best runtime that runs here, else its graph on ONNX Runtime's CPU.

    Args:
        run: run folder.
        variant: None for the first repaired one, else what there is.
        runtime: None for the first of the registry that has an engine of the variant and runs here.

    Raises:
        RunFolderError: no such run, variant, engine or tokenizer.
        RuntimeUnavailableError: the runtime cannot run here.
    """
    execution, folder = execution or Execution(), RunFolder(run)
    names = folder.graphs()
    if not names:
        raise RunFolderError(f"{run} has no graph.", f"Make one with: ghostexport surgery {run}")
    repaired = [name for name in names if is_repaired(name)]
    variant = require_name(variant, names, "variant") if variant else (*repaired, *names)[0]
    codec = Codec(folder.model_path)
    candidates = RUNTIMES if runtime is None else (require_name(runtime, RUNTIMES, "runtime"),)
    for name in candidates:
        sidecar = folder.sidecar_path(name, variant)
        if sidecar.is_file() and (runtime or RUNTIMES[name].availability().run):
            engine, session = load_engine(sidecar, execution)
            return Speaker(variant, name, session, codec, limits_of(engine, codec.positions))
    if runtime is not None:
        raise RunFolderError(
            f"{run} has no {runtime} engine of {variant}.",
            f"Build it with: ghostexport build engine {run} --runtime {runtime}",
        )
    execution.say(f"{variant}: no engine that runs here; its graph runs on ONNX Runtime's CPU provider")
    return Speaker(variant, "onnxruntime", open_graph(folder.graph_path(variant)), codec, Limits(codec.positions))


def limits_of(engine: EngineFile, positions: int | None) -> Limits:
    """The narrower of the engine's optimization profiles (ONNX Runtime has none) and the model's positions."""
    if not engine.profiles:
        return Limits(positions)
    built = int(engine.flags["max_past"]) + 1  # after the longest past, one more token
    return Limits(min(built, positions or built), min(CHUNK, int(engine.flags["max_tokens"])))


def _beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that a stop string may begin with: it is held back until it is clear."""
    longest = min(len(text), max((len(s) - 1 for s in stops), default=0))
    return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0)
