"""Rows of input, delimiter, target and end, as a loop writes them."""

import numpy as np
import pytest

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.examples.input_target import InputTarget
from data_pipelines.tokenizers import stored
from tests.data_pipelines.corpora import epoch
from tests.data_pipelines.prepared import command

PAIRS = [("abcdef", "xy"), ("g", "uvw"), ("hijklmnop" * 3, "z"), ("q. r. s.", "t" * 30)]


ROBERTA = ("--tokenizer", "bpe", "--specials", "roberta", "--vocab-size", "300", "--heldout", "0")


@pytest.fixture(scope="module", params=[(), ("Law", "Food")], ids=["plain", "with codes"])
def corpus(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("c") / "c"
    lines = [{"a": source, "b": target, "d": ("Law", "Food")[len(target) % 2]} for source, target in PAIRS]
    named = [word for code in request.param for word in ("--code", code)]
    field = ["--code-field", "d"] if named else []
    assert command(out, *ROBERTA, "--field", "a", "--field", "b", *named, *field, lines=lines) == 0
    return Corpus(out)


def written(corpus, source, target, length):
    """(the row and the token after it; for each next token whether it is of the target)."""
    encode = lambda text: stored.load(corpus.tokenizer_path).tokenizer.encode(text, add_special_tokens=False).ids
    code = ("Law", "Food")[len(target) % 2]
    source, target, end = encode(source), encode(target), corpus.special["sep"]
    lead = [corpus.special[f"code_{code}"]] if "codes" in corpus.fields else []
    source = source[: max(length + 1 - len(lead) - len(target) - 2, 0)]
    row = [*lead, *source, end, *target, end][: length + 1]
    return row, [place > len(lead) + len(source) for place in range(1, len(row))]


@pytest.mark.parametrize("length", [4, 12, 64])
@pytest.mark.parametrize("alone", [False, True])
def test_rows_are_the_loops(corpus, length, alone):
    layout = InputTarget(length, alone, auxiliary=alone)
    rows = epoch(make_examples(layout, corpus, "train", 1, seed=0))
    assert {name: (array.shape[1:], array.dtype) for name, array in rows.items()} == layout.spec
    for number, (source, target) in enumerate(PAIRS):
        row, of_target = written(corpus, source, target, length)
        padding = [0] * (length + 1 - len(row))
        assert rows["tokens"][number].tolist() == row[:-1] + padding
        assert rows["targets"][number].tolist() == row[1:] + padding
        assert rows["segments"][number].tolist() == [1] * (len(row) - 1) + padding
        expected = np.array(of_target if alone else [1] * len(of_target), float)
        assert rows["weights"][number].tolist() == [*expected, *padding]
        if alone:
            assert rows["auxiliary_weights"][number].tolist() == [*(1 - expected), *padding]


def test_texts_added_with_the_fields_the_other_way_round_keep_their_input_and_target(tmp_path):
    lines = [{"a": source, "b": target} for source, target in PAIRS]
    assert command(tmp_path / "c", *ROBERTA, "--field", "a", "--field", "b", lines=lines) == 0
    assert command(tmp_path / "c", "--append", "--field", "b", "--field", "a", lines=lines) == 0
    rows = epoch(make_examples(InputTarget(24, target_alone=True), Corpus(tmp_path / "c"), "train", 1, seed=0))
    for array in rows.values():
        np.testing.assert_array_equal(array[: len(PAIRS)], array[len(PAIRS) :])
