"""The encoder gives what the tokenizer gives for each whole text, white space and all, and where in it places are."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from data_pipelines import pieces, tokenizers, wordlevel
from data_pipelines.text import encoding
from data_pipelines.text.encoding import Encoder

TEXTS = [
    "The Café's naïve owner, Dr. Müller, sang — loudly!  \t He won 3,141 prizes; didn't he?",
    "ΑΣ Straße İstanbul 日本語 テスト 分词。“今天”天气 e\u0301te\u0301 \u200b zero\u00a0width\x1cf\x0bs \u2028line",
    "unaffable " * 3 + "x" * 120 + " ##ing # ## [UNK ] <unk> 🤗🤗 \ufffd today.It rains\n\n\n  twice.\r\n",
    *(f"The word{number} of the café is Number{number}." for number in range(50)),
]


def byte_level(prefix: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def split_by_digits() -> Tokenizer:
    """Byte-level by another regex, whose white space goes with digits."""
    tokenizer = byte_level(False)
    parts = [pre_tokenizers.Split(Regex(r"\d\s*|\s*\w+|."), "isolated"), pre_tokenizers.ByteLevel(False, False, False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return tokenizer


MAKE = {
    "wordpiece": lambda: tokenizers.train(TEXTS, 250),
    "wordpiece cased": lambda: tokenizers.train(TEXTS, 250, cased=True),
    "unigram": lambda: pieces.train(TEXTS, "unigram", 140, pieces.FLAVOURS["xlnet"])[0],
    "unigram with accents": lambda: pieces.train(TEXTS, "unigram", 145, pieces.FLAVOURS["albert"], True)[0],
    "bpe of pieces": lambda: pieces.train(TEXTS, "bpe", 150, pieces.FLAVOURS["xlnet"])[0],
    "wordlevel": lambda: wordlevel.train(TEXTS, 60),
    "byte-level": lambda: byte_level(False),
    "byte-level with a space in front": lambda: byte_level(True),
    "another regex": split_by_digits,
}
FAST = [*MAKE][:-1]


@functools.cache
def made(kind: str) -> Tokenizer:
    return MAKE[kind]()


SPACES = st.sampled_from([*" \n", "  ", "\n\n", *"\t\r\x0b\x0c\x1c\x85\u00a0\u1680\u180e\u2028\u3000\u200b\u0301\0"])
WORDS = st.sampled_from(["the", "Café", "中文", "##", "don't", "'s", "''", "``", "a b", *"İ中。”.3ﬁ🤗"])
TEXT = st.lists(SPACES | WORDS | st.text(max_size=4), max_size=14)
TEXT = TEXT.map("".join).map(lambda text: text.replace("<", "").replace("[", ""))  # special tokens are text here


def expected(tokenizer: Tokenizer, texts: list[str]):
    """(ids, offsets) of each text from the tokenizer itself."""
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


def test_words_begin_where_the_tokens_say():
    text = " today.It rains\n twice"
    for kind, begins in {"byte-level": ("Ġ", "Ċ"), "unigram": "▁"}.items():
        encoder, tokens = Encoder(made(kind)), tokenizers.vocabulary(made(kind))
        got = encoder.encode([text], [np.zeros(0, np.int64)])
        assert got.word_starts is None
        starts = encoder.word_starts[got.tokens].tolist()
        assert starts == [tokens[token].startswith(begins) for token in got.tokens]
        assert sum(starts) == 3 + (kind == "byte-level")  # a newline of its own, there
    got = Encoder(made("another regex")).encode([text], [np.zeros(0, np.int64)])
    assert 2 < got.word_starts.sum() < len(got.tokens)
