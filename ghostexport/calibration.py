"""Calibration sets: token windows with a fingerprint, and held-out windows from other documents."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from ghostexport.errors import CalibrationError, RunFolderError
from ghostexport.execution import Execution
from ghostexport.files import write_bytes
from ghostexport.recipe import CalibrationSection
from ghostexport.texts import documents, shares

if TYPE_CHECKING:
    import torch

FORMAT = "ghostexport.calibration/1"

#: Tokens per forward pass: enough to keep the matrix units busy, little enough for any memory.
BATCH_TOKENS = 2048

#: Fewer than 2 tokens per channel leave a full C x C fit undetermined or at its double-descent peak (N near C).
MIN_TOKENS_PER_CHANNEL = 2

#: Excess risk of least squares is near C / (N - C): 14 % of the noise at 8 tokens per channel.
GOOD_TOKENS_PER_CHANNEL = 8

_DOCUMENTS_AT_ONCE = 64


@dataclass(frozen=True)
class Batch:
    """A few sequences on their way through the model.

    Attributes:
        sequences: their indices in the set.
        input_ids: ``(B, T)`` int64.
        mask: ``(B, T)`` bool, True = real token.
    """

    sequences: range
    input_ids: torch.Tensor
    mask: torch.Tensor

    @property
    def attention_mask(self) -> torch.Tensor | None:
        """``(B, T)`` int64 for the model, or None when nothing is padded (the faster attention kernels)."""
        return None if bool(self.mask.all()) else self.mask.long()


@dataclass(frozen=True, eq=False)
class CalibrationSet:
    """Token windows.

    Attributes:
        tokens: ``[N, T]`` int64.
        attention_mask: ``[N, T]`` int64, 1 = real token, 0 = padding.
        spec: how they were made, JSON-ready.
    """

    tokens: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    spec: Mapping[str, Any]

    @classmethod
    def from_tokens(cls, tokens: Any, attention_mask: Any = None, **spec: Any) -> CalibrationSet:
        """Wraps token ids ``[N, T]`` that are already at hand."""
        ids = np.asarray(tokens, dtype=np.int64)
        mask = np.ones_like(ids) if attention_mask is None else np.asarray(attention_mask, dtype=np.int64)
        return cls(ids, mask, spec)

    @property
    def sha256(self) -> str:
        """Fingerprint of tokens, mask and spec."""
        digest = hashlib.sha256(json.dumps([list(self.tokens.shape), dict(self.spec)], sort_keys=True).encode())
        digest.update(self.tokens.tobytes())
        digest.update(self.attention_mask.tobytes())
        return digest.hexdigest()

    @property
    def num_tokens(self) -> int:
        """Real (unpadded) tokens."""
        return int(self.attention_mask.sum())

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def first(self, count: int | None) -> CalibrationSet:
        """The first ``count`` sequences; None for all."""
        return CalibrationSet(self.tokens[:count], self.attention_mask[:count], self.spec)

    def batches(self, device: torch.device | str = "cpu", tokens: int = BATCH_TOKENS) -> Iterator[Batch]:
        """The sequences in order, about ``tokens`` tokens at a time, at least one sequence."""
        import torch

        size = max(1, tokens // self.tokens.shape[1])
        for first in range(0, len(self), size):
            part = slice(first, first + size)
            ids = torch.from_numpy(self.tokens[part]).to(device)
            mask = torch.from_numpy(self.attention_mask[part] != 0).to(device)
            yield Batch(range(first, first + len(ids)), ids, mask)

    def require_fits(self, vocab_size: int, max_length: int | None = None) -> None:
        """Raises CalibrationError when a token id is outside the model's vocabulary or windows exceed its positions."""
        largest = int(self.tokens.max(initial=0))
        if largest >= vocab_size or int(self.tokens.min(initial=0)) < 0:
            raise CalibrationError(
                f"Token id {largest} of the calibration set is outside the model's vocabulary of {vocab_size}.",
                "The tokenizer does not belong to this model: use the model's own tokenizer.",
            )
        if max_length is not None and self.tokens.shape[1] > max_length:
            raise CalibrationError(
                f"Calibration windows of {self.tokens.shape[1]} tokens exceed the model's {max_length} positions.",
                f"Use --length {max_length} or less.",
            )

    def require_tokens_for(self, channels: int, execution: Execution | None = None) -> None:
        """Checks that a ``C x C`` least-squares fit is well determined.

        Raises:
            CalibrationError: fewer than ``2 C`` tokens. Between ``2 C`` and ``8 C`` the user is told.
        """
        per_sequence = max(1, self.num_tokens // max(1, len(self)))
        needed = MIN_TOKENS_PER_CHANNEL * channels
        if self.num_tokens < needed:
            raise CalibrationError(
                f"{self.num_tokens} calibration tokens are too few for hidden size {channels}: at least {needed} are "
                "needed to determine an operator.",
                f"Use --sequences {-(-needed // per_sequence)} or more at this length.",
            )
        good = GOOD_TOKENS_PER_CHANNEL * channels
        if self.num_tokens < good and execution is not None:
            execution.say(
                f"{self.num_tokens} calibration tokens are few for hidden size {channels}: operators will overfit; "
                f"{good} or more are recommended (--sequences {-(-good // per_sequence)})"
            )


class Tokens(NamedTuple):
    """Windows to choose and fit on, and windows of other documents to measure on."""

    calibration: CalibrationSet
    held_out: CalibrationSet


def draw(section: CalibrationSection, tokenizer: Any, execution: Execution | None = None) -> Tokens:
    """Draws calibration windows and held-out windows, the two from different documents.

    Of several sources each gives its share of both, in windows of its own; the calibration windows are then mixed.
    Conversations become text by the tokenizer's chat template.

    Each document goes whole to the set that is relatively emptier; a set's documents are joined by blank lines and cut
    into windows of ``section.length`` tokens, each starting with the tokenizer's BOS token where it defines one
    (and ``section.bos`` is on).

    Raises:
        CalibrationError: no tokenizer, unusable source, or too little text (says how many tokens there are and lack).
        RuntimeUnavailableError: a package is missing.
    """
    execution = execution or Execution()
    if tokenizer is None:
        raise CalibrationError("The model's source has no tokenizer.", "Add tokenizer files to the model's folder.")
    counts = (shares(section.source, n) for n in (section.sequences, section.held_out_sequences))
    drawn = []
    for (name, n), (_, m) in zip(*counts, strict=True):
        own = section.model_copy(update={"source": name, "sequences": n, "held_out_sequences": m})
        drawn.append(_draw(own, tokenizer, execution))
    bos = tokenizer.bos_token_id if section.bos else None
    sets = []
    for split, windows in zip(("calibration", "held-out"), map(np.concatenate, zip(*drawn, strict=True)), strict=True):
        if len(drawn) > 1 and split == "calibration":
            windows = np.random.default_rng(section.seed).permutation(windows)
        spec = section.model_dump(mode="json") | {"split": split, "bos": bos, "tokenizer": type(tokenizer).__name__}
        sets.append(CalibrationSet.from_tokens(windows, **spec))
    return Tokens(*sets)


def _draw(section: CalibrationSection, tokenizer: Any, execution: Execution) -> list[NDArray[np.int64]]:
    """Windows of one source: to calibrate, held out."""
    chat = tokenizer.apply_chat_template if getattr(tokenizer, "chat_template", None) else None
    source = str(section.source)
    bos = tokenizer.bos_token_id if section.bos else None
    room = section.length - (bos is not None)  # text tokens per window
    wanted = (section.sequences * room, section.held_out_sequences * room)
    pools: tuple[list[int], list[int]] = ([], [])
    for ids in _tokenized(documents(source, section.seed, chat and partial(chat, tokenize=False)), tokenizer):
        target = min((0, 1), key=lambda pool: len(pools[pool]) / wanted[pool])
        pools[target].extend(ids)
        filled = sum(min(len(pool), need) for pool, need in zip(pools, wanted, strict=True))
        execution.progress("calibrate", filled, sum(wanted))
        if filled == sum(wanted):
            break
    else:
        raise CalibrationError(
            f"{section.source} yields {len(pools[0])} calibration and {len(pools[1])} held-out tokens; {wanted[0]} and "
            f"{wanted[1]} are needed for {section.sequences} + {section.held_out_sequences} windows of "
            f"{section.length} tokens.",
            "Use fewer or shorter sequences, or a larger source."
            if sum(map(len, pools)) < sum(wanted)
            else "A document goes whole to one of the two: cut long documents into several.",
        )
    found = []
    for pool, need in zip(pools, wanted, strict=True):
        windows = np.asarray(pool[:need], dtype=np.int64).reshape(-1, room)
        found.append(windows if bos is None else np.insert(windows, 0, bos, axis=1))
    return found


def _tokenized(texts: Iterator[str], tokenizer: Any) -> Iterator[list[int]]:
    while chunk := list(itertools.islice(texts, _DOCUMENTS_AT_ONCE)):
        joined = [f"{text.strip()}\n\n" for text in chunk if text.strip()]
        yield from tokenizer(joined, add_special_tokens=False, verbose=False)["input_ids"] if joined else ()


def save(path: Path, drawn: CalibrationSet, held_out: CalibrationSet) -> Path:
    """Writes both sets into one safetensors file, atomically, and returns its path."""
    tensors: dict[str, NDArray[Any]] = {}
    header: dict[str, Any] = {"format": FORMAT}
    for name, part in (("calibration", drawn), ("held_out", held_out)):
        tensors |= {f"{name}.tokens": part.tokens, f"{name}.attention_mask": part.attention_mask}
        header[name] = {"spec": dict(part.spec), "sha256": part.sha256}
    write_bytes(path, to_safetensors(tensors, {"ghostexport": json.dumps(header, sort_keys=True)}))
    return path


def load(path: Path) -> Tokens:
    """Reads what :func:`save` wrote; returns calibration and held-out set.

    Raises:
        RunFolderError: the file is missing, truncated, edited or of another format.
    """
    remake = "Make it again with: ghostexport calibrate RUN"
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads((file.metadata() or {}).get("ghostexport", "{}"))
            if header.get("format") != FORMAT:
                raise RunFolderError(f"{path} is not a calibration file of format {FORMAT}.", remake)
            sets: Sequence[CalibrationSet] = [
                CalibrationSet(
                    file.get_tensor(f"{name}.tokens"),
                    file.get_tensor(f"{name}.attention_mask"),
                    header[name]["spec"],
                )
                for name in ("calibration", "held_out")
            ]
    except FileNotFoundError:
        raise RunFolderError(f"Calibration file {path} does not exist.", remake) from None
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        raise RunFolderError(f"{path} is not a readable calibration file: {error}", remake) from error
    for name, part in zip(("calibration", "held_out"), sets, strict=True):
        if part.sha256 != header[name]["sha256"]:
            raise RunFolderError(f"{path} was edited: the {name} tokens do not match their hash.", remake)
    return Tokens(*sets)
