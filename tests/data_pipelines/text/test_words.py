"""Words of Chinese text are those of the segmenter, in whatever tokens; all other words are the tokenizer's."""

import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from data_pipelines.errors import UserError
from data_pipelines.text import words
from data_pipelines.text.words import RUN, edges, fields_of, mark, segmenter
from tests.data_pipelines.text.test_encoding import MAKE, made

LEXICON = ["研究", "研究生", "生命", "命", "的", "起源"]
SENTENCE = "研究生命的起源"
FEW = st.text("甲乙丙", max_size=12)


def listed(tmp_path, *lines, kind="forward"):
    (tmp_path / "words.txt").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return f"{kind}:{tmp_path / 'words.txt'}"


def cut_up(run, cut):
    return [run[start:end] for start, end in zip(cut(run), [*cut(run)[1:], len(run)], strict=True)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("forward", "研究生 命 的 起源"), ("backward", "研究 生命 的 起源")],
)
def test_the_longest_word_is_taken_from_the_left_or_from_the_right(tmp_path, kind, expected):
    cut = segmenter(listed(tmp_path, "\ufeff研究 5 v", *LEXICON[1:], "", "命中\tn", kind=kind))
    assert cut_up(SENTENCE, cut) == expected.split()


@settings(max_examples=200)
@given(lexicon=st.sets(st.text("甲乙丙", min_size=2, max_size=5), min_size=1, max_size=8), text=FEW.filter(bool))
@example({"甲乙丙", "甲乙"}, "甲乙甲乙丙")
@example({"甲乙丙甲", "甲乙"}, "甲乙丙")
def test_matching_is_that_of_the_library_s_wordpiece_in_both_directions(lexicon, text):
    def greedy(lexicon, text):
        vocab = {word: index for index, word in enumerate([*"甲乙丙", *lexicon])}
        model = models.WordPiece(vocab, unk_token="甲", continuing_subword_prefix="")
        return Tokenizer(model).encode(text).tokens

    forward = words._matching([*lexicon])
    assert cut_up(text, forward) == greedy(lexicon, text)
    backwards = words._backward(words._matching([word[::-1] for word in lexicon]))
    mirrored = greedy([word[::-1] for word in lexicon], text[::-1])
    assert cut_up(text, backwards) == [word[::-1] for word in reversed(mirrored)]


def marked(kind, texts, cut, sentences=None):
    """(the spelled tokens, where words begin by the tokenizer, where with the segmenter) of texts."""
    _, encoder, _ = made(kind)
    sentences = sentences or [np.array([0])] * len(texts)
    found = [edges(text, begins, cut) for text, begins in zip(texts, sentences, strict=True)]
    encoded = encoder.encode(texts, [each[:, 0] for each in found])
    before = encoder.word_starts[encoded.tokens] if encoded.word_starts is None else encoded.word_starts
    begins = np.concatenate([each[:, 1] for each in found]) == 1
    return encoded, before, mark(before, encoded, begins, np.array([*map(len, found)]))


MIXED = st.lists(
    st.sampled_from(
        ["研究", "生命", "中文", "の", "カナ", "abc", "1998", "🤗", "e\u0301", "，", ". ", " ", "\n", "·", "\u200b"]
    )
    | st.text("研究生命中文", max_size=4),
    max_size=8,
).map("".join)


@settings(max_examples=60)
@given(texts=st.lists(MIXED, min_size=1, max_size=3), pairs=st.booleans())
@example(["研究生abc中文🤗 文中1998"], True)
def test_a_word_is_one_unit_and_what_is_not_chinese_is_as_before(texts, pairs):
    """In every kind of tokenizer, beside its own offsets."""
    cut = (lambda run: [*range(0, len(run), 2)]) if pairs else (lambda run: [*range(len(run))])
    for kind in MAKE:
        encoded, before, after = marked(kind, texts, cut)
        _, encoder, whole = made(kind)
        plain = encoder.encode(texts, [np.zeros(0, np.int64)] * len(texts))
        assert np.array_equal(encoded.tokens, plain.tokens)
        expected, first = before.copy(), 0
        for text, each in zip(texts, whole.encode_batch(texts, add_special_tokens=False), strict=True):
            places = edges(text, np.array([0]), cut).tolist()
            for (place, begins), (end, _) in zip(places, [*places[1:], (None, None)], strict=False):
                ended = [index for index, (_, stop) in enumerate(each.offsets) if stop > place]
                if not ended:
                    continue
                if each.offsets[ended[0]][0] >= place:
                    expected[first + ended[0]] = True
                for index in ended[1:] if begins else ():
                    expected[first + index] &= each.offsets[index][0] >= end
            first += len(each.offsets)
        assert after.tolist() == expected.tolist(), (kind, texts)


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "bpe"])
def test_every_kind_of_tokenizer_gets_the_words_of_the_segmenter(kind, tmp_path):
    text = "The 今天天气中文, unaffable 中文."
    cut = segmenter(listed(tmp_path, "今天", "天天", "天气", "中文"))
    encoded, _, after = marked(kind, [text], cut)
    _, _, whole = made(kind)
    after[0] = True  # byte-level tokens say so only after white space
    ends = [stop for _, stop in whole.encode(text, add_special_tokens=False).offsets]
    at = [ends[index - 1] if index else 0 for index in np.flatnonzero(after)]
    found = [text[begin:end].strip() for begin, end in zip(at, [*at[1:], len(text)], strict=True)]
    assert [*filter(None, found)] == ["The", "今天", "天气", "中文", ",", "unaffable", "中文", "."]


def test_words_end_with_the_sentence_and_runs_have_the_dots_of_names():
    whole = lambda run: [0]
    assert edges("研究生命", np.array([0, 2]), whole).tolist() == [[0, 1], [2, 0], [2, 1], [4, 0]]
    assert edges(" 研究·生命·a", np.array([1]), whole).tolist() == [[1, 1], [6, 0]]
    assert not len(edges("abc", np.array([0]), whole))
    assert RUN.fullmatch("\u3400\U00020000\uf900") and not RUN.search("〇かカ한1a，")


def test_units_get_the_words_of_jieba():
    import jieba

    cut = segmenter("jieba")
    assert cut_up("我来到北京清华大学", cut) == jieba.lcut("我来到北京清华大学") != [*"我来到北京清华大学"]


@pytest.mark.parametrize(
    ("spec", "content", "said"),
    [
        ("forward", b"", "no word of two or more Chinese characters; give one word a line"),
        ("forward", "abc\n中\n".encode(), "no word of two or more"),
        ("backward", "中文\n".encode("gb18030"), r"is not UTF-8 \(byte 0\); convert it"),
        ("forward", None, r"cannot be read \(No such file"),
        ("forward", "folder", r"cannot be read \(Is a directory"),
        ("mecab", b"x", "there is no such segmenter; use forward:FILE, backward:FILE, jieba or spaces"),
    ],
)
def test_a_list_that_cannot_be_is_one_line(tmp_path, spec, content, said):
    file = tmp_path / "list.txt"
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=f"--units word={spec}:{file}: .*{said}") as raised:
        words.digests([f"word={spec}:{file}"])
    assert "\n" not in str(raised.value)


def test_units_have_names_each_once():
    assert fields_of(["word=spaces", "named_entity=jieba"]) == {"word_starts": "spaces", "named_entity_starts": "jieba"}
    for told, said in ((["word"], "give NAME=SEGMENTER"), (["a=jieba", "a=spaces"], "a is given twice")):
        with pytest.raises(UserError, match=said):
            fields_of(told)
    with pytest.raises(UserError, match="--units .*use a name of small letters"):
        fields_of(["A B=jieba"])


def test_a_package_that_is_absent_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    segmenter.cache_clear()
    with pytest.raises(UserError, match="--units word=jieba: the package is not installed; pip install -r"):
        words.digests(["word=jieba"])
