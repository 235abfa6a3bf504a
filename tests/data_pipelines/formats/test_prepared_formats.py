"""What formats read is what the corpus holds: the same tokens from every format, pairs, labels and genomes."""

import json
import os
import random

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.examples.packed_sentences import PackedSentences
from data_pipelines.formats import cutting, files
from data_pipelines.formats.problems import REPLACED
from tests.data_pipelines.corpora import epoch, unmasked
from tests.data_pipelines.formats.test_arrow import save
from tests.data_pipelines.prepared import documents, run, stored

WORDS = ["alpha", "Beta.", "gamma\n", "\n\ndelta", "naïve", "中文。", "It  rains", "x" * 40]


@pytest.mark.parametrize("tokenizer", ["bytes", "wordpiece"])
def test_text_jsonl_parquet_and_arrow_of_the_same_documents_give_the_same_corpus(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(cutting, "WINDOW", 1000)
    choose = random.Random(0)
    texts = [" ".join(choose.choices(WORDS, k=length)) for length in (1, 20, 2000, 300)]
    (tmp_path / "in").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "in" / f"{number}.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    save(tmp_path / "set", texts)
    specs = f"text:{tmp_path}/in", f"jsonl:{tmp_path}/a.jsonl", f"parquet:{tmp_path}/a.parquet", f"arrow:{tmp_path}/set"
    made = [tmp_path / f"out-{number}" for number in range(len(specs))]
    for spec, out in zip(specs, made, strict=True):
        run(out, spec, tokenizer=tokenizer, vocab_size=300)
    for name in ("tokens", "sentences", "documents"):
        found = [stored(out, name) for out in made]
        assert all(np.array_equal(found[0], other) for other in found[1:]), name
    assert len(stored(made[0], "documents")) == len(texts) + 1


def test_pairs_stay_pairs_in_a_corpus(tmp_path):
    (tmp_path / "a.en").write_text("One. Two.\nThree.\n")
    (tmp_path / "a.de").write_text("Eins. Zwei.\nDrei.\n")
    run(tmp_path / "out", f"parallel:{tmp_path}/a.en,{tmp_path}/a.de")
    assert documents(tmp_path / "out") == [["One .", "Two .", "Eins .", "Zwei ."], ["Three .", "Drei ."]]
    names = Corpus(tmp_path / "out").fields["segments"].values
    roles = [names[number] for number in stored(tmp_path / "out", "segments")]
    assert roles == ["source", "source", "target", "target", "source", "target"]


def test_labels_lie_on_the_tokens_of_their_words(tmp_path):
    (tmp_path / "a.conll").write_text("Ann B-PER\nruns O\n. O\n\nOslo B-LOC\n")
    run(tmp_path / "out", f"conll:{tmp_path}/a.conll")
    values = Corpus(tmp_path / "out").fields["labels"].values
    labels = [values[number] for number in stored(tmp_path / "out", "labels")]
    assert labels == ["B-PER"] * 3 + ["O"] * 5 + ["B-LOC"] * 4


def test_a_genome_is_whole_in_a_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(cutting, "WINDOW", 1000)
    monkeypatch.setattr(files, "BLOCK", 300)
    genome = "".join(random.Random(0).choices("ACGT", k=20_000))
    lines = [genome[at : at + 80] for at in range(0, len(genome), 80)]
    (tmp_path / "a.fa").write_text(">header of it\n" + "\n".join(lines))
    run(tmp_path / "out", f"fasta:{tmp_path}/a.fa", tokenizer="bytes")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer" / "tokenizer.json"))
    assert tokenizer.decode(stored(tmp_path / "out").tolist()) == genome
    assert len(stored(tmp_path / "out", "documents")) == 2


@pytest.mark.parametrize("vocab_size", [261, 400], ids=["of bytes", "of merges"])
def test_a_genome_makes_rows_with_masks_of_which_no_token_is_unknown(tmp_path, vocab_size):
    """Byte-level BPE has all special tokens that masking wants; 261 tokens are the bytes and these alone."""
    genome = "".join(random.Random(0).choices("ACGT", k=20_000)) + "N" * 50 + "ACGT" * 3000
    (tmp_path / "a.fa").write_text(f">one\n{genome.lower()}\n")
    run(tmp_path / "out", f"fasta:{tmp_path}/a.fa", tokenizer="bpe", vocab_size=vocab_size, heldout=0.0)
    corpus = Corpus(tmp_path / "out")
    examples = make_examples(PackedSentences(4096), corpus, "train", 1, seed=0)
    rows = unmasked(epoch(examples))
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer_path / "tokenizer.json"))
    assert "".join(map(tokenizer.decode, rows.tolist())) == genome.replace("N", "")
    assert corpus.vocab_size == vocab_size and corpus.special["unk"] not in rows
    assert len(stored(tmp_path / "out", "documents")) == 3


def test_names_that_are_not_utf8_change_no_result_and_are_reported(tmp_path):
    folder = os.fsencode(tmp_path) + b"/d\xe9"
    os.mkdir(folder)
    for name, content in ((b"/caf\xe9.txt", b"Bad \xff bytes."), (b"/\xff.txt.gz", b"no archive")):
        with open(folder + name, "wb") as file:
            file.write(content)
    manifest, printed = run(tmp_path / "out", f"text:{os.fsdecode(folder)}")
    assert len(documents(tmp_path / "out")) == 1
    assert manifest["counts"][REPLACED]["first"] == f"{tmp_path}/d\\xe9/caf\\xe9.txt"
    assert f"{tmp_path}/d\\xe9/\\xff.txt.gz: Not a gzipped file" in printed
