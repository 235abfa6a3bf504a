"""Similar words: read from lists and vectors, and put in place of masked words of the same length."""

import json

import numpy as np
import pytest

from data_pipelines.corpus import Corpus, open_corpora
from data_pipelines.errors import UserError
from data_pipelines.examples.masking import Masking, SpecialTokens
from data_pipelines.examples.packed_sentences import PackedSentences
from data_pipelines.examples.segment_pairs import SegmentPairs
from data_pipelines.similar_words import _nearest, read
from tests.data_pipelines.corpora import chosen, rows_of, unmasked
from tests.data_pipelines.prepared import run

LIST = "Aa01= big large huge\nAa02# cat dog ox\nbig huge\n\nalone\nrare seldom\n"
ALONE = ("q", "zz", "www")  # words of the text that are in no list
MASKING = Masking(rate=0.4, unit="word_starts", fate="unit", similar=True, mask=0.8, random=0.1)


def corpus(folder, listed=LIST, words=("big", "cat", "dog", "ox", *ALONE), **options):
    """A corpus of random words, a token for each letter, with similar words of a file."""
    folder.mkdir(exist_ok=True)
    file = folder / "similar.txt"
    file.write_bytes(listed if isinstance(listed, bytes) else listed.encode())
    random = np.random.default_rng(0)
    (folder / "a.txt").write_text(". ".join(" ".join(random.choice(words, 12)) for _ in range(400)))
    return run(folder / "c", f"text:{folder / 'a.txt'}", similar_words=str(file), **options)


def spelled(corpus):
    """Token -> its letters."""
    vocabulary = json.loads((corpus.tokenizer_path / "tokenizer.json").read_text())["model"]["vocab"]
    return {index: token for token, index in vocabulary.items()}


def replaced(rows, letters):
    """What stands in place of each chosen word: (word, its place's letters) of all rows."""
    found = []
    for before, after, where in zip(unmasked(rows), rows["tokens"], chosen(rows), strict=True):
        texts = [(letters[a], letters[b]) for a, b, is_chosen in zip(before, after, where, strict=True) if is_chosen]
        starts = [at for at, (token, _) in enumerate(texts) if not token.startswith("##")] + [len(texts)]
        for begin, end in zip(starts, starts[1:], strict=False):
            found.append(tuple("".join(word).replace("##", "") for word in zip(*texts[begin:end], strict=True)))
    return found


@pytest.mark.parametrize("layout", [PackedSentences, SegmentPairs])
def test_a_masked_word_becomes_a_similar_one_of_its_length_or_random_or_stays(tmp_path, layout):
    corpus(tmp_path)
    opened = Corpus(tmp_path / "c")
    found = replaced(rows_of(layout(64, MASKING), opened), spelled(opened))
    pairs = [(word, new) for word, new in found if word in ("cat", "dog")]
    similar = np.array([(word, new) in {("cat", "dog"), ("dog", "cat")} for word, new in pairs])
    stayed = np.array([word == new for word, new in pairs])
    for share, seen in ((0.8, similar), (0.1, stayed)):
        assert abs(seen.mean() - share) < 5 * np.sqrt(share * (1 - share) / len(pairs))
    for word in ("big", "ox", *ALONE):  # big's are longer, ox's too
        same = np.array([word == new for old, new in found if old == word])
        letters_alike = 1 / len(SpecialTokens.of(opened).ordinary)
        assert abs(same.mean() - 0.1) < 5 * np.sqrt(0.1 * 0.9 / len(same)) + letters_alike
    assert not any("[MASK]" in new for _, new in found)


def test_all_similar_words_of_a_word_come_alike_and_each_word_for_itself(tmp_path):
    corpus(tmp_path, "cat dog cow pig\n", ("cat", "ox"))
    opened = Corpus(tmp_path / "c")
    masking = Masking(rate=0.4, unit="word_starts", ngrams=(0, 1), fate="unit", similar=True, mask=1.0, random=0.0)
    found = replaced(rows_of(PackedSentences(128, masking), opened), spelled(opened))
    news = [new for word, new in found if word == "cat"]
    counts = np.array([news.count(new) for new in ("dog", "cow", "pig")])
    assert counts.sum() == len(news)
    assert ((counts - len(news) / 3) ** 2 / (len(news) / 3)).sum() < 16.3  # 2 degrees of freedom, p = 0.0003


def vectors(binary):
    words = {"cat": (1, 0.1), "dog": (1, 0.2), "cow": (-1, 0), "hen": (-1, 0.1), "ox": (1, 0)}
    head = f"{len(words)} 2\n".encode()
    if not binary:
        return head + "".join(f"{word} {x} {y}\n" for word, (x, y) in words.items()).encode()
    return head + b"".join(word.encode() + b" " + np.array(of, "<f4").tobytes() + b"\n" for word, of in words.items())


@pytest.mark.parametrize("binary", [False, True])
def test_of_vectors_the_nearest_of_the_same_length_are_similar(tmp_path, monkeypatch, binary):
    monkeypatch.setattr("data_pipelines.similar_words.NEAREST", 1)
    _, printed = corpus(tmp_path, vectors(binary))
    opened = Corpus(tmp_path / "c")
    masking = Masking(rate=0.4, unit="word_starts", fate="unit", similar=True, mask=1.0, random=0.0)
    found = set(replaced(rows_of(PackedSentences(64, masking), opened), spelled(opened)))
    assert {new for word, new in found if word == "cat"} == {"dog"}
    assert {new for word, new in found if word == "dog"} == {"cat"}
    assert len({new for word, new in found if word == "ox"}) > 10  # random: no other word has its length
    assert "of the words of the text have similar ones" in printed


WRONG = {
    "no line has two words": "alone\n\n",
    "line 2 is not UTF-8": b"a b\n\xff\xfe c\n",
    "no two of its 4 words have the same number of tokens": "a bcd\nef ghij\n",
    "word 2 has no vector of 3 numbers": "2 3\na 1 2 3\nb 1 2\n",
    "has 1 words, but its first line says 2": "2 3\na 1 2 3\n",
    "its first line is a vector; put a line before it": "a 0.25 -.5 1.2e-05\nb 0.1 0.2 0.3\n",
    "the vector of word 1 is not finite": "1 2\na nan 1\n",
    "no two of its 3 words have the same number of tokens": "3 2\na 0 0\nb 0 0\nc 1 0\n",
}


def test_the_square_of_a_large_vector_does_not_overflow(monkeypatch):
    monkeypatch.setattr("data_pipelines.similar_words.NEAREST", 1)
    vectors = np.array([(1e30, 0), (0, 1), (1e30, 1e29), (0.1, 1)], np.float32)
    assert _nearest([0, 1, 2, 3], vectors, np.ones(4)) == {0: [2], 1: [3], 2: [0], 3: [1]}


@pytest.mark.parametrize("said", WRONG)
def test_a_file_of_no_use_is_one_line_before_any_text_is_read(tmp_path, said):
    with pytest.raises(UserError, match=rf"--similar-words .*similar\.txt: .*{said}"):
        corpus(tmp_path, WRONG[said])
    assert not (tmp_path / "c" / "parts").exists()


def test_words_that_the_text_lacks_are_said_and_a_corpus_without_a_list_is_refused(tmp_path):
    _, printed = corpus(tmp_path / "a", "cow pig\n")
    assert "0.0% of the words of the text have similar ones; check that they are words of this text" in printed
    (tmp_path / "b").mkdir()
    run(tmp_path / "b" / "c", f"text:{tmp_path / 'a' / 'a.txt'}")
    with pytest.raises(UserError, match="similar=True: corpus .* has no similar words; prepare it"):
        PackedSentences(64, MASKING).check(Corpus(tmp_path / "b" / "c"))
    with pytest.raises(UserError, match="b has other similar words than a"):
        open_corpora(f"a={tmp_path / 'a' / 'c'},b={tmp_path / 'b' / 'c'}", {})
    for name, listed in (("d", "cat dog\ncow pig\n"), ("e", "cat cow\ndog pig\n")):  # the words are the same
        corpus(tmp_path / name, listed)
    with pytest.raises(UserError, match="e has other similar words than d; .*--similar-words"):
        open_corpora(f"d={tmp_path / 'd' / 'c'},e={tmp_path / 'e' / 'c'}", {})
    with pytest.raises(UserError, match="similar=True with fate='token': .* use fate='unit'"):
        Masking(similar=True)


def test_the_list_is_part_of_the_corpus_and_stays_when_text_is_added(tmp_path):
    manifest, _ = corpus(tmp_path)
    other, _ = corpus(tmp_path / "other", LIST.replace("dog", "cow"))
    assert manifest["fingerprint"] != other["fingerprint"]
    (tmp_path / "similar.txt").unlink()
    (tmp_path / "b.txt").write_text("more text of words. " * 40)
    added, _ = run(
        tmp_path / "c", f"text:{tmp_path / 'b.txt'}", append=True, tokenizer="wordpiece", heldout=0.01, cased=False
    )
    assert added["tables"] == manifest["tables"] and len(added["parts"]) == 2
    assert SpecialTokens.of(Corpus(tmp_path / "c")).similar is not None


def test_a_list_that_has_changed_is_said_though_the_corpus_is_finished(tmp_path):
    corpus(tmp_path)
    with pytest.raises(UserError, match="holds a corpus with other settings: similar_words_sha256 was '.*' and is '"):
        corpus(tmp_path, LIST.replace("dog", "cow"))


def test_the_nearest_vectors_are_searched_once(tmp_path, monkeypatch):
    searched = []
    monkeypatch.setattr("data_pipelines.similar_words._nearest", lambda *of: searched.append(of) or _nearest(*of))
    corpus(tmp_path, vectors(True))
    assert len(searched) == 1


@pytest.mark.parametrize("binary", [False, True])
def test_of_a_large_file_the_first_vectors_alone_are_read(tmp_path, monkeypatch, binary):
    monkeypatch.setattr("data_pipelines.similar_words.MOST", 3)
    (tmp_path / "vectors").write_bytes(vectors(binary)[:-8])
    assert read(str(tmp_path / "vectors")).words == ["cat", "dog", "cow"]
