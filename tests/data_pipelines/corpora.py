"""Small corpora for tests, written without `prepare`, and how to read a batch back."""

import hashlib
import json
from itertools import count

import numpy as np

from data_pipelines.examples.document_stream import DocumentStream
from data_pipelines.examples.layout import Piece

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
    path, documents, vocab_size=100, heldout=(), word_starts=lambda token: token % 3 != 0, special=SPECIAL
):
    """A finished corpus folder at `path`; returns the path.

    documents, heldout: list of documents, each a list of sentences, each a list of token ids (5 .. vocab_size - 1 are
    ordinary). word_starts: says of a token id whether it begins a word. special: role -> token id.
    """
    for split, texts in (("train", documents), ("heldout", heldout)):
        folder = path / split
        folder.mkdir(parents=True)
        sentences = [sentence for text in texts for sentence in text]
        tokens = np.array([token for sentence in sentences for token in sentence], np.uint16)
        np.save(folder / "tokens.npy", tokens)
        np.save(folder / "word_starts.npy", np.array([word_starts(int(token)) for token in tokens], bool))
        np.save(folder / "sentences.npy", np.cumsum([0, *map(len, sentences)], dtype=np.int64))
        np.save(folder / "documents.npy", np.cumsum([0, *map(len, texts)], dtype=np.int64))
        if split == "train":
            np.save(folder / "token_counts.npy", np.bincount(tokens, minlength=vocab_size).astype(np.int64))
    finish_corpus(path, vocab_size, special)
    return path


def finish_corpus(path, vocab_size, special=SPECIAL):
    """Write the manifest of a folder that holds the arrays."""
    files = {}
    for file in sorted(path.glob("*/*.npy")):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        files[str(file.relative_to(path))] = {"bytes": file.stat().st_size, "sha256": digest}
    lines = "".join(f"{name} {file['sha256']}\n" for name, file in files.items())
    manifest = {
        "version": 1,
        "fingerprint": hashlib.sha256(lines.encode()).hexdigest(),
        "vocab_size": vocab_size,
        "special": special,
        "fields": {"tokens": ["uint16", "token"], "word_starts": ["bool", "token"]},
        "splits": {split: _sizes(path / split) for split in ("train", "heldout")},
        "files": files,
        "sources": [],
        "settings": {},
        "counts": {},
    }
    (path / "manifest.json").write_text(json.dumps(manifest))


def _sizes(folder):
    names = ("documents", "sentences", "tokens")
    sizes = {name: len(np.load(folder / f"{name}.npy")) for name in names}
    return {name: size - (name != "tokens") for name, size in sizes.items()}


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


def equal(batch, other):
    """Two batches are the same, in names, dtypes and every value."""
    same = [np.array_equal(batch[name], other[name]) and batch[name].dtype == other[name].dtype for name in batch]
    return batch.keys() == other.keys() and all(same)
