"""Rows of next tokens: documents packed, with a stride, or an input and its target; as a plain loop cuts them."""

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.examples.document_stream import prefix_tokens
from data_pipelines.examples.next_tokens import InputTarget, PackedDocuments, StridedDocuments
from data_pipelines.order import permute
from data_pipelines.tokenizers import stored
from tests.data_pipelines.corpora import SPECIAL, epoch, fits, numbered, write_corpus
from tests.data_pipelines.prepared import command

EOD = 4999
SHAPES = st.lists(st.lists(st.integers(0, 20), max_size=4), min_size=1, max_size=9)


def written(folder, documents, parts=1):
    return Corpus(write_corpus(folder / "c", documents, 5000, special=SPECIAL | {"eod": EOD}, parts=parts))


def slowly(documents, length, separate, restart):
    """Rows of documents (lists of tokens) in their order, by a loop over their tokens."""
    stream = [(token, number, place) for number, text in enumerate(documents) for place, token in enumerate(text)]
    rows = []
    for begin in range(0, len(stream) - 1, length):
        row = stream[begin : begin + length + 1]
        first, padding = row[0], [0] * (length + 1 - len(row))
        numbers = [1 + number - first[1] if separate else 1 for _, number, _ in row[:-1]]
        # A document that has begun in the row before begins anew in this one
        places = [place - (first[2] if number == first[1] else 0) for _, number, place in row[:-1]]
        rows.append(
            {
                "tokens": [token for token, *_ in row[:-1]] + padding,
                "targets": [token for token, *_ in row[1:]] + padding,
                "segments": numbers + padding,
                "weights": [1] * len(numbers) + padding,
                **({"positions": places} if restart else {}),
            }
        )
    return rows


@settings(max_examples=30)
@given(shape=SHAPES, length=st.integers(1, 30), separate=st.booleans(), restart=st.booleans())
def test_rows_are_what_a_loop_cuts_out(tmp_path_factory, shape, length, separate, restart):
    documents = numbered([document for document in shape if any(document)] or [[1]])  # `prepare` stores no others
    corpus = written(tmp_path_factory.mktemp("corpus"), documents)
    found = epoch(make_examples(PackedDocuments(length, separate, restart), corpus, "train", 1, seed=3))
    order = permute(3, 0, len(documents), np.arange(len(documents)))
    texts = [[token for sentence in documents[index] for token in sentence] + [EOD] for index in order]
    expected = slowly(texts, length, separate, restart)
    assert len(found["tokens"]) == len(expected)
    for number, row in enumerate(expected):
        for name, values in row.items():
            of_row = found[name][number, : len(values)] if name == "positions" else found[name][number]
            assert of_row.tolist() == values, name


def test_every_token_of_every_part_is_a_target_once_in_an_epoch_but_a_parts_first(tmp_path):
    documents = numbered([[7, 30], [1], [2, 2, 2], [100], [5], [9, 9]])
    corpus = written(tmp_path, documents, parts=3)
    examples = make_examples(PackedDocuments(16), corpus, "train", 4, seed=0)
    for number in range(2):
        rows = epoch(examples, number)
        targets = rows["targets"][rows["weights"] > 0]
        ordinary = targets[targets != EOD]
        everything = {token for document in documents for sentence in document for token in sentence}
        assert len(set(ordinary)) == len(ordinary) == len(everything) - 3 and set(ordinary) < everything
        assert len(targets) - len(ordinary) == len(documents)
        assert np.array_equal(rows["weights"] > 0, rows["segments"] > 0)


CODED = ("--tokenizer", "bytes", "--heldout", "0", "--code", "Food", "--code", "Law", "--code-field", "domain")


@pytest.mark.parametrize("length", [4, 7, 64])
def test_every_document_and_every_row_begins_with_its_code_and_every_other_token_is_a_target_once(tmp_path, length):
    lines = [{"domain": ("Law", "Food")[number % 2], "text": f"{number}" * (1 + 3 * number)} for number in range(9)]
    assert command(tmp_path / "c", *CODED, lines=lines) == 0
    corpus = Corpus(tmp_path / "c")
    food, law, end = (corpus.special[role] for role in ("code_Food", "code_Law", "sep"))
    rows = epoch(make_examples(PackedDocuments(length, separate=True), corpus, "train", 1, seed=0))
    read = []
    for row in range(len(rows["tokens"])):
        size = int(rows["weights"][row].sum())
        tokens, targets = rows["tokens"][row][:size].tolist(), rows["targets"][row][:size].tolist()
        assert tokens[0] in (food, law) and tokens[1:] == targets[:-1]
        whole = [tokens[0], *targets]
        for before, token in zip(whole, whole[1:], strict=False):
            assert (before == end) == (token in (food, law))
        read.append(targets)
    digits = [token for targets in read for token in targets if token not in (food, law, end)]
    made = {line["text"][0]: line for line in lines}
    assert len(digits) == sum(len(line["text"]) for line in lines)
    assert sum(targets.count(end) for targets in read) == len(lines)
    for tokens in rows["tokens"]:  # the code is the one of the digit that follows
        for code, digit in zip(tokens.tolist(), tokens[1:].tolist(), strict=False):
            if code in (food, law) and digit not in (0, end):
                line = made[chr(digit - 3)]
                assert code == (law if line["domain"] == "Law" else food)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_records_that_name_no_code_are_one_line_and_those_that_do_are_read_alike(tmp_path, capsys, kind):
    lines = [{"domain": ("Law", "Food")[number % 2], "text": f"{number}"} for number in range(4)]
    source = {"lines": lines}
    told = (*CODED,)
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(lines), tmp_path / "lines.parquet")
        source, told = {}, (*CODED, "--source", f"parquet:{tmp_path}/lines.parquet")
    assert command(tmp_path / "c", *told, "--code-field", "none", **source) == 2
    said = capsys.readouterr().err
    assert "--code-field none: " in said and "; it has domain, text" in said and said.count("\n") == 1
    assert command(tmp_path / "c", *told, **source) == 0
    corpus = Corpus(tmp_path / "c")
    tokens = prefix_tokens(corpus.parts[0], "train")
    assert tokens.tolist() == [corpus.special[f"code_{line['domain']}"] for line in lines]
    assert command(tmp_path / "d", *CODED, lines=[{"domain": "Foot", "text": "x"}]) == 2
    assert "its domain is 'Foot', which no --code names; the nearest is 'Food'" in capsys.readouterr().err


def strided(text, length, stride):
    """The loop of https://huggingface.co/docs/transformers/perplexity over a text and the end tokens around it:
    (tokens, targets, which of these are scored) of each row."""
    tokens, done = [EOD, *text, EOD], 0
    for begin in range(0, len(tokens) - 1, stride):
        end = min(begin + length, len(tokens) - 1)
        yield tokens[begin:end], tokens[begin + 1 : end + 1], [place >= done for place in range(begin, end)]
        done = end
        if end == len(tokens) - 1:
            return


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), length=st.integers(1, 12), data=st.data())
def test_rows_with_a_stride_are_the_loops(tmp_path_factory, sizes, length, data):
    stride = data.draw(st.integers(1, length))
    documents = numbered([[size] for size in sizes])
    corpus = written(tmp_path_factory.mktemp("c"), documents, parts=2)
    found = epoch(make_examples(StridedDocuments(length, stride), corpus, "train", 1, seed=0))
    expected = [row for (text,) in documents for row in strided(text, length, stride)]
    assert len(found["tokens"]) == len(expected)
    for number, (tokens, targets, scored) in enumerate(expected):
        padding = [0] * (length - len(tokens))
        for name, values in {"tokens": tokens, "targets": targets, "weights": scored}.items():
            assert found[name][number].tolist() == [*values, *padding], (number, name)
        assert found["segments"][number].tolist() == [1] * len(tokens) + padding
    assert found["weights"].sum() == sum(sizes) + len(sizes)


@settings(max_examples=20)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3), separate=st.booleans(), restart=st.booleans())
def test_the_end_token_before_a_document_is_of_another_one(tmp_path_factory, sizes, separate, restart):
    documents = numbered([[size] for size in sizes])
    corpus = written(tmp_path_factory.mktemp("c"), documents)
    layout = StridedDocuments(8, 3, separate, restart)
    found = epoch(make_examples(layout, corpus, "train", 1, seed=0))
    assert fits(found, layout)
    for number, tokens in enumerate(found["tokens"]):
        first, size = tokens[0] == EOD, (tokens > 0).sum()
        segments = [1] + [1 + (first and separate)] * (size - 1) + [0] * (8 - size)
        assert found["segments"][number].tolist() == segments
        if restart:
            assert found["positions"][number].tolist() == ([0, *range(7)] if first else [*range(8)])


def test_every_row_begins_with_its_documents_code(tmp_path):
    lines = [{"domain": "Law", "text": "abcdefghijk"}, {"domain": "Food", "text": "xyz"}]
    assert command(tmp_path / "c", *CODED, lines=lines) == 0
    corpus = Corpus(tmp_path / "c")
    law, food, end = (corpus.special[role] for role in ("code_Law", "code_Food", "sep"))
    encode = lambda text: stored.load(corpus.tokenizer_path).tokenizer.encode(text, add_special_tokens=False).ids
    found = epoch(make_examples(StridedDocuments(6, 4, separate=True, restart=True), corpus, "train", 1, seed=0))
    assert found["tokens"].tolist() == [
        [law, *encode("abcde")],
        [law, *encode("efghi")],
        [law, *encode("ijk"), 0, 0],
        [food, *encode("xyz"), 0, 0],
    ]
    assert found["targets"].tolist() == [
        encode("abcdef"),
        encode("efghij"),
        [*encode("ijk"), end, 0, 0],
        [*encode("xyz"), end, 0, 0],
    ]
    assert found["weights"].tolist() == [[1] * 6, [0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]]
    assert found["segments"].max() == 1 and (found["positions"] == range(6)).all()


PAIRS = [("abcdef", "xy"), ("g", "uvw"), ("hijklmnop" * 3, "z"), ("q. r. s.", "t" * 30)]


ROBERTA = ("--tokenizer", "bpe", "--specials", "roberta", "--vocab-size", "300", "--heldout", "0")


@pytest.fixture(scope="module", params=[(), ("Law", "Food")], ids=["plain", "with codes"])
def of_pairs(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("c") / "c"
    lines = [{"a": source, "b": target, "d": ("Law", "Food")[len(target) % 2]} for source, target in PAIRS]
    named = [word for code in request.param for word in ("--code", code)]
    field = ["--code-field", "d"] if named else []
    assert command(out, *ROBERTA, "--field", "a", "--field", "b", *named, *field, lines=lines) == 0
    return Corpus(out)


def row_of(of_pairs, source, target, length):
    """(the row and the token after it; for each next token whether it is of the target)."""
    encode = lambda text: stored.load(of_pairs.tokenizer_path).tokenizer.encode(text, add_special_tokens=False).ids
    code = ("Law", "Food")[len(target) % 2]
    source, target, end = encode(source), encode(target), of_pairs.special["sep"]
    lead = [of_pairs.special[f"code_{code}"]] if "code" in of_pairs.fields else []
    source = source[: max(length + 1 - len(lead) - len(target) - 2, 0)]
    row = [*lead, *source, end, *target, end][: length + 1]
    return row, [place > len(lead) + len(source) for place in range(1, len(row))]


@pytest.mark.parametrize("length", [4, 12, 64])
@pytest.mark.parametrize("alone", [False, True])
def test_rows_of_input_and_target_are_the_loops(of_pairs, length, alone):
    layout = InputTarget(length, alone, auxiliary=alone)
    rows = epoch(make_examples(layout, of_pairs, "train", 1, seed=0))
    assert fits(rows, layout)
    for number, (source, target) in enumerate(PAIRS):
        row, of_target = row_of(of_pairs, source, target, length)
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
    layout = InputTarget(24, target_alone=True, auxiliary=False)
    rows = epoch(make_examples(layout, Corpus(tmp_path / "c"), "train", 1, seed=0))
    for array in rows.values():
        np.testing.assert_array_equal(array[: len(PAIRS)], array[len(PAIRS) :])
