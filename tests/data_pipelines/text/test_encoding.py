"""The encoder gives what the tokenizer gives for each whole text, white space and all, and where in it places are."""

import functools
import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from data_pipelines.text import encoding
from data_pipelines.text.encoding import Encoder
from data_pipelines.tokenizers.made import vocabulary
from tests.data_pipelines.tokenizers.trained import PROBES, TEXT, TEXTS, make

TEXTS = TEXTS[:40]


def copy_of(kind: str, **changes) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(json.loads(make(kind).tokenizer.to_str()) | changes))


def byte_level(prefix: bool = False, parts=()) -> Tokenizer:
    tokenizer = copy_of("bpe")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(parts)) if parts else pre_tokenizers.ByteLevel(prefix)
    return tokenizer


def pieces(normalizer) -> Tokenizer:
    """Pieces with another normaliser, as a tokenizer.json may have it."""
    tokenizer = copy_of("sentencepiece-unigram", normalizer=None)
    if normalizer:
        tokenizer.normalizer = normalizer
    return tokenizer


# Byte-level by a regex whose white space goes with digits
BY_DIGITS = pre_tokenizers.Split(Regex(r"\d\s*|\s*\w+|."), "isolated"), pre_tokenizers.ByteLevel(False, False, False)
MAKE = {
    "wordpiece": lambda: copy_of("wordpiece"),
    "wordpiece cased": lambda: make("wordpiece", cased=True).tokenizer,
    "unigram": lambda: copy_of("sentencepiece-unigram"),
    "unigram with accents": lambda: make("sentencepiece-unigram", "albert", cased=True).tokenizer,
    "pieces as they are": lambda: pieces(None),
    "pieces, two characters as one": lambda: pieces(normalizers.Replace("a.", "d")),
    "bpe of pieces": lambda: make("sentencepiece-bpe", sentinels=5).tokenizer,
    "wordlevel": lambda: copy_of("wordlevel"),
    "bpe": byte_level,
    "bpe with a space in front": lambda: byte_level(True),
    "character-bpe": lambda: make("character-bpe").tokenizer,
    "ctrl": lambda: make("character-bpe", "ctrl").tokenizer,
    "bytes": lambda: make("bytes").tokenizer,
    "another regex": lambda: byte_level(parts=BY_DIGITS),
}
FAST = [*MAKE][:-1]


@functools.cache
def made(kind: str) -> tuple[Tokenizer, Encoder, Tokenizer]:
    """(the tokenizer, its encoder, the tokenizer whose offsets have the white space too)."""
    tokenizer = MAKE[kind]()
    whole = Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | {"post_processor": None}))
    return tokenizer, Encoder(tokenizer), whole


@settings(max_examples=30)
@given(texts=st.lists(TEXT, max_size=4))
@example(PROBES)
def test_tokens_and_places_are_those_of_the_whole_text(texts):
    for kind in MAKE:
        _, encoder, whole = made(kind)
        assert (encoder.runs is not None) == (kind in FAST)
        encodings = whole.encode_batch(texts, add_special_tokens=False)
        for _ in range(2):  # the second time every run is known
            got = encoder.encode(texts, [np.arange(len(text) + 1) for text in texts])
            assert got.tokens.tolist() == [token for each in encodings for token in each.ids], kind
            assert got.lengths.tolist() == list(map(len, encodings)), kind
            first = 0
            for text, each in zip(texts, encodings, strict=True):
                places, offsets = np.arange(len(text) + 1), np.array(each.offsets).reshape(-1, 2, 1)
                begin, end = offsets[:, 0], offsets[:, 1]
                here = slice(first, first := first + len(places))
                assert got.ended[here].tolist() == np.sum(end <= places, axis=0).tolist(), (kind, text)
                inside = np.any((begin < places) & (end > places), axis=0)
                assert got.straddled[here].tolist() == inside.tolist(), (kind, text)
            assert first == len(got.ended) == len(got.straddled)


@pytest.mark.parametrize("kind", FAST)
def test_forgetting_runs_changes_nothing(kind, monkeypatch):
    places = [np.arange(0, len(text), 3) for text in TEXTS]
    wanted = Encoder(made(kind)[0]).encode(TEXTS, places)
    monkeypatch.setattr(encoding, "MOST_RUNS", 3)
    encoder = Encoder(made(kind)[0])
    for text in TEXTS:
        encoder.encode([text], [np.zeros(0, np.int64)])
        assert len(encoder.table) == 0 or len(text.split()) < 4
    for ours, theirs in zip(encoder.encode(TEXTS, places)[:4], wanted[:4], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", MAKE)
def test_words_begin_where_the_tokens_say(kind):
    tokenizer, encoder, _ = made(kind)
    text, begins = " today.It rains\n twice", {kind: "▁" for kind in MAKE if "pieces" in kind or "unigram" in kind}
    got = encoder.encode([text, "", text], [np.zeros(0, np.int64)] * 3)
    starts = encoder.word_starts[got.tokens] if got.word_starts is None else got.word_starts
    tokens = vocabulary(tokenizer)
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
