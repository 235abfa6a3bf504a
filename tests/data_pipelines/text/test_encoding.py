"""The encoder gives what the tokenizer gives for each whole text, white space and all, and where in it places are."""

import functools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from data_pipelines.text import encoding
from data_pipelines.text.encoding import Encoder
from data_pipelines.tokenizers.made import vocabulary
from data_pipelines.tokenizers.table import train
from data_pipelines.tokenizers.training import Training

TEXTS = [
    "The Café's naïve owner, Dr. Müller, sang — loudly!  \t He won 3,141 prizes; didn't he?",
    "ΑΣ Straße İstanbul 日本語 テスト 分词。“今天”天气 e\u0301te\u0301 \u200b zero\u00a0width\x1cf\x0bs \u2028line",
    "unaffable " * 3 + "x" * 120 + " ##ing # ## [UNK ] <unk> 🤗🤗 \ufffd today.It rains\n\n\n  twice.\r\n",
    *(f"The word{number} of the café is Number{number}." for number in range(50)),
]


def byte_level(prefix: bool = False) -> Tokenizer:
    tokenizer = train("bpe", TEXTS, Training(400)).tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    return tokenizer


def pieces(normalizer) -> Tokenizer:
    """Pieces with another normaliser, as a tokenizer.json may have it."""
    tokenizer = train("sentencepiece-unigram", TEXTS, Training(140)).tokenizer
    tokenizer = Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | {"normalizer": None}))
    if normalizer:
        tokenizer.normalizer = normalizer
    return tokenizer


def split_by_digits() -> Tokenizer:
    """Byte-level by another regex, whose white space goes with digits."""
    tokenizer = byte_level()
    parts = [pre_tokenizers.Split(Regex(r"\d\s*|\s*\w+|."), "isolated"), pre_tokenizers.ByteLevel(False, False, False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return tokenizer


ALBERT = Training(145, cased=True, specials="albert")
MAKE = {
    "wordpiece": lambda: train("wordpiece", TEXTS, Training(250)).tokenizer,
    "wordpiece cased": lambda: train("wordpiece", TEXTS, Training(250, cased=True)).tokenizer,
    "unigram": lambda: train("sentencepiece-unigram", TEXTS, Training(140)).tokenizer,
    "unigram with accents": lambda: train("sentencepiece-unigram", TEXTS, ALBERT).tokenizer,
    "pieces as they are": lambda: pieces(None),
    "pieces, two characters as one": lambda: pieces(normalizers.Replace("a.", "d")),
    "bpe of pieces": lambda: train("sentencepiece-bpe", TEXTS, Training(150, sentinels=5)).tokenizer,
    "wordlevel": lambda: train("wordlevel", TEXTS, Training(60)).tokenizer,
    "bpe": byte_level,
    "bpe with a space in front": lambda: byte_level(True),
    "character-bpe": lambda: train("character-bpe", TEXTS, Training(250)).tokenizer,
    "ctrl": lambda: train("character-bpe", TEXTS, Training(250, specials="ctrl")).tokenizer,
    "bytes": lambda: train("bytes", TEXTS, Training()).tokenizer,
    "another regex": split_by_digits,
}
FAST = [*MAKE][:-1]


@functools.cache
def made(kind: str) -> Tokenizer:
    return MAKE[kind]()


SPACES = st.sampled_from([*" \n", "  ", "\n\n", *"\t\r\x0b\x0c\x1c\x85\u00a0\u1680\u180e\u2028\u3000\u200b\u0301\0"])
WORDS = st.sampled_from(["the", "Café", "中文", "##", "don't", "'s", "''", "``", "a b", "a.x", *"İ中。”.3ﬁ🤗"])
TEXT = st.lists(SPACES | WORDS | st.text(max_size=4), max_size=14)
TEXT = TEXT.map("".join).map(lambda text: text.replace("<", "").replace("[", ""))  # special tokens are text here


def expected(tokenizer: Tokenizer, texts: list[str]):
    """(ids, offsets) of each text from the tokenizer itself, white space not cut off the offsets."""
    tokenizer = Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | {"post_processor": None}))
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [e.ids for e in encodings], [np.array(e.offsets).reshape(-1, 2) for e in encodings]


@pytest.mark.parametrize("kind", MAKE)
@settings(max_examples=300, deadline=None)
@given(texts=st.lists(TEXT, max_size=4), rounds=st.integers(1, 2))
def test_tokens_and_places_are_those_of_the_whole_text(kind, texts, rounds):
    encoder = Encoder(made(kind))
    assert (encoder.runs is not None) == (kind in FAST)
    ids, spans = expected(made(kind), texts)
    for _ in range(rounds):  # the second time every run is known
        got = encoder.encode(texts, [np.arange(len(text) + 1) for text in texts])
        assert got.tokens.tolist() == [token for each in ids for token in each]
        assert got.lengths.tolist() == list(map(len, ids))
        at = 0
        for text, offsets in zip(texts, spans, strict=True):
            for place in range(len(text) + 1):
                assert got.ended[at] == np.sum(offsets[:, 1] <= place), (text, place, offsets)
                inside = (offsets[:, 0] < place) & (offsets[:, 1] > place)
                assert got.straddled[at] == inside.any(), (text, place, offsets)
                at += 1
        assert at == len(got.ended) == len(got.straddled)


@pytest.mark.parametrize("kind", FAST)
def test_forgetting_runs_changes_nothing(kind, monkeypatch):
    places = [np.arange(0, len(text), 3) for text in TEXTS]
    wanted = Encoder(made(kind)).encode(TEXTS, places)
    monkeypatch.setattr(encoding, "MOST_RUNS", 3)
    encoder = Encoder(made(kind))
    for text in TEXTS:
        encoder.encode([text], [np.zeros(0, np.int64)])
        assert len(encoder.table) == 0 or len(text.split()) < 4
    for ours, theirs in zip(encoder.encode(TEXTS, places)[:4], wanted[:4], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", MAKE)
def test_words_begin_where_the_tokens_say(kind):
    encoder, tokens = Encoder(made(kind)), vocabulary(made(kind))
    text, begins = " today.It rains\n twice", {kind: "▁" for kind in MAKE if "pieces" in kind or "unigram" in kind}
    got = encoder.encode([text, "", text], [np.zeros(0, np.int64)] * 3)
    starts = encoder.word_starts[got.tokens] if got.word_starts is None else got.word_starts
    spelled = [tokens[token] for token in got.tokens]
    assert starts[0] and starts[got.lengths[0]]
    if kind in begins or kind.startswith(("bpe", "bytes")):
        begin = begins.get(kind, ("Ġ", "Ċ"))
        assert starts.tolist() == [token.startswith(begin) for token in spelled]
    elif kind in ("ctrl", "character-bpe"):
        ends = [token.endswith(("</w>", "<unk>")) for token in spelled]
        assert starts[1:].tolist() == ends[:-1]
    assert (got.word_starts is None) == (kind not in ("ctrl", "character-bpe", "another regex"))
    assert 2 < sum(starts) <= len(got.tokens)
