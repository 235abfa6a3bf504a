"""Words, phrases and entities of Chinese text are found once, by `prepare`, however the corpus is made, and are masked
whole."""

import re
import shutil
from importlib.metadata import version

import numpy as np
import pytest

from data_pipelines import noise
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.masking import Masking, _run_starts
from data_pipelines.examples.packed_sentences import PackedSentences
from data_pipelines.examples.segment_pairs import SegmentPairs
from data_pipelines.formats import source
from data_pipelines.prepare import partial, parts, plan
from tests.data_pipelines.corpora import chosen, rows_of, unmasked
from tests.data_pipelines.prepare.small import MIB, UNIT, append
from tests.data_pipelines.prepared import CHARACTERS, content, documents, run, stored

HAN = "研究生命的起源中文天气"
WORDS, PHRASES = ["研究", "研究生", "生命", "起源", "中文", "天气"], ["生命的起源", "中文天气"]
MACBERT = (0.4, 0.3, 0.2, 0.1)


@pytest.fixture
def vocabulary(tmp_path):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *HAN, "。", *CHARACTERS, *(f"##{c}" for c in CHARACTERS)]
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), "utf-8")
    return str(tmp_path / "vocab.txt")


@pytest.fixture
def lists(tmp_path):
    """--units of words and phrases."""
    for name, lines in (("word", WORDS), ("phrase", PHRASES)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{line} 9\n" for line in lines), "utf-8")
    return tuple(f"{name}=forward:{tmp_path / name}.txt" for name in ("word", "phrase"))


def text_of(folder, sentences=400, between="", seed=0, latin=("abc", "x9")):
    """Files of sentences of Chinese and Latin words; the words are divided by `between`."""
    random, folder = np.random.default_rng(seed), folder / f"text-{seed}"
    folder.mkdir(exist_ok=True)
    words = [*WORDS, *PHRASES, "的", *latin]
    for number in range(4):
        lines = (between.join([*random.choice(words, random.integers(1, 12)), "。"]) for _ in range(sentences // 4))
        (folder / f"{number}.txt").write_text("\n\n".join(lines), "utf-8")
    return f"text:{folder}"


def make(out, vocabulary, text, **options):
    return run(out, text, **({"tokenizer": vocabulary, "language": ("zh",)} | options))


def test_words_and_phrases_are_fields_and_tokens_stay(tmp_path, vocabulary, lists):
    (tmp_path / "a.txt").write_text("研究生命的起源, unaffable中文天气。", "utf-8")
    text = f"text:{tmp_path / 'a.txt'}"
    make(tmp_path / "plain", vocabulary, text)
    manifest, _ = make(tmp_path / "units", vocabulary, text, units=lists)
    assert np.array_equal(stored(tmp_path / "units"), stored(tmp_path / "plain"))
    spelled = "".join(documents(tmp_path / "units")[0][0].split())
    for name, expected in (
        ("word", ["研究生", "命", "的", "起源", ",", "unaffable", "中文", "天气", "。"]),
        ("phrase", ["研", "究", "生命的起源", ",", "unaffable", "中文天气", "。"]),
    ):
        at = np.flatnonzero(stored(tmp_path / "units", f"{name}_starts")).tolist()
        assert [spelled[begin:end] for begin, end in zip(at, [*at[1:], len(spelled)], strict=True)] == expected
    assert manifest["settings"]["units"] == [*lists] and len(manifest["settings"]["lexicons"]) == 2
    assert manifest["parts"][0]["words"] == {"word_starts": 4, "phrase_starts": 2}
    assert not (tmp_path / "units" / "tables" / "word_starts.npy").exists()


def test_text_with_spaces_between_words_has_the_tokens_of_text_without(tmp_path, vocabulary):
    for name, between in (("joined", ""), ("divided", " ")):
        make(tmp_path / name, vocabulary, text_of(tmp_path, 40, between, latin=()), units=("word=spaces",))
    divided = stored(tmp_path / "divided")
    assert np.array_equal(divided, stored(tmp_path / "joined"))
    sizes = np.diff(np.flatnonzero(stored(tmp_path / "divided", "word_starts")))
    assert {*sizes.tolist()} == {1, 2, 3, 4, 5}  # 的, words and phrases


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(source, "SHARD", UNIT)
    monkeypatch.setattr(plan, "MIB", MIB)


def test_processes_shares_an_interruption_and_an_addition_give_the_same_bytes(
    tmp_path, vocabulary, lists, small, monkeypatch
):
    text, more = text_of(tmp_path), text_of(tmp_path, seed=1)
    told = {"units": lists, "part_size": 1}
    make(tmp_path / "whole", vocabulary, text, **told)
    whole = content(tmp_path / "whole")
    assert len([name for name in whole if name.endswith("train/phrase_starts.npy")]) > 1
    make(tmp_path / "two", vocabulary, text, processes=2, **told)
    assert content(tmp_path / "two") == whole
    for share in ("1/2", "0/2"):
        make(tmp_path / "shares", vocabulary, text, part=share, **told)
    make(tmp_path / "shares", vocabulary, text, finish=True, **told)
    assert content(tmp_path / "shares") == whole

    write, made = parts.write_part, []

    def stop_later(*given):
        if made:
            raise KeyboardInterrupt
        made.append(1)
        return write(*given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(parts, "write_part", stop_later)
        make(tmp_path / "killed", vocabulary, text, **told)
    with pytest.raises(UserError, match=r"begun with other settings: units was \[.*\] and is \[\]"):
        make(tmp_path / "killed", vocabulary, text, part_size=1)
    make(tmp_path / "killed", vocabulary, text, **told)
    assert content(tmp_path / "killed") == whole

    shutil.copytree(tmp_path / "whole", tmp_path / "added")
    manifest, _ = append(tmp_path / "added", more.removeprefix("text:"))
    assert manifest["fields"]["phrase_starts"] and manifest["parts"][-1]["words"]["phrase_starts"]
    with pytest.raises(UserError, match="--units .*: the corpus has .*, which --append cannot change"):
        append(tmp_path / "added", more.removeprefix("text:"), units=("word=spaces",))


def test_a_list_that_has_changed_is_told_before_anything_is_made(tmp_path, vocabulary, lists):
    text, list_of_words = text_of(tmp_path, 40), tmp_path / "word.txt"
    make(tmp_path / "c", vocabulary, text, units=lists)
    list_of_words.write_text("中文\n", "utf-8")
    with pytest.raises(UserError, match="holds a corpus with other settings: lexicons was .* and is"):
        make(tmp_path / "c", vocabulary, text, units=lists)
    with pytest.raises(UserError, match="--units forward:.*word.txt: the file has changed since the corpus was made"):
        append(tmp_path / "c", text_of(tmp_path, 40, seed=1).removeprefix("text:"))


def test_a_list_none_of_whose_words_occurs_is_an_error(tmp_path, vocabulary, lists):
    (tmp_path / "phrase.txt").write_text("繁體字\n", "utf-8")
    with pytest.raises(UserError, match=r"--units phrase=forward:.*: no word of two or more Chinese characters is in"):
        make(tmp_path / "c", vocabulary, text_of(tmp_path, 40), units=lists)
    with pytest.raises(UserError, match=r"--units phrase=forward:.*: no word of two or more"):
        make(tmp_path / "d", vocabulary, text_of(tmp_path, 40), units=lists[::-1])


def test_the_version_of_jieba_is_one_of_the_corpus_where_it_is_used(tmp_path, vocabulary, monkeypatch):
    assert {*partial.versions((), ("word=jieba",))} - {*partial.versions((), ("word=spaces",))} == {"jieba"}
    make(tmp_path / "c", vocabulary, text_of(tmp_path, 40), units=("word=jieba",))
    monkeypatch.setattr(partial, "version", lambda name: "0" if name == "jieba" else version(name))
    with pytest.raises(UserError, match="--append: jieba was .* and is 0: use the package or the commit"):
        append(tmp_path / "c", text_of(tmp_path, 40, seed=1).removeprefix("text:"))


@pytest.mark.parametrize("layout", [SegmentPairs, PackedSentences])
@pytest.mark.parametrize("ngrams", [(), MACBERT])
@pytest.mark.parametrize("unit", ["word_starts", "phrase_starts"])
def test_no_unit_is_masked_in_part_and_none_is_special(tmp_path, vocabulary, lists, layout, ngrams, unit):
    make(tmp_path / "c", vocabulary, text_of(tmp_path), units=lists)
    corpus = Corpus(tmp_path / "c")
    batch = rows_of(layout(24, Masking(rate=0.3, unit=unit, ngrams=ngrams)), corpus)
    texts, found = unmasked(batch), chosen(batch)
    spelled, seen = dict(enumerate(HAN, 5)), 0
    for row, masked in zip(texts, found, strict=True):
        line = "".join(spelled.get(token, " ") for token in row.tolist())
        for word in PHRASES if unit == "phrase_starts" else ["研究生", "天气"]:  # no other word overlaps these
            for place in re.finditer(word, line):
                assert masked[slice(*place.span())].all() == masked[slice(*place.span())].any()
                seen += masked[place.start()]
    assert seen > 20
    ordinary = texts >= 5
    budget = np.maximum(np.rint(0.3 * ordinary.sum(axis=1)), 1)
    assert (found.sum(axis=1) <= budget).all() and not (found & ~ordinary).any()
    longest = 5 if unit == "phrase_starts" else 3
    if not ngrams:
        assert (found.sum(axis=1) > budget - longest).all()


def test_runs_of_words_have_the_asked_lengths(tmp_path, vocabulary, lists):
    """By chi-square, with words of one to three characters."""
    make(tmp_path / "c", vocabulary, text_of(tmp_path), units=lists)
    starts = stored(tmp_path / "c", "word_starts")
    starts = starts[: len(starts) // 500 * 500].reshape(-1, 500)
    maskable = np.ones(starts.shape, bool)
    maskable[:, 0] = False
    counts = np.zeros(4)
    for seed in range(100):
        runs = _run_starts(MACBERT, noise.key(seed, 0, np.arange(len(starts))), maskable, starts)
        assert not (runs & maskable & ~starts)[:, 2:].any()
        for begins, words in zip(runs, np.cumsum(starts, axis=1), strict=True):
            sizes = np.diff(words[np.flatnonzero(begins)][1:])  # without the row's last run, which its end cuts
            counts += np.bincount(sizes, minlength=5)[1:5]
    expected = np.array(MACBERT) * counts.sum()
    assert counts.sum() > 5000 and ((counts - expected) ** 2 / expected).sum() < 21.1  # 3 degrees of freedom: 1e-4
