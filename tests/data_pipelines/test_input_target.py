"""Rows of input, delimiter, target and end, as a loop writes them."""

import json

import numpy as np
import pytest

from data_pipelines.__main__ import main
from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.examples.input_target import InputTarget
from data_pipelines.tokenizers import stored
from tests.data_pipelines.corpora import epoch

PAIRS = [("abcdef", "xy"), ("g", "uvw"), ("hijklmnop" * 3, "z"), ("q. r. s.", "t" * 30)]


@pytest.fixture(scope="module", params=[(), ("Law", "Food")], ids=["plain", "with codes"])
def corpus(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("c")
    lines = [{"a": source, "b": target, "d": ("Law", "Food")[len(target) % 2]} for source, target in PAIRS]
    (folder / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["prepare", "--source", f"jsonl:{folder}/x.jsonl", "--field", "a", "--field", "b", "--heldout", "0"]
    command += ["--tokenizer", "bpe", "--specials", "roberta", "--vocab-size", "300", "--out", str(folder / "c")]
    named = [word for code in request.param for word in ("--code", code)]
    assert main([*command, *named, *(["--code-field", "d"] if named else [])]) == 0
    return Corpus(folder / "c")


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
    command = ["prepare", "--out", str(tmp_path / "c"), "--tokenizer", "bpe", "--specials", "roberta"]
    for added, fields in (([], "ab"), (["--append"], "ba")):
        file = tmp_path / f"{fields}.jsonl"
        file.write_text("".join(json.dumps({"a": source, "b": target}) + "\n" for source, target in PAIRS))
        told = [word for field in fields for word in ("--field", field)]
        made = [] if added else ["--heldout", "0", "--vocab-size", "300"]
        assert main([*command, "--source", f"jsonl:{file}", *told, *made, *added]) == 0
    rows = epoch(make_examples(InputTarget(24, target_alone=True), Corpus(tmp_path / "c"), "train", 1, seed=0))
    for array in rows.values():
        np.testing.assert_array_equal(array[: len(PAIRS)], array[len(PAIRS) :])
