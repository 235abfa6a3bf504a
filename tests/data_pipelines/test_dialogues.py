"""Rows of dialogues have their turns one after another, or one turn of another dialogue in place of theirs."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.dialogues import Dialogues, _cap
from data_pipelines.examples.masking import Masking
from data_pipelines.formats import source
from models.families.bert import BertConfig
from pretrain.objectives.masked_language_model import DIALOGUES, MaskedLanguageModel
from pretrain.objectives.objective import Phase
from tests.data_pipelines.corpora import SPECIAL, chosen, equal, fits, rows_of, unmasked, write_corpus
from tests.data_pipelines.prepared import run, splits

CLS, SEP = SPECIAL["cls"], SPECIAL["sep"]
ALONE, NUMBER = 3, 40  # the dialogue that has a single turn; dialogues


@pytest.fixture(scope="module")
def spoken():
    """The turns of each dialogue: sentences of letters, none twice."""
    spell = map("".join, itertools.product("abcdefghij", repeat=3))
    length = lambda at, turn: 1 + (3 * at + 5 * turn) % 4
    turns = lambda at: range(1 if at == ALONE else 2 + at % 5)
    return [
        [[f"{next(spell).capitalize()}." for _ in range(length(at, turn))] for turn in turns(at)]
        for at in range(NUMBER)
    ]


@pytest.fixture(scope="module")
def corpus(spoken, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dialogues")
    text = "\n\n\n".join("\r\n".join(" ".join(turn) for turn in dialogue) for dialogue in spoken)
    (folder / "a.txt").write_text(f"\n{text}\n")
    run(folder / "c", f"dialogue:{folder / 'a.txt'}")
    return Corpus(folder / "c")


def spelled(corpus, tokens):
    vocabulary = (corpus.tokenizer_path / "vocab.txt").read_text("utf-8").split("\n")
    words = (vocabulary[token] for token in tokens.tolist())
    return "".join(word.removeprefix("##") if len(word) > 2 else word for word in words)


def turns_of(corpus, batch):
    """For each row, (its turns as text, their types, the label)."""
    for tokens, types, segments, label in zip(
        unmasked(batch), batch["types"], batch["segments"], batch["next_sentence"], strict=True
    ):
        number = segments.sum()
        assert tokens[0] == CLS and tokens[number - 1] == SEP and not tokens[number:].any() and not types[number:].any()
        ends = np.flatnonzero(tokens == SEP)
        parts = [tokens[begin + 1 : end] for begin, end in itertools.pairwise([0, *ends.tolist()])]
        assert types[:number].tolist() == np.searchsorted(ends, np.arange(number)).tolist()
        yield [spelled(corpus, part) for part in parts], label


def test_rows_are_turns_from_every_second_on_and_fakes_have_one_of_another_dialogue(spoken, corpus):
    said = [["".join(turn) for turn in dialogue] for dialogue in spoken]
    expected = [turns[at : at + 3] for turns in said for at in range(0, len(turns) - 1, 2)]
    of = {turn: number for number, turns in enumerate(said) for turn in turns}
    labels, places, others = [], [], []
    for epoch in range(30):
        batch = rows_of(Dialogues(64), corpus, number=epoch)
        assert fits(batch, Dialogues(64))
        for wanted, (turns, label) in zip(expected, turns_of(corpus, batch), strict=True):
            differ = [at for at, (ours, theirs) in enumerate(zip(turns, wanted, strict=True)) if ours != theirs]
            assert len(differ) == label
            labels.append(label)
            for at in differ:
                places += [at] if len(turns) == 3 else []
                others.append(of[turns[at]])
                assert of[turns[at]] != of[wanted[at]]
    assert chisquare(np.bincount(labels, minlength=2)).pvalue > 1e-3
    assert chisquare(np.bincount(places, minlength=3)).pvalue > 1e-3
    assert {*others} == {*range(NUMBER)}


def test_a_row_is_the_same_whichever_are_built_with_it_and_masks_no_special_token(corpus):
    examples = make_examples(Dialogues(32, Masking(0.5, unit="word_starts")), corpus, "train", 8, seed=5)
    whole = examples.batch(0, np.arange(16))
    assert equal(examples.batch(0, np.array([9, 2])), {name: array[[9, 2]] for name, array in whole.items()})
    assert not (chosen(whole) & (unmasked(whole) < 5)).any() and chosen(whole).any(1).all()


@given(sizes=st.lists(st.integers(0, 30), min_size=3, max_size=3), room=st.integers(6, 40))
def test_a_row_that_is_too_long_loses_the_ends_of_its_longest_turns(sizes, room):
    cap = _cap(np.array([sizes]), np.array([room]))[0]
    kept, left = np.minimum(sizes, cap), np.array(sizes)
    while left.sum() > room:
        left[left.argmax()] -= 1
    assert kept.sum() <= room and (np.abs(np.sort(kept) - np.sort(left)) <= 1).all()
    assert sum(sizes) > room or kept.tolist() == sizes


def test_long_turns_lose_their_ends(corpus, spoken):
    said = {"".join(turn) for dialogue in spoken for turn in dialogue}
    for turns, _ in turns_of(corpus, rows_of(Dialogues(16), corpus)):
        assert all(any(whole.startswith(turn) for whole in said) for turn in turns)


def test_a_dialogue_alone_has_no_label_and_a_layout_without_labels_no_fakes(tmp_path, corpus):
    (tmp_path / "a.txt").write_text("ab\ncd\nef\n")
    run(tmp_path / "c", f"dialogue:{tmp_path / 'a.txt'}")
    assert rows_of(Dialogues(32), Corpus(tmp_path / "c"))["next_sentence"].tolist() == [-1]
    batch = rows_of(Dialogues(64, label=None), corpus)
    assert "next_sentence" not in batch and fits(batch, Dialogues(64, label=None))


def test_files_are_cut_between_dialogues(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "SHARD", 100)
    (tmp_path / "a.txt").write_text("how are you\nfine\n\n" * 50)
    manifest, _ = run(tmp_path / "c", f"dialogue:{tmp_path / 'a.txt'}")
    assert splits(manifest)["train"] == {"documents": 50, "sentences": 100, "tokens": 50 * 13}


def test_what_cannot_be_is_said(tmp_path, corpus):
    plain = Corpus(write_corpus(tmp_path / "c", [[[7, 8]]]))
    (tmp_path / "a.tsv").write_text("a house\tein haus\n" * 9)
    run(tmp_path / "pairs", f"parallel:{tmp_path / 'a.tsv'}", language=("en,de",))
    for other, segments in ((plain, "text"), (Corpus(tmp_path / "pairs"), "source, target")):
        said = f"objective.layout='dialogues': corpus .* documents of {segments}, not the turns of dialogues; prepare"
        with pytest.raises(UserError, match=said):
            make_examples(Dialogues(32), other, "train", 1, seed=0)
    with pytest.raises(UserError, match="model.types=2: dialogues have 3 turns; use 3 or more"):
        MaskedLanguageModel(layout=DIALOGUES).check(BertConfig(), corpus, Phase(1.0, 64, 4))
    with pytest.raises(UserError, match="length 6 leaves no room for text; use at least 7"):
        Dialogues(6)
    ordered = MaskedLanguageModel(layout=DIALOGUES, next_sentence=False, sentence_order=True)
    with pytest.raises(UserError, match=r"^objective.sentence_order=True: turns of dialogues have no such label"):
        ordered.rows(Phase(1.0, 64, 4))
