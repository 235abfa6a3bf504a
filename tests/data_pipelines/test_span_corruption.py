"""Spans of text replaced by sentinels: rows are full, and input and target together are the text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.errors import UserError
from data_pipelines.examples.span_corruption import Corruption, SpanCorruption, sizes_of
from tests.data_pipelines.corpora import SPECIAL, numbered, write_corpus

T5 = Corruption()
VOCAB, SENTINELS, END = 5000, 100, SPECIAL["sep"]
SPECIALS = SPECIAL | {f"sentinel_{number}": VOCAB - 1 - number for number in range(SENTINELS)}


def written(folder, documents, special=SPECIALS):
    return Corpus(write_corpus(folder / "c", documents, VOCAB, special=special))


def layout(length, corruption=T5):
    return SpanCorruption(length, sizes_of(length, corruption).target, corruption)


def text_of(tokens, targets):
    """The text of an input and its target, each with its end, as one who reads them would put it together."""
    spans, text = {}, []
    for token in targets[:-1]:
        if token >= VOCAB - SENTINELS:
            spans[token] = current = []
        else:
            current.append(token)
    assert list(spans) == [token for token in tokens[:-1] if token >= VOCAB - SENTINELS]
    for token in tokens[:-1]:
        text += spans.get(token, [token])
    assert tokens[-1] == targets[-1] == END and all(spans.values())
    return text


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=4, max_size=12),
    length=st.integers(4, 40),
    density=st.floats(0.05, 0.5),
    span=st.floats(1, 8),
)
def test_input_and_target_are_the_text_and_no_row_has_padding(tmp_path_factory, sizes, length, density, span):
    try:
        rows = layout(length, Corruption(density, span))
    except UserError as error:
        assert "no text fills" in str(error)
        return
    corpus, size = written(tmp_path_factory.mktemp("c"), numbered([[n] for n in [*sizes, 200]])), sum(rows.sizes[:2])
    examples = make_examples(rows, corpus, "train", 1, seed=3)
    batch = examples.build(0, np.arange(examples.number))
    texts = [text_of(*row) for row in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True)]
    whole = [token for text in texts[:-1] for token in text]
    rest = (sum(sizes) + 200 + len(sizes) + 1) % size or size  # of the last row, the end, which is as long as others
    whole += texts[-1][-rest:]
    ordinary = [token for token in whole if token != END]
    assert sorted(ordinary) == list(range(5, 5 + sum(sizes) + 200)) and len(texts[-1]) == size
    assert (batch["targets"][:, 0] == SPECIALS["sentinel_0"]).all()
    assert all((batch[name] == 1).all() for name in ("segments", "decoder_segments", "weights"))
    assert (batch["decoder_tokens"][:, 1:] == batch["targets"][:, :-1]).all()
    assert not batch["decoder_tokens"][:, 0].any()


def test_lengths_are_those_of_the_published_rows():
    assert sizes_of(512, T5) == (85, 483, 28) and sizes_of(512, T5).target == 114


def test_every_way_to_cut_spans_is_alike_and_another_epoch_cuts_otherwise(tmp_path):
    rows = layout(14, Corruption(0.3, 2.0))  # 5 tokens in 2 spans, of 1 to 4
    examples = make_examples(rows, written(tmp_path, numbered([[2990]])), "train", 1, seed=0)
    marks = lambda epoch, of: examples.build(epoch, np.arange(examples.number))[of] >= VOCAB - SENTINELS
    second = np.concatenate([marks(epoch, "targets")[:, 1:].argmax(1) for epoch in range(12)])  # tokens of a first span
    share = np.bincount(second, minlength=rows.sizes.noise)[1:] / len(second)
    assert np.abs(share - 1 / (rows.sizes.noise - 1)).max() < 0.03
    before = np.concatenate([marks(epoch, "tokens").argmax(1) for epoch in range(12)])
    assert abs(np.corrcoef(before, second)[0, 1]) < 0.1
    assert (marks(0, "targets") != marks(1, "targets")).any()


def test_what_rows_need_is_asked_for(tmp_path):
    with pytest.raises(UserError, match="target_length=30: .* targets have 29 tokens; set it to 29"):
        SpanCorruption(128, 30)
    with pytest.raises(UserError, match="has 0 sentinels, but rows of length 128 need 7; prepare it with --specials"):
        make_examples(layout(128), written(tmp_path, numbered([[9]]), SPECIAL), "train", 1, seed=0)
    with pytest.raises(UserError, match=r"density=1.0: must be"):
        Corruption(1.0)
    with pytest.raises(UserError, match="no text fills an input of so many tokens .* use 127"):
        sizes_of(128, Corruption(0.9))
    examples = make_examples(layout(128), written(tmp_path / "short", numbered([[9]])), "train", 1, seed=0)
    with pytest.raises(UserError, match="is empty"):
        examples.batch(0, np.arange(1))
