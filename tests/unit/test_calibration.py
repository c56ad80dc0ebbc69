"""Windows, splits, sources and their errors, with a real tokenizer trained on the spot."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ghostexport import calibration, texts
from ghostexport.calibration import CalibrationSet
from ghostexport.errors import CalibrationError, RunFolderError, RuntimeUnavailableError
from ghostexport.execution import Execution
from ghostexport.recipe import CalibrationSection

WORDS = [f"w{i}" for i in range(500)]


@pytest.fixture
def tokenizer():
    """One id per word, so that a document is recognisable in the windows."""
    inner = Tokenizer(models.WordLevel({"<s>": 0, "<unk>": 1} | {w: i + 2 for i, w in enumerate(WORDS)}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", unk_token="<unk>")


@pytest.fixture
def corpus(tmp_path):
    """100 documents; document d holds word d forty times."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": " ".join([f"w{d}"] * 40)}) + "\n" for d in range(100)))
    return path


def section(source, **fields):
    return CalibrationSection(
        **({"source": str(source), "sequences": 8, "length": 64, "held_out_sequences": 4} | fields)
    )


def test_windows_start_with_bos_and_splits_share_no_document(tokenizer, corpus):
    drawn, held_out = calibration.draw(section(corpus), tokenizer)
    assert drawn.tokens.shape == (8, 64) and held_out.tokens.shape == (4, 64)
    assert (drawn.tokens[:, 0] == 0).all() and (held_out.tokens[:, 0] == 0).all()
    assert (drawn.tokens[:, 1:] >= 2).all()
    assert not set(drawn.tokens[:, 1:].flat) & set(held_out.tokens[:, 1:].flat)
    assert drawn.num_tokens == 512 and drawn.attention_mask.all()


def test_without_bos_every_token_is_text(tokenizer, corpus):
    tokenizer.bos_token = None
    drawn, _ = calibration.draw(section(corpus), tokenizer)
    assert (drawn.tokens >= 2).all()


def test_fingerprint_follows_tokens_mask_and_spec(tokenizer, corpus):
    first, _ = calibration.draw(section(corpus), tokenizer)
    assert calibration.draw(section(corpus), tokenizer)[0].sha256 == first.sha256
    assert calibration.draw(section(corpus, seed=1), tokenizer)[0].sha256 != first.sha256
    masked = CalibrationSet.from_tokens(first.tokens, np.triu(np.ones_like(first.tokens)), **first.spec)
    assert masked.sha256 != first.sha256
    assert CalibrationSet.from_tokens(first.tokens, None, other=1).sha256 != first.sha256


def test_too_little_text_says_how_much(tokenizer, corpus):
    with pytest.raises(CalibrationError, match=r"12600 and 252 are needed for 200 \+ 4 windows of 64") as error:
        calibration.draw(section(corpus, sequences=200), tokenizer)
    assert "yields" in str(error.value)


def test_sets_of_unequal_size_fill_at_the_same_pace(tokenizer, corpus):
    """90 of the 100 documents of 40 tokens go to calibration: halves would leave it short."""
    drawn, held_out = calibration.draw(section(corpus, sequences=56, held_out_sequences=6), tokenizer)
    words = [len(set(part.tokens[:, 1:].flat)) for part in (drawn, held_out)]
    assert words == [89, 10]  # 56 x 63 / 40 and 6 x 63 / 40, rounded up


def test_one_long_document_is_told_from_too_little_text(tokenizer, tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"text": "w1 " * 5000}))
    with pytest.raises(CalibrationError, match=r"yields 5000 calibration and 0 held-out(?s:.*)cut long documents"):
        calibration.draw(section(path), tokenizer)


def test_token_budget_per_channel():
    tokens = CalibrationSet.from_tokens(np.zeros((4, 100)))
    said = []
    tokens.require_tokens_for(50, Execution(say=said.append))
    assert not said
    tokens.require_tokens_for(200, Execution(say=said.append))
    assert "1600 or more" in said[0] and "--sequences 16" in said[0]
    with pytest.raises(CalibrationError, match=r"400 calibration tokens are too few.*at least 402(?s:.*)--sequences 5"):
        tokens.require_tokens_for(201)
    half = CalibrationSet.from_tokens(np.zeros((4, 100)), np.arange(100) < np.full((4, 1), 50))
    assert half.num_tokens == 200


def test_vocabulary_and_positions_are_checked():
    tokens = CalibrationSet.from_tokens([[0, 7, 3]])
    tokens.require_fits(8, 3)
    with pytest.raises(CalibrationError, match="Token id 7"):
        tokens.require_fits(7)
    with pytest.raises(CalibrationError, match="2 positions"):
        tokens.require_fits(8, 2)


def test_batches_cover_every_sequence_once():
    tokens = CalibrationSet.from_tokens(np.arange(70).reshape(7, 10), np.arange(10) < np.arange(4, 11)[:, None])
    batches = list(tokens.batches(tokens=25))
    assert [list(b.sequences) for b in batches] == [[0, 1], [2, 3], [4, 5], [6]]
    assert np.array_equal(np.concatenate([b.input_ids.numpy() for b in batches]), tokens.tokens)
    assert batches[0].attention_mask is not None and batches[3].attention_mask is None


def test_file_round_trip_and_edits(tokenizer, corpus, tmp_path):
    path = calibration.save(tmp_path / "c.safetensors", *calibration.draw(section(corpus), tokenizer))
    drawn, held_out = calibration.load(path)
    assert drawn.sha256 == calibration.draw(section(corpus), tokenizer)[0].sha256
    assert held_out.spec["split"] == "held-out"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(RunFolderError, match="edited"):
        calibration.load(path)
    path.write_bytes(bytes(data[:-100]))
    with pytest.raises(RunFolderError, match="not a readable"):
        calibration.load(path)
    with pytest.raises(RunFolderError, match="does not exist"):
        calibration.load(tmp_path / "none")


def test_text_files_are_cut_at_blank_lines(tmp_path):
    paragraphs = [f"paragraph {i} " + "x" * 1500 for i in range(20)]
    path = tmp_path / "t.txt"
    path.write_text("\n\n".join(paragraphs))
    found = list(texts.documents(str(path), 0))
    assert sorted("\n\n".join(found).split("\n\n")) == sorted(paragraphs)
    assert all(len(text) >= texts.PASSAGE for text in found[:-1]) and len(found) == 7


@pytest.mark.parametrize(
    "text", ["".join(f"line {i} of words\n" for i in range(3000)), "word " * 9000, "\u6587" * 20000, "x" * 8001]
)
def test_text_without_blank_lines_is_split_by_length(tmp_path, text):
    path = tmp_path / "t.txt"
    path.write_text(text, encoding="utf-8")
    found = list(texts.documents(str(path), 0))
    assert len(found) >= 2 and sum(map(len, found)) == len(text)
    assert all(len(piece) <= 2 * texts.PASSAGE for piece in found)
    assert all(piece in text for piece in found)
    if "\n" in text:
        assert all(piece.startswith("line") and piece.endswith("\n") for piece in found)
    if " " in text:
        assert all(not piece.startswith("ord") for piece in found)


def test_one_paragraph_gives_both_sets(tmp_path, tokenizer):
    path = tmp_path / "t.txt"
    path.write_text("w1 w2 and w3 in a line\n" * 2500)
    drawn, held_out = calibration.draw(section(path), tokenizer)
    assert drawn.tokens.shape == (8, 64) and held_out.tokens.shape == (4, 64)


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["one", "two", None]}), tmp_path / "t.parquet")
    assert sorted(texts.documents(str(tmp_path / "t.parquet"), 0)) == ["one", "two"]
    parquet.write_table(pyarrow.table({"words": ["one"]}), tmp_path / "t.parquet")
    with pytest.raises(CalibrationError, match="'text' column"):
        texts.documents(str(tmp_path / "t.parquet"), 0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "holds no text"),
        ("a.txt", b"\xff\xfe\x00\x01", "not readable UTF-8"),
        ("a.txt", b"abc\0def", "binary"),
        ("a.jsonl", b'{"txt": "x"}', r"line 1: .*'text'"),
        ("a.jsonl", b"{", "line 1"),
        ("a.jsonl", b'{"text": 3}', "not a string"),
        ("a.parquet", b"PAR1", "parquet"),
        ("a.doc", b"x", "is not .txt"),
    ],
)
def test_unusable_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        texts.documents(str(tmp_path / name), 0)


def test_unknown_sources_and_missing_packages(monkeypatch, tokenizer):
    with pytest.raises(CalibrationError, match="neither a known corpus"):
        texts.documents("wikitext", 0)
    with pytest.raises(CalibrationError, match="demo:wiki"):
        texts.documents("demo:novels", 0)
    with pytest.raises(CalibrationError, match="no tokenizer"):
        calibration.draw(CalibrationSection(source="demo"), None)
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(RuntimeUnavailableError, match=r"pip install 'ghostexport\[data\]'"):
        next(texts.documents("wikitext2", 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeUnavailableError, match=r"pip install --no-deps exllamav3==1\.6\.5"):
        texts.documents("demo", 0)


def test_wikitext_is_split_at_top_level_headings():
    class Datasets:
        @staticmethod
        def load_dataset(*args, **options):
            return {"text": ["", " = A = \n", " = = Part = = \n", " text a \n", " = B = \n", " text b \n"]}

    found = [text for text in texts.CORPORA["wikitext2"](Datasets, 0) if text.strip()]
    assert sorted(text.strip().splitlines()[0].strip() for text in found) == ["= A =", "= B ="]


@pytest.mark.skipif(importlib.util.find_spec("exllamav3") is None, reason="the demo texts are not installed")
def test_demo_texts_are_documents():
    for domain, least in {"wiki": 600, "c4": 500, "code": 100, "technical": 50, "tiny": 300}.items():
        found = list(texts.documents(f"demo:{domain}", 0))
        assert len(found) >= least and not any("<doc" in text[:5] or "<|endoftext|>" in text for text in found)
    assert len(list(texts.documents("demo", 0))) > 1100


def test_shares_of_the_sequences():
    assert texts.shares("c4", 128) == [("c4", 128)]
    assert texts.shares(["c4:96", "chat.jsonl:32"], 128) == [("c4", 96), ("chat.jsonl", 32)]
    assert texts.shares(["c4:96", "chat.jsonl:32"], 10) == [("c4", 8), ("chat.jsonl", 2)]
    assert texts.shares(["demo:wiki", "c4", "demo:code:2"], 7) == [("demo:wiki", 2), ("c4", 2), ("demo:code", 3)]
    with pytest.raises(CalibrationError, match="2 sequences leave none for rare"):
        texts.shares(["c4:96", "rare:1"], 2)


def test_several_sources_give_their_shares_mixed(tmp_path, tokenizer, corpus):
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(" ".join([f"w{d}"] * 40)) + "\n" for d in range(200, 300)))
    asked = section("").model_copy(update={"source": (f"{corpus}:3", f"{other}:1")})
    drawn, held_out = calibration.draw(asked, tokenizer)
    of_other = [bool((row[1:] >= 202).all()) for row in drawn.tokens]
    assert sum(of_other) == 2 and of_other != sorted(of_other)
    assert [bool((row[1:] >= 202).all()) for row in held_out.tokens] == [False] * 3 + [True]
    assert not set(drawn.tokens[:, 1:].flat) & set(held_out.tokens[:, 1:].flat)
    again, _ = calibration.draw(asked, tokenizer)
    assert again.sha256 == drawn.sha256


def test_conversations_become_text_by_the_chat_template(tmp_path, tokenizer):
    path = tmp_path / "chat.jsonl"
    rows = [[{"role": "user", "content": f"w{d}"}, {"role": "assistant", "content": f"w{d + 1}"}] for d in range(90)]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    small = section(path, sequences=1, held_out_sequences=1, length=16)
    with pytest.raises(CalibrationError, match=r"line 1: messages need a chat template"):
        calibration.draw(small, tokenizer)
    tokenizer.chat_template = "{% for m in messages %}w499 {{ m['content'] }} {% endfor %}"
    drawn, _ = calibration.draw(small, tokenizer)
    first = drawn.tokens[0, 1:]
    assert (first[::2] == 501).all() and (first[3::4] == first[1::4][: len(first[3::4])] + 1).all()
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(CalibrationError, match="the chat template refuses the messages"):
        calibration.draw(small, tokenizer)
