"""Rows in memory: their lengths in buckets, and what a batch has of them."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from data_pipelines.batches import make_examples
from data_pipelines.errors import UserError
from data_pipelines.examples.layout import Feature
from data_pipelines.tokenizers.made import Made
from finetune.files import as_text, records
from finetune.patterns import served, shortest
from finetune.rows import Row, TaskRows, buckets, joined, with_rows
from finetune.tasks.classify import Classify, Labelled
from finetune.texts import encoded, ending
from models.attention.patterns.pattern import Pattern
from models.families.bert import BertConfig
from models.families.bigbird import BigBirdConfig
from models.families.longformer import LongformerConfig
from models.families.xlnet import XLNetConfig


@pytest.mark.parametrize("seed", range(4))
def test_buckets_pad_rows_to_the_fewest_tokens(seed):
    lengths = np.random.default_rng(seed).integers(1, 60, 50)
    found = buckets(lengths, 3)
    ends = [*range(8, 65, 8)]

    def padded(chosen):
        return sum(min(end for end in chosen if end >= length) for length in lengths)

    possible = [one for n in (1, 2, 3) for one in itertools.combinations(ends, n) if one[-1] >= lengths.max()]
    assert buckets(lengths, 3, lengths.max())[-1] == lengths.max()
    assert len(found) <= 3 and padded(found) == min(map(padded, possible))


@pytest.mark.parametrize(
    ("numbers", "ends"), [((9, 9, 9), [8, 16, 24]), ((2, 9, 3), [24]), ((9, 3, 4), [8, 24]), ((1, 9, 5), [16, 24])]
)
def test_no_bucket_has_too_few_rows_for_a_step(numbers, ends):
    lengths = np.repeat([8, 16, 24], numbers)
    assert with_rows([8, 16, 24], lengths, 5) == ends


def test_rows_of_a_bucket_come_padded_once_an_epoch():
    sizes = [3, 9, 8, 5, 16, 2]
    rows = [Row(np.full(n, n), np.ones(n)) for n in sizes]
    rows = joined(rows, {"number": np.arange(6)}, {"of": sizes_of(sizes)})
    layout = TaskRows(8, 2, (("number", Feature(())),), (("of", Feature((), np.int32, -1)),))
    part = type("Part", (), {"rows": {"train": rows}, "sizes": {"train": {"documents": 6, "tokens": 43}}})()
    corpus = type("Corpus", (), {"parts": (part,), "path": "here", "special": {}})()
    examples = make_examples(layout, corpus, "train", 3, 0)
    batch = examples.batch(0, np.arange(3))
    assert sorted(batch["number"].tolist()) == [0, 2, 3]  # not those of 2, 9 and 16 tokens
    for index, number in enumerate(batch["number"]):
        size = sizes[number]
        assert batch["tokens"][index].tolist() == [size] * size + [0] * (8 - size)
        assert batch["segments"][index].tolist() == [1] * size + [0] * (8 - size)
        assert batch["of"][index].tolist() == [*range(size), *[-1] * (8 - size)]
    assert sorted(examples.batch(1, np.arange(3))["number"].tolist()) == [0, 2, 3]


def sizes_of(sizes):
    return [np.arange(n) for n in sizes]


@pytest.fixture
def made():
    """A tokenizer of two words that ends texts."""
    plain = Made(Tokenizer(WordLevel({"?": 0, "a": 1, "b": 2}, "?")), {"unk": 0}, {})
    plain.tokenizer.pre_tokenizer = Whitespace()
    return ending(plain)


def test_a_causal_row_ends_each_text_and_the_longer_one_is_cut(made, caplog):
    text, other, end = "a b a a", "b " * 9, made.special["eod"]
    assert end == 3  # a further token, where none ends texts
    (one, both) = encoded(made, [(text,), (text, other)], ["here", "there"], 10, at_end=True)
    said = "texts longer than --length 10 tokens, which are cut: 1, the first is there"
    assert [record.getMessage() for record in caplog.records] == [said]
    assert one == ([1, 2, 1, 1, end], [0] * 5, 4)
    assert both == ([1, 2, 1, 1, end, 2, 2, 2, 2, end], [0] * 10, 9)


def test_windows_of_a_text_overlap_and_leave_nothing_out(made, caplog):
    task, (text, short), end = Classify(windows="mean", stride=3, causal=True), ("a b a a b b a", "b"), 3
    examples = [Labelled("there", (text,), "x"), Labelled("here", (short,), "y")]
    rows = task.encode(examples, made, ("x", "y"), 5)
    whole = [1, 2, 1, 1, 2, 2, 1]
    assert np.split(rows.tokens, rows.starts[1:-1])[0].tolist() == [*whole[:4], end]
    assert rows.tokens[5:].tolist() == [*whole[3:], end, 2, end]
    assert [rows.columns[name].tolist() for name in ("text", "labels", "place")] == [[0, 0, 1], [0, 0, 1], [4, 4, 1]]
    said = "texts longer than --length 5 tokens, which are split into windows: 1, the first is there"
    assert [record.getMessage() for record in caplog.records] == [said]
    halves = dataclasses.replace(task, stride=0).encode(examples, made, ("x", "y"), 5)
    assert halves.lengths.tolist() == [5, 5, 4, 2]
    with pytest.raises(UserError, match="--length 5: fits 4 tokens of a text, but --stride is 5; raise"):
        dataclasses.replace(task, stride=5).encode(examples, made, ("x", "y"), 5)


def test_records_of_each_kind_of_file_are_the_same(tmp_path):
    import pyarrow
    from pyarrow import parquet

    rows = [{"text": 'a "quoted" one, 中文', "label": "x"}, {"text": "b", "label": "y"}]
    (tmp_path / "a.tsv").write_text("text\tlabel\r\n" + "".join(f"{r['text']}\t{r['label']}\r\n" for r in rows))
    (tmp_path / "a.csv").write_text('text,label\n"a ""quoted"" one, 中文",x\nb,y\n')
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.tsv", "a.csv", "a.jsonl", "a.parquet"):
        assert [record.fields for record in records(tmp_path / name, {"text": "--text", "label": "--label"})] == rows


@pytest.mark.parametrize("suffix", ["tsv", "csv"])
def test_a_blank_line_between_records_of_one_column_is_not_left_out(suffix, tmp_path):
    file = tmp_path / f"a.{suffix}"
    file.write_text("text\na\n\n\n")
    assert [record.fields for record in records(file, {"text": "--text"})] == [{"text": "a"}]
    file.write_text("text\na\n\nb\n")
    with pytest.raises(UserError, match=r"a\.\wsv, line 3: is blank; give it a text"):
        records(file, {"text": "--text"})
    file.write_text({"tsv": "text\tlabel\n\na\tx\n", "csv": "text,label\n\na,x\n"}[suffix])
    assert [record.where for record in records(file, {"text": "--text"})] == [f"{file}, line 3"]


def test_what_is_no_number_is_missing_and_a_list_is_no_text(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "label": NaN}\n')
    with pytest.raises(UserError, match="line 1: has no label, but has text"):
        records(file, {"text": "--text", "label": "--label"})
    (record,) = records(file, {"text": "--text"})
    assert record.fields["label"] is None
    assert [as_text(record, "text", value) for value in ("a", 1, "")] == ["a", "1", ""]
    for value in (None, float("nan"), ["a"], {"a": 1}):
        with pytest.raises(UserError, match="line 1: text=.* is not a text; correct it"):
            as_text(record, "text", value)
    with pytest.raises(UserError, match="line 1: text has a lone surrogate, which is no character; correct it"):
        as_text(record, "text", "\ud83d the")


def test_a_text_in_quotes_may_be_long(tmp_path):
    (tmp_path / "a.csv").write_text(f"text\n{'a' * 200_000}\n")
    assert len(records(tmp_path / "a.csv", {"text": "--text"})[0].fields["text"]) == 200_000


def test_a_pattern_serves_rows_that_are_short_for_it():
    def sparse(name, block, kind):
        return kind(pattern=Pattern(name, block=block))

    bigbird, longformer = sparse("bigbird", 16, BigBirdConfig), sparse("longformer", 128, LongformerConfig)
    assert served(bigbird, 176).pattern.name == "dense"  # as transformers' up to 11 blocks
    assert served(bigbird, 184) == bigbird and shortest(bigbird, 184) == 120  # 8 blocks
    short = served(longformer, 40)
    assert short == dataclasses.replace(longformer, pattern=Pattern("longformer", block=40))
    assert shortest(short, 40) == 40 and shortest(longformer, 200) == 128
    for config in (BertConfig(), XLNetConfig()):
        assert served(config, 8) == config and shortest(config, 64) == 8
