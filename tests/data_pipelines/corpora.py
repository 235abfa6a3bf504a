"""Small corpora for tests, written without `prepare`, and how to read a batch back."""

import shutil
from itertools import count
from unittest import mock

import numpy as np

from data_pipelines.batches import make_examples
from data_pipelines.corpus import Corpus
from data_pipelines.examples.document_stream import DocumentStream
from data_pipelines.examples.layout import Piece
from data_pipelines.formats.source import Source
from data_pipelines.manifest import part_name
from data_pipelines.store.fields import BY_TOKEN
from data_pipelines.store.files import write_json
from data_pipelines.store.job import Job, manifest_of, planned, write_tables
from data_pipelines.store.parts import write_part
from data_pipelines.store.units import DOCUMENT, UnitFiles

SPECIAL = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
FIRST = 5  # the first ordinary token


def numbered(shape):
    """Documents in which every token is another one, counting up from FIRST; shape: sentence lengths per document."""
    token = count(FIRST)
    return [[[next(token) for _ in range(length)] for length in document] for document in shape]


def random_documents(seed, documents, sentences=12, tokens=30, vocab_size=100):
    """Documents of 1 .. `sentences` sentences of 1 .. `tokens` random tokens."""
    generator = np.random.default_rng(seed)

    def sentence():
        return generator.integers(FIRST, vocab_size, generator.integers(1, tokens + 1)).tolist()

    return [[sentence() for _ in range(generator.integers(1, sentences + 1))] for _ in range(documents)]


def write_corpus(
    path, documents, vocab_size=100, heldout=(), word_starts=lambda token: token % 3 != 0, special=SPECIAL, parts=1
):
    """A finished corpus folder at `path`; returns the path.

    documents, heldout: list of documents, each a list of sentences, each a list of token ids (5 .. vocab_size - 1 are
    ordinary). word_starts: says of a token id whether it begins a word. special: role -> token id. parts: how many,
    of as many documents each as can be.
    """
    sources = (Source("text", "tests", None),)
    job = Job(sources, vocab_size, planned(sources, vocab_size, BY_TOKEN), heldout=0.0, parts=parts)
    (path / "tokenizer").mkdir(parents=True)
    write_tables(path, {"word_starts": np.array([word_starts(token) for token in range(vocab_size)])})
    summaries = []
    for number in range(parts):
        share = lambda texts: texts[len(texts) * number // parts : len(texts) * (number + 1) // parts]  # noqa: B023
        unit = path / "unit"
        write_tokens(unit, job, share(documents), share(heldout))
        with mock.patch("data_pipelines.store.parts.choose_held", lambda hashes, *_: hashes == 1):
            summaries.append(write_part(path / part_name(number), [unit], job))
        shutil.rmtree(unit)
    write_json(path / "manifest.json", manifest_of(path, summaries, job, special))
    return path


def write_tokens(folder, job, train, heldout):
    """A unit of work from documents that are tokens."""
    documents = [*train, *heldout]
    sentences = [sentence for document in documents for sentence in document]
    begins = np.zeros(len(documents), DOCUMENT)
    begins["start"] = np.cumsum([0, *map(len, documents)])[: len(documents)]
    begins["hash"] = np.arange(len(documents)) >= len(train)
    files = UnitFiles(folder, job)
    tokens = np.array([token for sentence in sentences for token in sentence], np.int64)
    files.add(np.array([*map(len, sentences)], np.int64), begins, tokens=tokens)
    files.finish(characters=0, problems={}, paths=["tests"], values={}, words={})


def unmasked(batch):
    """The tokens as they were before masking: int32 [batch, length]."""
    tokens = batch["tokens"].copy()
    row, slot = np.nonzero(batch["prediction_weights"])
    tokens[row, batch["prediction_positions"][row, slot]] = batch["prediction_targets"][row, slot]
    return tokens


def whole_stream(corpus, split, epoch=0):
    """The stream of an epoch, of all documents in one window."""
    pieces = [Piece(part, 0, sum(part.sizes[split][of] for of in ("tokens", "documents"))) for part in corpus.parts]
    return DocumentStream(pieces, split, 0, epoch)


def epoch(examples, number=0):
    """All examples as they look in an epoch."""
    return examples.build(number, np.arange(examples.number))


def rows_of(layout, corpus, seed=0, number=0):
    """All rows of the training split as they look in an epoch."""
    return epoch(make_examples(layout, corpus, "train", 4, seed), number)


def equal(batch, other):
    """Two batches are the same, in names, dtypes and every value."""
    same = [np.array_equal(batch[name], other[name]) and batch[name].dtype == other[name].dtype for name in batch]
    return batch.keys() == other.keys() and all(same)


def fits(batch, layout):
    """Whether the arrays are those of the layout's spec."""
    found = {name: (array.shape[1:], array.dtype) for name, array in batch.items()}
    return found == {name: (one.shape, one.dtype) for name, one in layout.spec.items()}


def chosen(batch):
    """bool [batch, length]: where a prediction is asked for."""
    found = np.zeros(batch["tokens"].shape, bool)
    row, slot = np.nonzero(batch["prediction_weights"])
    found[row, batch["prediction_positions"][row, slot]] = True
    return found


def of_streams(folder, documents, heldout=(), eod=99):
    return Corpus(write_corpus(folder / "c", documents, 5000, heldout, special=SPECIAL | {"eod": eod}))
